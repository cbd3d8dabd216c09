"""Run one command line: find the command, call it, print its error, return the exit code."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from ptfast import __version__
from ptfast.cli.arguments import INDENT, WIDTH, Command, help_of, parse
from ptfast.cli.commands import COMMANDS
from ptfast.config.files import paths
from ptfast.core.errors import (
    COMMAND_LINE,
    EXIT_OK,
    ConfigError,
    did_you_mean,
    error_line,
    exit_code_of,
    traceback_of,
)

RARELY_USED = ("chaos", "copy", "schema", "completion")
"""Commands that `ptfast --help` lists only by name."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed as one line."""
    words = [word for word in arguments if word != "--json"]
    with contextlib.ExitStack() as stack:
        if len(words) < len(arguments) or os.environ.get("PTFAST_JSON"):
            from ptfast.report.terminal.json_lines import as_json

            stack.enter_context(as_json())
        return _run(words)


def _run(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except (Exception, KeyboardInterrupt) as error:
        from ptfast.report.terminal.display import drop_unread, say, standard_output
        from ptfast.report.terminal.json_lines import emit_error

        if isinstance(error, KeyboardInterrupt):
            drop_unread(sys.stdout, sys.stderr)
        standard_output().flush()
        shows = "--traceback" in words
        if not emit_error(error, details=shows):
            if shows and (details := traceback_of(error)):
                print(details, file=sys.stderr)
            say(error_line(error), sys.stderr)
        return exit_code_of(error)


def _dispatch(words: list[str]) -> int:
    name, *rest = [word for word in words if word != "--traceback"] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(help_text(*rest[:1]))
        return EXIT_OK
    if name in ("-V", "--version"):
        print(f"ptfast {__version__}")
        return EXIT_OK
    if name == "__complete":
        from ptfast.cli.completion.completion_command import complete

        print("\n".join(complete(rest)))
        return EXIT_OK
    if name not in COMMANDS:
        raise _no_command(name)
    called, command, args = read(name, rest)
    if args.help:
        print(help_of(called, command))
        return EXIT_OK
    if (folder := args.config_dir) is not None:
        if not folder.is_dir():
            raise ConfigError("C001", "no such folder", key="--config-dir", value=folder, place=COMMAND_LINE)
        # This process and its children search this folder first.
        os.environ[paths.CONFIG_DIR] = str(folder.absolute())
    if COMMANDS[name].alone:
        from ptfast.core.distributed import nodes_from_environment, world

        if world() is not None or nodes_from_environment():
            hint = "Start it without torchrun; parallel=ddp launches the ranks"
            raise ConfigError("C014", "every rank would measure on its own", key=name, suggestion=hint)
    shows = getattr(args, "cfg", None)
    if (COMMANDS[name].alone or command.imports_torch) and not shows:
        from ptfast.report.terminal.display import is_terminal

        first = os.environ.get("RANK", "0") == "0"
        if first and is_terminal(sys.stderr):
            print("reading the config, importing torch ...", file=sys.stderr, flush=True)
    module, _, function = command.run.rpartition(".")
    return getattr(importlib.import_module(f"ptfast.cli.{module}"), function)(args)


def read(name: str, words: list[str]) -> tuple[str, Command, Namespace]:
    """Parse a command's words; return its full name, such as `find lr`, its `Command` and its arguments."""
    command = COMMANDS[name]
    if not command.kinds or words[:1] in (["--help"], ["-h"]):
        return name, command, parse(name, command, words)
    kind, *rest = words or [""]
    usage = f"Usage: ptfast {name} {command.usage}"
    if not kind or "=" in kind or kind.startswith("-"):
        raise ConfigError("C016", "an argument is missing", key=name, place=COMMAND_LINE, suggestion=usage)
    if kind not in command.kinds:
        hint = did_you_mean(kind, command.kinds) or usage
        what = f"expected {' or '.join(command.kinds)}"
        raise ConfigError("C003", what, key=name, value=kind, place=COMMAND_LINE, suggestion=hint)
    args = parse(f"{name} {kind}", command.kinds[kind], rest)
    args.kind = kind
    return f"{name} {kind}", command.kinds[kind], args


def _no_command(name: str) -> ConfigError:
    hint = did_you_mean(name, COMMANDS) or f"Commands: {', '.join(COMMANDS)}"
    flags = [one for flag in COMMANDS["train"].flags for one in flag.names.split()]
    if "=" in name or name.partition("=")[0] in flags:
        hint = f"Did you mean ptfast train {name}?"
    elif paths.recipe_file(name):
        hint = f"Did you mean ptfast train recipe={name}?"
    return ConfigError("C015", "no such command", key=name, suggestion=hint)


def help_text(topic: str | None = None) -> str:
    """Return the help of ptfast, or of one command or config group; raise C003 for an unknown topic."""
    if topic is None:
        return _overview()
    if topic in COMMANDS:
        return help_of(topic, COMMANDS[topic])
    from ptfast.config.schema import Config, section_of

    fields = {name: section_of(field.annotation) for name, field in Config.model_fields.items()}
    if "=" in topic:
        group, option = topic.split("=", 1)
        return "\n".join(_of_option(group, option, fields.get(group)))
    sections = [name for name, section in fields.items() if section is not None]
    known = dict.fromkeys([*COMMANDS, *paths.groups(), *sections])
    if topic not in known:
        hint = did_you_mean(topic, known, "ptfast --help {}") or "ptfast --help lists commands and groups"
        raise ConfigError("C003", "no such command or config group", key=topic, suggestion=hint)
    return "\n".join(_of_group(topic, fields.get(topic)))


def _overview() -> str:
    groups = textwrap.fill(
        " ".join(sorted([*paths.groups(), "task"])), WIDTH, initial_indent="  ", subsequent_indent="  "
    )
    rows = "\n".join(f"  {name:<12}{COMMANDS[name].summary}" for name in COMMANDS if name not in RARELY_USED)
    return f"""\
ptfast {__version__}: PyTorch training from YAML, as fast as this machine allows
  ptfast train recipe=resnet_digits optimizer=adamw optimizer.lr=1e-3

Commands; ptfast COMMAND --help shows arguments, flags and examples:
{rows}
  {"also":<12}{", ".join(RARELY_USED)}; ptfast --version
Config groups; ptfast --help GROUP shows options (GROUP=OPTION) and keys:
{groups}"""


def _of_group(group: str, section: Any) -> Iterator[str]:
    """Yield the options of a group and the keys of its section."""
    from ptfast.config.editors.help import entries

    if section is not None:
        yield textwrap.fill(f"{group}: {' '.join((section.__doc__ or '').split())}", WIDTH) + "\n"
    if options := entries(group):
        yield f"Options, chosen with {group}=OPTION:"
        yield from (_row(option.name, option.summary) for option in options)
        yield ""
    rows = [*_key_rows(section)] if section is not None else []
    if rows:
        yield f"Keys and defaults, set with {group}.KEY=VALUE:"
        yield from rows
    if options and section is not None and "target" in section.model_fields:
        yield f"\nptfast --help {group}=OPTION explains an option's own keys."
        yield f"ptfast train {group}=OPTION --cfg job prints the values an option sets."


def _key_rows(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a section and of the sections inside it."""
    from ptfast.config.schema import section_of
    from ptfast.core.sections.coerce import describe
    from ptfast.core.sections.targets import plain

    for key, field in section.model_fields.items():
        if key in ("target", "options"):
            continue
        if inner := section_of(field.annotation):
            yield from _key_rows(inner, f"{prefix}{key}.")
            continue
        default = None if field.is_required() else plain(field.get_default(call_default_factory=True))
        value = json.dumps(default).strip('"')
        meaning = f"{field.description or ''} ({describe(field.annotation)})"
        yield _row(f"{prefix}{key}={value}", meaning)


def _of_option(group: str, option: str, section: Any) -> Iterator[str]:
    """Yield the keys of one option's target, with their defaults and meanings."""
    from ptfast.config.checks.target_checks import own_parameters
    from ptfast.config.compose import compose
    from ptfast.config.editors.help import argument_docs
    from ptfast.core.sections.targets import EMPTY, locate

    paths.check_option(group, option, paths.groups(), None)
    values = compose([f"{group}={option}"], complete=False).tree[group]
    yield f"{group}={option} sets these keys, and accepts more with {group}.KEY=VALUE:"
    target = locate(values["_target_"]) if isinstance(values.get("_target_"), str) else None
    fixed = section.model_fields if section is not None else {}
    docs = {key: field.description or "" for key, field in fixed.items()}
    docs |= argument_docs(target) if target is not None else {}
    parameters = own_parameters(target, group) if target is not None else {}
    for key in dict.fromkeys([*parameters, *(key for key in values if key != "_target_")]):
        default = parameters[key].default if key in parameters else EMPTY
        value = values.get(key, default)
        yield _row(key if value is EMPTY else f"{key}={value}", docs.get(key, ""))


def _row(name: str, text: str) -> str:
    """Format a name and its meaning, wrapped."""
    indent = " " * INDENT
    start = f"  {name:<{INDENT - 3}} "
    lead = start if len(start) <= INDENT else f"{start.rstrip()}\n{indent}"
    return lead + textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent).lstrip()
