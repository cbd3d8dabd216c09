"""A command, and its `--flags`: everything else on a command line is config."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.core.errors import COMMAND_LINE, ConfigError, is_secret

CONFIG_DIR = "--config-dir"


@dataclass(frozen=True)
class Command:
    """One word after `ptfast`.

    Args:
        usage: its arguments, as `--help` shows them.
        summary: one line.
        run: takes the flags given and the other arguments; returns the exit code.
        flags: what may be given with dashes, and whether it takes a value.
        alone: it starts what ranks it needs by itself, and is refused under a user's own torchrun.
        max_arguments: how many other arguments it reads; None for any number.
        min_arguments: how many it cannot do without.
    """

    usage: str
    summary: str
    run: Callable[[dict[str, Any], list[str]], int]
    flags: dict[str, bool]
    max_arguments: int | None = None
    min_arguments: int = 0
    alone: bool = False


def read_flags(words: Sequence[str], known: dict[str, bool]) -> tuple[dict[str, Any], list[str]]:
    """Part `--flags` from everything else.

    Args:
        known: flag -> whether a value follows, as `--flag value` or `--flag=value`; those of every command
            are known besides.

    Raises:
        ConfigError: C015 for a flag that is not known, or is not followed by its value; C006 for one that is
            given two values.
    """
    known = {**known, CONFIG_DIR: True}
    flags: dict[str, Any] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = {"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-i": "--info"}.get(name, name)
        if not name.startswith("-") or name == "-":
            others.append(word)
        elif name == "--help":
            flags[name] = True
        elif name not in known:
            raise _unknown_flag(name, value if equals else next(iter(rest), None), known)
        elif name in flags and known[name]:
            raise ConfigError("C006", "given twice", key=name, place=COMMAND_LINE, suggestion="Keep one")
        elif not known[name]:
            flags[name] = True
        else:
            if not equals:
                value = rest.pop(0) if rest else ""
            if not value:
                raise ConfigError("C015", "needs a value", key=name, suggestion=f"Write {name} VALUE")
            flags[name] = value
    return flags, others


def search_in(folder: str) -> None:
    """Look for options and recipes in `folder` first, in this process and those that it starts.

    Raises:
        ConfigError: C001, there is no such folder.
    """
    from ptfast.config.files import paths

    path = Path(folder).expanduser().absolute()
    if not path.is_dir():
        raise ConfigError("C001", "no such folder", key=CONFIG_DIR, value=folder, place=COMMAND_LINE)
    os.environ[paths.CONFIG_DIR] = str(path)


def read_seconds(flags: dict[str, Any], name: str, default: str) -> float:
    """The seconds that a flag such as `--budget 5m` gives; a bare number is seconds.

    Raises:
        ConfigError: C005 for anything else, and for no time at all.
    """
    from ptfast.core.durations import Duration

    text = flags.get(name, default)
    try:
        seconds = Duration.parse(text, "seconds").seconds
    except ValueError as error:
        raise ConfigError("C005", str(error), key=name, value=text, place=COMMAND_LINE) from error
    if not seconds:
        raise ConfigError("C005", "expected a time above 0", key=name, value=text, place=COMMAND_LINE)
    return seconds


def read_number_of(flag: str, text: str, least: float = 0.0, hint: str | None = None) -> float:
    """The number above 0, and of at least `least`, that a flag is given; a whole one where that is 1 or more.

    Raises:
        ConfigError: C005 for anything else.
    """
    from ptfast.core.durations import is_finite, read_number

    value, what = read_number(text), ""
    if value is None or not is_finite(value) or value <= 0 or value < least:
        what = f"must be a number of at least {least:g}" if least else "must be a number above 0"
    elif least >= 1 and value != int(value):
        what = "not a whole number"
    if value is None or what:
        raise ConfigError("C005", what, key=flag, value=text, place=COMMAND_LINE, suggestion=hint)
    return int(value) if least >= 1 else value


def _unknown_flag(name: str, value: str | None, known: dict[str, bool]) -> ConfigError:
    from ptfast.core.sections.nearest_name import did_you_mean

    bare = name.lstrip("-")
    hint = did_you_mean(name, known) if bare != "recipe" else None
    if value is not None and value.startswith("-"):
        value = None
    if not hint and len(bare) > 1:
        from ptfast.config.checks.validate import key_named

        bare = "+recipe" if bare == "recipe" else key_named(bare.replace("-", "_")) or bare
        shown = "VALUE" if value is None or is_secret(bare) else value
        hint = f"Config is key=value without dashes: {bare}={shown}"
    what, hint = "no such flag", hint or f"Flags: {', '.join(known)}"
    return ConfigError("C015", what, key=name, place=COMMAND_LINE, suggestion=hint)
