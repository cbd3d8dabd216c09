"""Command lines on argparse: the flags of each command; every other word is config."""

from __future__ import annotations

import argparse
import importlib
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ptfast.core.errors import COMMAND_LINE, ConfigError, is_secret

WIDTH, INDENT = 80, 24
"""Columns of help, and where its texts begin."""


@dataclass(frozen=True)
class Flag:
    """An option with dashes.

    Args:
        names: the long name, and perhaps a short one.
        help: what it means, in a line or two.
        dest: the attribute that it sets; by default its name.
        read: makes the value of its text, or raises ValueError; None for a flag without a value.
    """

    names: str
    help: str
    dest: str | None = None
    read: Callable[[str], Any] | None = str
    default: Any = None

    @property
    def name(self) -> str:
        """The long name."""
        return self.names.split()[0]


@dataclass(frozen=True)
class Command:
    """One word after `ptfast`.

    Args:
        usage: its arguments, as `--help` shows them.
        summary: one line.
        run: `module.function` of this folder, imported when it is called: takes the flags as attributes and
            the other words as `words`, returns the exit code.
        examples: command lines, without `ptfast`.
        alone: it starts what ranks it needs by itself, and is refused under a user's own torchrun.
        max_words: how many other words it reads; None for any number.
        min_words: how many it cannot do without.
        imports_torch: it takes seconds to start.
    """

    usage: str
    summary: str
    run: str
    flags: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()
    max_words: int | None = None
    min_words: int = 0
    alone: bool = False
    imports_torch: bool = False

    def __call__(self, args: Namespace) -> int:
        """Run it."""
        module, _, function = self.run.partition(".")
        return getattr(importlib.import_module(f"ptfast.cli.{module}"), function)(args)


def switch(names: str, help: str) -> Flag:
    """A flag without a value."""
    return Flag(names, help, read=None)


COMMON = (
    Flag("--config-dir", "folder of GROUP/OPTION.yaml and recipes/ to look in first", read=Path),
    switch("--traceback", "show where an error comes from"),
    switch("--help -h", "show this"),
)


def parse(name: str, command: Command, words: Sequence[str]) -> Namespace:
    """The flags and words of a command line.

    Raises:
        ConfigError: C015 for a flag that is not known or lacks its value, C006 for one given two values, C005
            for a value that it cannot have, C001 and C016 for too many words and too few.
    """
    arguments, unknown = _parser(name, command).parse_known_intermixed_args(list(words))
    if unknown:
        raise _unknown_flag(unknown[0], list(words), command)
    hint = f"Usage: ptfast {name} {command.usage}".rstrip()
    if len(arguments.words) < command.min_words and not arguments.help:
        raise ConfigError("C016", "an argument is missing", key=name, suggestion=hint)
    if command.max_words is not None and (more := arguments.words[command.max_words :]):
        raise ConfigError("C001", "one argument too many", key=more[0], suggestion=hint)
    return arguments


def help_of(name: str, command: Command) -> str:
    """What `--help` prints of one command."""
    text = _parser(name, command).format_help()
    return f"Usage: ptfast {name} {command.usage}".rstrip() + "\n\n" + text.strip()


def seconds(text: str) -> float:
    """The seconds that a text such as `5m` means; a bare number is seconds."""
    from ptfast.core.durations import Duration

    value = Duration.parse(text, "seconds").seconds
    if not value:
        raise ValueError("expected a time above 0")
    return value


def number(least: float = 0.0) -> Callable[[str], Any]:
    """A reader of numbers above 0 and of at least `least`; of whole ones where that is 1 or more."""
    bound = f"of at least {least:g}" if least > 1 else "above 0"
    what = f"expected a {'whole ' if least >= 1 else ''}number {bound}"

    def read(text: str) -> Any:
        from ptfast.core.durations import is_finite, read_number

        value = read_number(text)
        if value is None or not is_finite(value) or value <= 0 or value < least:
            raise ValueError(what)
        if least >= 1 and value != int(value):
            raise ValueError(what)
        return int(value) if least >= 1 else value

    return read


