"""`ptfast ablate`: reads what is asked for, and calls the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.cli.flags import read_seconds
from ptfast.cli.typed_config import read_typed
from ptfast.config.catalogue import technique_named
from ptfast.core.errors import COMMAND_LINE, ConfigError


def ablate(flags: dict[str, Any], arguments: list[str]) -> int:
    """Measure what techniques are worth for the config that the arguments mean.

    Raises:
        ConfigError: C003 for a technique that there is none of, C005 for a budget that makes no sense.
        PtfastError: whatever is wrong with the config, or stops its first steps.
    """
    options: dict[str, Any] = {"compiles": "--compile" in flags}
    options["budget_s"] = read_seconds(flags, "--budget", "10m")
    if "--only" in flags:
        options["only"] = [technique_named(name, "--only") for name in flags["--only"].split(",")]
    if "--out" in flags:
        options["out"] = Path(flags["--out"]).expanduser()
    if "--claims" in flags:
        from ptfast.measure.claims.hold_claims import hold_claims

        if other := [*arguments, *(flag for flag in ("--only", "--compile") if flag in flags)]:
            what, hint = "claims bring their own models and data", "Leave it out, or leave out --claims"
            raise ConfigError("C011", what, key=other[0], place=COMMAND_LINE, suggestion=hint)
        return hold_claims(budget_s=options["budget_s"], out=options.get("out"))
    composed, config = read_typed(arguments)
    with composed.naming_places():
        from ptfast.measure.ablate.ablate_run import ablate as measure

        return measure(composed, config, arguments, **options)
