"""The commands that only show or copy something."""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from pathlib import Path

from ptfast.cli.arguments import WIDTH
from ptfast.core.errors import EXIT_OK, ConfigError, cannot_write


def compare(args: Namespace) -> int:
    """Rank runs."""
    from ptfast.cli.compare_command import compare

    return compare([Path(word) for word in args.words], args.metric, args.mode, args.out)


def recipes(args: Namespace) -> int:
    """List the recipes."""
    from ptfast.config.editors.help import recipes
    from ptfast.report.terminal.display import say

    for entry in recipes():
        summary = textwrap.fill(entry.summary, WIDTH, initial_indent="    ", subsequent_indent="    ")
        print(f"{entry.name}\n{summary}")
        say(f"    {entry.command}\n")
    print("ptfast copy NAME FILE writes one to edit.")
    return EXIT_OK


def techniques(args: Namespace) -> int:
    """List the techniques."""
    from ptfast.cli.techniques_command import markdown, show

    name = " ".join(args.words)
    if args.markdown and name:
        hint = "Leave one of the two out"
        raise ConfigError("C011", "the Markdown table is of all techniques", key=name, suggestion=hint)
    if args.markdown:
        print(markdown())
    else:
        show(name or None)
    return EXIT_OK


def copy(args: Namespace) -> int:
    """Copy a recipe."""
    name, *rest = args.words
    from ptfast.config.editors.help import copy_recipe

    file = Path(rest[0] if rest else f"{name}.yaml")
    called = copy_recipe(name, file)
    print(f"wrote {file}; run it with: ptfast train +recipe={called}")
    return EXIT_OK


def schema(args: Namespace) -> int:
    """Print or write the JSON Schema of recipes."""
    from ptfast.config.editors.json_schema import schema

    text = json.dumps(schema(), indent=2)
    if args.out is None:
        print(text)
        return EXIT_OK
    try:
        args.out.write_text(text + "\n")
    except OSError as error:
        raise cannot_write(error, "--out", args.out) from error
    return EXIT_OK


def completion(args: Namespace) -> int:
    """Print a completion script."""
    from ptfast.config.editors.completion import script

    print(script(args.words[0] if args.words else "bash"))
    return EXIT_OK
