"""Compiled code kept where runs to come find it."""

from __future__ import annotations

import hashlib
import os

from ptfast.core.devices import cpu_facts
from ptfast.core.machine import cache_folder

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps compiled code; the user's own choice is left alone."""


def keep_code() -> None:
    """Have torch keep what this process compiles in `$PTFAST_CACHE/compiled`, and look there first.

    Torch's own place is in `/tmp`, which a machine or container that starts afresh does not have, nor another
    node. Each kind of CPU gets a folder of its own: the code is made for it, and torch does not tell them
    apart. It is not the run directory, where a state from elsewhere could bring code along. Torch's own place
    stays where nothing can be written.

    Cost: disk space, a few MB for a model; nothing is ever deleted.
    """
    flags = "".join(cpu_facts("flags", "Features")[:1])
    folder = cache_folder() / "compiled" / hashlib.sha256(flags.encode()).hexdigest()[:12]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK) and not os.environ.get(VARIABLE):
        os.environ[VARIABLE] = str(folder)
