"""`ptfast find`: reads what is asked for, and calls the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.cli.flags import read_number_of
from ptfast.cli.typed_config import read_typed
from ptfast.core.errors import ConfigError
from ptfast.core.sections.nearest_name import did_you_mean

FLAGS: dict[str, dict[str, tuple[str, float]]] = {
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
SEARCHES = tuple(FLAGS)


def find(flags: dict[str, Any], arguments: list[str]) -> int:
    """Find a number for the config that the arguments mean.

    Raises:
        ConfigError: C003 or C016 for what cannot be found, C005 for flags that make no sense.
        PtfastError: whatever is wrong with the config, or stops its first steps.
    """
    usage = f"Usage: ptfast find {'|'.join(SEARCHES)} [+recipe=NAME] [key=value ...]"
    if not arguments or "=" in arguments[0]:
        raise ConfigError("C016", "an argument is missing", key="find", suggestion=usage)
    what, *words = arguments
    if what not in SEARCHES:
        hint = did_you_mean(what, SEARCHES) or usage
        raise ConfigError("C003", "no such search", key="find", value=what, suggestion=hint)
    options: dict[str, Any] = {}
    least = dict(FLAGS[what])
    if what == "batch" and "--noise" in flags:
        least["--steps"] = ("num_steps", 20)
    switches = ("--noise", "--checkpointing") if what == "batch" else ()
    options |= {flag.removeprefix("--"): True for flag in switches if flag in flags}
    numbers = [flag for known in FLAGS.values() for flag in known]
    for flag in dict.fromkeys([*numbers, "--noise", "--checkpointing"]):
        if flag in flags and flag not in (*least, *switches):
            hint = f"ptfast find {what} takes {', '.join([*least, *switches])}"
            if what == "batch" and flag == "--steps":
                hint = "It is for --noise"
            raise ConfigError("C015", f"does not apply to find {what}", key=flag, suggestion=hint)
    for flag, (name, lowest) in least.items():
        if flag in flags:
            options[name] = read_number_of(flag, flags[flag], lowest)
    for flag, name in {"--out": "out", "--write": "write"}.items():
        if flag in flags:
            options[name] = Path(flags[flag]).expanduser()
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
