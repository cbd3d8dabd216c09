"""The commands that measure: they read flags and arguments, and call the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.cli.flags import read_number_of, read_seconds
from ptfast.cli.typed_config import read_typed
from ptfast.core.errors import COMMAND_LINE, ConfigError
from ptfast.core.sections.nearest_name import did_you_mean

NUMBERS: dict[str, dict[str, tuple[str, float]]] = {
    "lr": {
        "--from": ("lowest", 0.0),
        "--to": ("highest", 0.0),
        "--steps": ("num_steps", 20),
        "--trial-steps": ("trial_steps", 20),
    },
    "batch": {"--from": ("smallest", 1), "--to": ("largest", 1), "--seconds": ("seconds", 0.0)},
    "workers": {"--to": ("most", 1), "--seconds": ("seconds", 0.0)},
}
"""Flags of each search that take a number: what the number is called, and its least value."""
SEARCHES = tuple(NUMBERS)


def find(flags: dict[str, Any], arguments: list[str]) -> int:
    """Find a number for the config that the arguments mean.

    Raises:
        ConfigError: C003 or C016 for what cannot be found, C005 for flags that make no sense.
        PtfastError: whatever is wrong with the config, or stops its first steps, as for the commands below.
    """
    usage = f"Usage: ptfast find {'|'.join(SEARCHES)} [+recipe=NAME] [key=value ...]"
    if not arguments or "=" in arguments[0]:
        raise ConfigError("C016", "an argument is missing", key="find", suggestion=usage)
    what, *words = arguments
    if what not in SEARCHES:
        hint = did_you_mean(what, SEARCHES) or usage
        raise ConfigError("C003", "no such search", key="find", value=what, suggestion=hint)
    least = dict(NUMBERS[what])
    if what == "batch" and "--noise" in flags:
        least["--steps"] = ("num_steps", 20)
    switches = ("--noise", "--checkpointing") if what == "batch" else ()
    for flag in flags:
        if flag not in (*least, *switches, "--out", "--write"):
            hint = f"ptfast find {what} takes {', '.join([*least, *switches])}"
            if what == "batch" and flag == "--steps":
                hint = "It is for --noise"
            raise ConfigError("C015", f"does not apply to find {what}", key=flag, suggestion=hint)
    options: dict[str, Any] = {flag.removeprefix("--"): True for flag in switches if flag in flags}
    for flag, (name, lowest) in least.items():
        if flag in flags:
            options[name] = read_number_of(flag, flags[flag], lowest)
    options |= {flag.removeprefix("--"): _path(flags, flag) for flag in ("--out", "--write") if flag in flags}
    composed, config = read_typed(words)
    with composed.naming_places():
        if what == "lr":
            from ptfast.measure.lr.lr_finder import find_lr

            return find_lr(composed, config, words, **options)
        if what == "workers":
            from ptfast.measure.loader.loader_finder import find_workers

            return find_workers(composed, config, words, **options)
        from ptfast.measure.batch.batch_finder import find_batch

        return find_batch(composed, config, words, **options)


def ablate(flags: dict[str, Any], arguments: list[str]) -> int:
    """Measure what techniques are worth for the config that the arguments mean.

    Raises:
        ConfigError: C003 for a technique that there is none of, C005 for a budget that makes no sense.
    """
    budget_s, out = read_seconds(flags, "--budget", "10m"), _path(flags, "--out")
    if "--claims" in flags:
        from ptfast.measure.claims.hold_claims import hold_claims

        if other := [*arguments, *(flag for flag in ("--only", "--compile") if flag in flags)]:
            what, hint = "claims bring their own models and data", "Leave it out, or leave out --claims"
            raise ConfigError("C011", what, key=other[0], place=COMMAND_LINE, suggestion=hint)
        return hold_claims(budget_s=budget_s, out=out)
    from ptfast.config.catalogue import technique_named

    names = flags["--only"].split(",") if "--only" in flags else []
    only = [technique_named(name, "--only") for name in names]
    composed, config = read_typed(arguments)
    with composed.naming_places():
        from ptfast.measure.ablate.ablate_run import ablate

        compiles = "--compile" in flags
        return ablate(composed, config, arguments, budget_s=budget_s, only=only, compiles=compiles, out=out)


def audit(flags: dict[str, Any], arguments: list[str]) -> int:
    """Audit the config that the arguments mean.

    Raises:
        ConfigError: C005 for a budget that is none.
    """
    budget_s = 0.0 if flags.get("--budget") == "0" else read_seconds(flags, "--budget", "2m")
    composed, config = read_typed(arguments)
    with composed.naming_places():
        from ptfast.measure.audit.audit_run import audit

        fix, strict, out = _path(flags, "--fix"), "--strict" in flags, _path(flags, "--out")
        return audit(config, arguments, budget_s=budget_s, strict=strict, fix=fix, out=out)


def race(flags: dict[str, Any], arguments: list[str]) -> int:
    """Race the arms that the arguments mean.

    Raises:
        ConfigError: C016 without a target or a second arm, C005 for a target or a number of seeds that is
            none; whatever is wrong with the config of an arm.
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
    command, tunes = ["ptfast", "race", *arguments, *given], "--tune-lr" in flags
    return race(arms, target, num_seeds=num_seeds, command=command, tunes=tunes, out=_path(flags, "--out"))


def _path(flags: dict[str, Any], name: str) -> Path | None:
    return Path(flags[name]).expanduser() if name in flags else None