def pixels(text: str) -> int:
    """A length in pixels, or 0 for `keep`."""
    try:
        return 0 if text == "keep" else number(1)(text)
    except ValueError as error:
        raise ValueError(f"{error}. Give pixels, or keep") from error


def one_of(*choices: str) -> Callable[[str], str]:
    """A reader of one of `choices`."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"unknown choice. Use {' or '.join(choices)}")
        return text

    return read


def path(text: str) -> Path:
    """A path, perhaps in the home folder."""
    return Path(text).expanduser()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # The one thing that argparse finds wrong by itself: "argument --out: expected one argument".
        raise _lacks_value(message.split(": ")[0].split()[-1])


def _lacks_value(flag: str) -> ConfigError:
    return ConfigError("C015", "needs a value", key=flag, suggestion=f"Write {flag} VALUE")


class _Once(argparse.Action):
    """Sets a value read from its text, once."""

    def __init__(self, *args: Any, read: Callable[[str], Any], **keywords: Any) -> None:
        super().__init__(*args, metavar="VALUE", **keywords)
        self.read, self.given = read, False

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        key = self.option_strings[0]
        if not values:
            raise _lacks_value(key)
        if self.given:
            raise ConfigError("C006", "given twice", key=key, place=COMMAND_LINE, suggestion="Keep one")
        self.given = True
        try:
            setattr(namespace, self.dest, self.read(values))
        except ValueError as error:
            what, _, hint = str(error).partition(". ")
            details = {"key": key, "value": values, "place": COMMAND_LINE, "suggestion": hint or None}
            raise ConfigError("C005", what, **details) from error


def _parser(name: str, command: Command) -> _Parser:
    summary = f"{command.summary[0].upper()}{command.summary[1:]}."
    if command.examples:
        summary += "\n\nExamples:\n" + "\n".join(f"  ptfast {example}" for example in command.examples)
    epilog = "key=value sets a key of the config: ptfast --help lists its groups."
    parser = _Parser(
        f"ptfast {name}",
        argparse.SUPPRESS,
        summary,
        epilog if "key=value" in command.usage else None,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=WIDTH + 2),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    group = parser.add_argument_group("Flags")
    for flag in (*command.flags, *COMMON):
        keywords: dict[str, Any] = {"dest": flag.dest or flag.name.lstrip("-").replace("-", "_")}
        if flag.read is None:
            keywords["action"] = "store_true"
        else:
            keywords |= {"action": _Once, "read": flag.read, "default": flag.default}
        long, *short = flag.names.split()
        shorts = "".join(f"({name}) " for name in short)
        group.add_argument(long, help=(shorts + flag.help).replace("%", "%%"), **keywords)
        if short:
            parser.add_argument(*short, help=argparse.SUPPRESS, **keywords)
    return parser


def search_in(folder: Path) -> None:
    """Look for options and recipes in `folder` first, in this process and those that it starts.

    Raises:
        ConfigError: C001, there is no such folder.
    """
    from ptfast.config.files import paths

    found = folder.expanduser().absolute()
    if not found.is_dir():
        raise ConfigError("C001", "no such folder", key="--config-dir", value=folder, place=COMMAND_LINE)
    os.environ[paths.CONFIG_DIR] = str(found)


def _unknown_flag(word: str, words: list[str], command: Command) -> ConfigError:
    from ptfast.core.sections.nearest_name import did_you_mean

    name, equals, value = word.partition("=")
    if not equals:
        value = next(iter(words[words.index(word) + 1 :]), "-") if word in words else "-"
    bare, known = name.lstrip("-"), [flag.name for flag in command.flags]
    hint = did_you_mean(name, known) if bare != "recipe" else None
    if not hint and len(bare) > 1:
        from ptfast.config.checks.validate import key_named

        key = "+recipe" if bare == "recipe" else key_named(bare.replace("-", "_"))
        if key := key or ("." in bare and bare):
            shown = "VALUE" if value.startswith("-") or is_secret(key) else value
            hint = f"Config is key=value without dashes: {key}={shown}"
    hint = hint or f"Flags: {', '.join([*known, COMMON[0].name])}"
    return ConfigError("C015", "no such flag", key=name, place=COMMAND_LINE, suggestion=hint)
