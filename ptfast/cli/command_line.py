"""One command line from words to exit code: finds the command, calls it, prints what goes wrong."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from ptfast.cli.arguments import COMMON, Command, help_of, parse, search_in
from ptfast.cli.commands import COMMANDS, KINDS
from ptfast.core.errors import (
    COMMAND_LINE,
    EXIT_OK,
    ConfigError,
    error_line,
    exit_code_of,
    traceback_of,
)
from ptfast.report.terminal.command_output import drop_unread, flush, print_error, say_starting


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; whatever goes wrong is printed, as one line."""
    code = _run(list(arguments))
    flush(sys.stdout, sys.stderr)
    return code


def _run(words: list[str]) -> int:
    show_traceback = "--traceback" in words
    try:
        return _dispatch(words)
    except BrokenPipeError:
        # The reader of our output has left (`ptfast recipes | head`).
        return EXIT_OK
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            drop_unread(sys.stdout, sys.stderr)
        print_error(error_line(error), traceback_of(error) if show_traceback else "")
        return exit_code_of(error)


def _dispatch(words: list[str]) -> int:
    from ptfast import __version__

    name, *rest = [word for word in words if word != "--traceback"] or ["--help"]
    if name in ("-h", "--help", "help"):
        from ptfast.cli.help_text import help_text

        print(help_text(COMMANDS, *rest[:1]))
        return EXIT_OK
    if name in ("-V", "--version"):
        print(f"ptfast {__version__}")
        return EXIT_OK
    if name == "__complete":
        from ptfast.config.editors.completion import complete

        kinds = {name: list(found) for name, found in KINDS.items()}
        print("\n".join(complete(rest, {name: _flags(name, rest) for name in COMMANDS}, kinds)))
        return EXIT_OK
    if name not in COMMANDS:
        raise _no_command(name)
    called, command, args = read(name, rest)
    if args.help:
        print(help_of(called, command))
        return EXIT_OK
    if args.config_dir is not None:
        search_in(args.config_dir)
    if COMMANDS[name].alone:
        from ptfast.core.distributed import told_of_nodes, world

        if world() is not None or told_of_nodes():
            hint = "Start it without torchrun; parallel=ddp launches the ranks"
            raise ConfigError("C014", "every rank would measure by itself", key=name, suggestion=hint)
    shows = getattr(args, "cfg", None) or getattr(args, "info", None)
    if (COMMANDS[name].alone or command.imports_torch) and not shows:
        say_starting()
    return command(args)


def read(name: str, words: list[str]) -> tuple[str, Command, Namespace]:
    """What a command of this name is called, `find lr` where several share it, and its flags and words."""
    if name not in KINDS or words[:1] in (["--help"], ["-h"]):
        return name, COMMANDS[name], parse(name, COMMANDS[name], words)
    kind, *rest = words or [""]
    command = _kind_of(name, kind)
    args = parse(f"{name} {kind}", command, rest)
    args.kind = kind
    return f"{name} {kind}", command, args


def _kind_of(name: str, word: str) -> Command:
    """Which of several commands of one name is meant by the word after it."""
    from ptfast.core.sections.nearest_name import did_you_mean

    kinds, usage = KINDS[name], f"Usage: ptfast {name} {COMMANDS[name].usage}"
    if not word or "=" in word or word.startswith("-"):
        raise ConfigError("C016", "an argument is missing", key=name, place=COMMAND_LINE, suggestion=usage)
    if word not in kinds:
        hint = did_you_mean(word, kinds) or usage
        what = f"expected {' or '.join(kinds)}"
        raise ConfigError("C003", what, key=name, value=word, place=COMMAND_LINE, suggestion=hint)
    return kinds[word]


def _no_command(name: str) -> ConfigError:
    from ptfast.config.files.paths import recipe_file
    from ptfast.core.sections.nearest_name import did_you_mean

    hint = did_you_mean(name, COMMANDS) or f"Commands: {', '.join(COMMANDS)}"
    flags = [one for flag in COMMANDS["train"].flags for one in flag.names.split()]
    if "=" in name or name.partition("=")[0] in flags:
        hint = f"Did you mean ptfast train {name}?"
    elif recipe_file(name):
        hint = f"Did you mean ptfast train +recipe={name}?"
    return ConfigError("C015", "no such command", key=name, suggestion=hint)


def _flags(name: str, words: Sequence[str]) -> list[str]:
    """The flags of a command, for completion; of `find lr` those of lr."""
    kinds = KINDS.get(name, {})
    chosen = next((kinds[word] for word in words if word in kinds), COMMANDS[name])
    return [flag.name for flag in (*chosen.flags, *COMMON)]
