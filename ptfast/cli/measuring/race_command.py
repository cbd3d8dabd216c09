"""`ptfast race`: reads what is asked for, and has it raced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.cli.flags import read_number_of
from ptfast.core.errors import ConfigError


def race(flags: dict[str, Any], arguments: list[str]) -> int:
    """Race the arms that the arguments mean.

    Raises:
        ConfigError: C016 without a target or a second arm, C005 for a target or a number of seeds that is
            none, C014 under torchrun; whatever is wrong with the config of an arm.
    """
    from ptfast.measure.race.race_arms import build_arms
    from ptfast.measure.race.race_results import Target

    if "--target" not in flags:
        hint = "Usage: ptfast race [+recipe=NAME] key=a,b --target accuracy:0.9"
        raise ConfigError("C016", "an argument is missing", key="--target", suggestion=hint)
    target = Target.parse(flags["--target"])
    num_seeds = int(read_number_of("--seeds", flags.get("--seeds", "5"), 1))
    arms = build_arms(arguments, flags.get("--arms"))
    from ptfast.measure.race.racer import race

    given = [name if value is True else f"{name}={value}" for name, value in flags.items()]
    return race(
        arms,
        target,
        num_seeds=num_seeds,
        command=["ptfast", "race", *arguments, *given],
        tunes="--tune-lr" in flags,
        out=Path(flags["--out"]).expanduser() if "--out" in flags else None,
    )
