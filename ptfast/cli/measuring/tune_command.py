"""`ptfast tune`: reads what is asked for, and calls the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.cli.flags import read_seconds
from ptfast.cli.typed_config import read_typed


def tune(flags: dict[str, Any], arguments: list[str]) -> int:
    """Search for the settings under which the config that the arguments mean trains fastest here.

    Raises:
        ConfigError: C005 for a budget that is none.
        PtfastError: whatever is wrong with the config, or stops its first steps.
    """
    budget_s = read_seconds(flags, "--budget", "5m")
    composed, config = read_typed(arguments)
    with composed.naming_places():
        from ptfast.measure.tune.tuner import tune

        return tune(
            config,
            arguments,
            budget_s=budget_s,
            compiles="--compile" in flags,
            batches="--batch" in flags,
            write=Path(flags.get("--write", "tuned.yaml")).expanduser(),
            out=Path(flags["--out"]).expanduser() if "--out" in flags else None,
        )
