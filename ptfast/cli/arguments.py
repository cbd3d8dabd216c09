"""Command lines, based on argparse: each command's flags; every other word is config."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ptfast.core.durations import Duration, is_finite, read_number
from ptfast.core.errors import COMMAND_LINE, ConfigError, cannot_write, did_you_mean
from ptfast.core.sections.secret_values import is_secret

WIDTH, INDENT = 80, 24
"""Width of help texts, and the column where descriptions begin."""


@dataclass(frozen=True)
class Flag:
    """An option with dashes.

    Args:
        names: the long name, optionally a short one, and a word for the value in help: `--out FILE`.
        dest: the attribute to set; by default the flag's name.
        read: parses the value from text, or raises a ValueError with the problem and perhaps a remedy; None
            for a flag without a value.
    """

    names: str
    help: str
    dest: str | None = None
    read: Callable[[str], Any] | None = str
    default: Any = None
    metavar: str = "VALUE"

    def __post_init__(self) -> None:
        *names, last = self.names.split()
        if not last.startswith("-"):
            object.__setattr__(self, "names", " ".join(names))
            object.__setattr__(self, "metavar", last)

    @property
    def name(self) -> str:
        return self.names.split()[0]

    @property
    def attribute(self) -> str:
        """The attribute with its value after a command line is parsed."""
        return self.dest or self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Command:
    """One word after `ptfast`.

    Args:
        usage: its arguments, as shown by `--help`.
        run: `module.function` of this folder, imported when it is called: takes the flags as attributes and
            the other words as `words`, returns the exit code.
        examples: command lines, without `ptfast`.
        kinds: subcommands, one of which must follow, such as `lr` of `find lr`.
        alone: starts its own ranks, and is rejected under a user's torchrun.
        max_words: maximum number of words that are not `key=value`; None for no limit.
        imports_torch: needs seconds to start.
    """

    usage: str
    summary: str
    run: str
    flags: tuple[Flag, ...] = ()
    examples: tuple[str, ...] = ()
    kinds: Mapping[str, Command] = field(default_factory=dict)
    max_words: int | None = None
    min_words: int = 0
    alone: bool = False
    imports_torch: bool = False


def switch(names: str, help: str) -> Flag:
    """Return a flag without a value."""
    return Flag(names, help, read=None)


def choice(names: str, help: str, *choices: str, default: str | None = None) -> Flag:
    """Return a flag whose value is one of `choices`."""
    shown = f"{', '.join(choices[:-1])} or {choices[-1]}"

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError("unknown choice", f"Use {shown}")
        return text

    return Flag(f"{names} NAME", f"{help}: {shown}", read=read, default=default)


def path(text: str) -> Path:
    return Path(text).expanduser()


def write_out(out: Path, text: str) -> None:
    """Write `text` to the file named by `--out`; raise E001 or E002 if that fails."""
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(error, "--out", out) from error


COMMON = (
    Flag("--config-dir FOLDER", "your own GROUP/OPTION.yaml and recipes/, searched first", read=path),
    switch("--json", "print one JSON object per line, for programs"),
    switch("--traceback", "show the Python traceback of an error"),
    switch("--help -h", "show this help"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # For example "argument --cfg/-c: expected one argument".
        flag = message.split(": ")[0].split()[-1].split("/")[0]
        if "ignored explicit argument" in message:
            raise ConfigError("C015", "takes no value", key=flag, suggestion=f"Write {flag} alone")
        raise ConfigError("C015", "needs a value", key=flag, suggestion=f"Write {flag} VALUE")


def _parser(name: str, command: Command) -> _Parser:
    summary = f"{command.summary[0].upper()}{command.summary[1:]}."
    if command.examples:
        summary += "\n\nExamples:\n" + "\n".join(f"  ptfast {example}" for example in command.examples)
    takes_config = "key=value" in command.usage
    parser = _Parser(
        f"ptfast {name}",
        argparse.SUPPRESS,
        summary,
        "key=value sets a key of the config: ptfast --help lists its groups." if takes_config else None,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=WIDTH),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    group = parser.add_argument_group("Flags")
    for flag in (*command.flags, *COMMON):
        keywords: dict[str, Any] = {"action": "store_true"}
        if flag.read is not None:
            keywords = {"action": "append", "metavar": flag.metavar}
        group.add_argument(
            *flag.names.split(), dest=flag.attribute, help=flag.help.replace("%", "%%"), **keywords
        )
    return parser


def help_of(name: str, command: Command) -> str:
    text = _parser(name, command).format_help()
    return f"Usage: ptfast {name} {command.usage}".rstrip() + "\n\n" + text.strip()


def parse(name: str, command: Command, words: Sequence[str]) -> Namespace:
    """Return the flags and words of a command line; raise C001, C005, C006, C015 or C016 if it is invalid."""
    parser = _parser(name, command)
    arguments, unknown = parser.parse_known_intermixed_args(list(words))
    for flag in (*command.flags, *COMMON):
        if flag.read is None:
            continue
        text, *more = getattr(arguments, flag.attribute) or [None]
        if text == "":
            parser.error(f"argument {flag.name}: expected one argument")
        details: dict[str, Any] = {"key": flag.name, "place": COMMAND_LINE}
        if more:
            raise ConfigError("C006", "given twice", **details, suggestion="Keep one")
        try:
            setattr(arguments, flag.attribute, flag.default if text is None else flag.read(text))
        except ValueError as error:
            what, *hint = error.args
            raise ConfigError(
                "C005", what, **details, value=text, suggestion=next(iter(hint), None)
            ) from error
    if unknown:
        raise _unknown_flag(unknown[0], list(words), command)
    hint = f"Usage: ptfast {name} {command.usage}".rstrip()
    if len(arguments.words) < command.min_words and not arguments.help:
        raise ConfigError("C016", "an argument is missing", key=name, suggestion=hint)
    # Required arguments, such as the folder of a run, may contain a `=`.
    first, rest = arguments.words[: command.min_words], arguments.words[command.min_words :]
    plain = [*first, *(word for word in rest if "key=value" not in command.usage or "=" not in word)]
    if command.max_words is not None and (more := plain[command.max_words :]):
        raise ConfigError("C001", "one argument too many", key=more[0], suggestion=hint)
    return arguments


def _unknown_flag(word: str, words: list[str], command: Command) -> ConfigError:
    name, equals, value = word.partition("=")
    if not equals:
        value = next(iter(words[words.index(word) + 1 :]), "-") if word in words else "-"
    bare, known = name.lstrip("-"), [flag.name for flag in command.flags]
    hint = did_you_mean(name, known) if bare != "recipe" else None
    if not hint and len(bare) > 1:
        from ptfast.config.checks.validate import key_named

        key = bare if bare == "recipe" else key_named(bare.replace("-", "_"))
        if key := key or ("." in bare and bare):
            shown = "VALUE" if value.startswith("-") or is_secret(key) else value
            hint = f"Config is key=value without dashes: {key}={shown}"
    hint = hint or f"Flags: {', '.join([*known, COMMON[0].name])}"
    return ConfigError("C015", "no such flag", key=name, place=COMMAND_LINE, suggestion=hint)


def seconds(text: str) -> float:
    """Convert a duration such as `5m` to seconds; a bare number is seconds, and 0 is rejected."""
    value = Duration.parse(text, "seconds").seconds
    if not value:
        raise ValueError("expected a time above 0")
    return value


def number(least: float = 0.0) -> Callable[[str], Any]:
    """Return a parser of numbers above 0 and at least `least`; whole numbers if `least` is 1 or more."""
    whole = least >= 1
    bound = f"of at least {least:g}" if least > 1 else "above 0"
    what = f"expected a {'whole ' * whole}number {bound}"

    def read(text: str) -> Any:
        value = read_number(text)
        if value is None or not is_finite(value) or value <= 0 or value < least or (whole and value % 1):
            raise ValueError(what)
        return int(value) if whole else value

    return read


def pixels(text: str) -> int:
    try:
        return 0 if text == "keep" else number(1)(text)
    except ValueError as error:
        raise ValueError(str(error), "Give pixels, or keep") from error
