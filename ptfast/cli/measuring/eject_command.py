"""`ptfast eject`: reads what is asked for, and has the script written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.cli.typed_config import read_typed
from ptfast.core.errors import ConfigError


def eject(flags: dict[str, Any], arguments: list[str]) -> int:
    """Write the run that the arguments mean as a script.

    Raises:
        ConfigError: C016 without a file to write to, C011 for what no script is made of.
        PtfastError: whatever stops the run before its first step.
    """
    if "--out" not in flags:
        hint = "Usage: ptfast eject [+recipe=NAME] [key=value ...] --out train.py"
        raise ConfigError("C016", "an argument is missing", key="--out", suggestion=hint)
    out = Path(flags["--out"]).expanduser()
    composed, config = read_typed(arguments)
    with composed.naming_places():
        from ptfast.measure.eject.ejector import eject as write_script

        command = " ".join(["ptfast train", *arguments])
        return write_script(config, composed.tree, command, out)
