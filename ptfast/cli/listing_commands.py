"""The commands that only show or copy things."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ptfast.cli.arguments import WIDTH, write_out
from ptfast.config.catalogue import CATALOGUE, ThisMachine, default_state, plain_name, verdict
from ptfast.config.editors.help import entries
from ptfast.config.files import paths
from ptfast.core.errors import EXIT_OK, ConfigError, MachineError, cannot_write, did_you_mean, shorten
from ptfast.core.sections.section import PROMISES, Technique
from ptfast.report.terminal.display import build_display, is_terminal, say, standard_output, table
from ptfast.report.terminal.json_lines import emit, emit_rows, lines


def recipes(args: Namespace) -> int:
    for entry in entries(paths.RECIPES):
        if emit("row", name=entry.name, summary=entry.summary, command=entry.command):
            continue
        summary = textwrap.fill(entry.summary, WIDTH, initial_indent="    ", subsequent_indent="    ")
        print(f"{entry.name}\n{summary}")
        say(f"    {entry.command}\n")
    if lines() is None:
        print("ptfast copy NAME FILE writes one to edit.")
    return EXIT_OK


def copy(args: Namespace) -> int:
    """Copy a recipe to a user's file, and update the file name in its comment."""
    name, *rest = args.words
    file, known = Path(rest[0] if rest else f"{name}.yaml"), paths.options(paths.RECIPES)
    if name not in known:
        hint = did_you_mean(name, known) or f"Recipes: {', '.join(known)}"
        raise ConfigError("C003", "no such recipe", key=name, suggestion=hint)
    if file.suffix != ".yaml":
        what = "a recipe's file ends in .yaml"
        raise ConfigError("C001", what, key=str(file), suggestion=f"Write {file.with_suffix('.yaml')}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as target:
            # A recipe in ./recipes is named by its name alone.
            copied = {path.resolve(): own for own, path in paths.options(paths.RECIPES).items()}
            called = copied.get(file.resolve()) or str(file if file.is_absolute() else f"./{file}")
            text = known[name].read_text(encoding="utf-8")
            target.write(re.sub(rf"\brecipe={re.escape(name)}(?=\s|$)", lambda _: f"recipe={called}", text))
    except FileExistsError:
        what = "already exists and is not overwritten"
        raise MachineError("E001", what, key=str(file), suggestion="Choose another name") from None
    except OSError as error:
        raise cannot_write(error, str(file)) from None
    print(f"wrote {file}; run it with: ptfast train recipe={called}")
    return EXIT_OK


def schema(args: Namespace) -> int:
    """Print or write the JSON Schema of recipes."""
    from ptfast.config.editors.json_schema import schema

    found = schema()
    if args.out is not None:
        write_out(args.out, json.dumps(found, indent=2) + "\n")
    elif not emit("result", schema=found):
        print(json.dumps(found, indent=2))
    return EXIT_OK


ALWAYS_ON = "always on"
NAME_WIDTH, CELLS_WIDTH = 29, 25
"""Columns for the name of a technique, and for its class, its default and the space between cells."""


def techniques(args: Namespace) -> int:
    """List all techniques, those of a family, or the details of one, and whether they apply here."""
    name = " ".join(args.words)
    wanted, machine = plain_name(name), ThisMachine()
    named = [technique for technique in CATALOGUE if plain_name(technique.name) == wanted]
    chosen = [t for t in CATALOGUE if not name or plain_name(t.family) == wanted]
    if named:
        _show_one(named[0], machine)
    elif chosen:
        _show_all(chosen, machine)
    else:
        families = dict.fromkeys(technique.family for technique in CATALOGUE)
        known = [*(technique.name for technique in CATALOGUE), *families]
        hint = did_you_mean(name, known) or f"Families: {', '.join(families)}"
        raise ConfigError("C003", "no such technique", key=name, suggestion=hint)
    return EXIT_OK


def in_order(techniques: Sequence[Technique]) -> list[Technique]:
    """Group techniques by family, with families in order of first appearance."""
    families = list(dict.fromkeys(technique.family for technique in techniques))
    return sorted(techniques, key=lambda technique: families.index(technique.family))


def _show_all(techniques: Sequence[Technique], machine: ThisMachine) -> None:
    """Print a table on a terminal, one line each, and tab-separated lines elsewhere."""
    from ptfast.config.compose import compose

    tree = compose([], complete=False).tree
    headers = ["family", "technique", "class", "default", "switch", "here", "worth"]
    rows, muted = [], set()
    for number, technique in enumerate(in_order(techniques)):
        here = verdict(technique, machine)
        if not here.applies:
            muted.add(number)
        switch = " ".join(technique.on) or ALWAYS_ON
        worth = f"{technique.claim} {technique.measured}".rstrip()
        name, state = technique.name, default_state(technique, tree)
        rows.append([technique.family, name, technique.kind, state, switch, here.text, worth])
    stream = standard_output()
    if is_terminal(stream):
        room = shutil.get_terminal_size().columns - NAME_WIDTH - CELLS_WIDTH
        lines = [
            [family, shorten(name, NAME_WIDTH), kind, state if applies else "not here", shorten(switch, room)]
            for number, (family, name, kind, state, switch, *_) in enumerate(rows)
            for applies in [number not in muted]
        ]
        table(headers[:5], lines, grouped=True, muted=muted)
        promises = [f"{kind}: {promise}" for kind, promise in PROMISES.items()]
        say(f"class: {'; '.join(promises)}.")
        say("default: on, off, or auto (the run decides) without a recipe; not here: needs another machine.")
        say("ptfast techniques NAME has the rest: whole switch, reason, worth and when not to use it.")
    elif not emit_rows(headers, rows, None):
        # Aligned lines would be as long as the longest cell of each column: some 500 characters.
        print("\n".join("\t".join(row) for row in [headers, *rows]), file=stream)


def _show_one(technique: Technique, machine: ThisMachine) -> None:
    rivals = [
        other.name
        for other in CATALOGUE
        if technique.alternatives and other.alternatives == technique.alternatives and other != technique
    ]
    rows = {
        "family": technique.family,
        "class": f"{technique.kind}: {PROMISES[technique.kind]}",
        "on": " ".join(technique.on) or ALWAYS_ON,
        "off": " ".join(technique.off),
        "here": verdict(technique, machine).text,
        "why": technique.why,
        "worth": technique.claim,
        "source": technique.source,
        "measured": technique.measured,
        "command": technique.command,
        "when not": technique.avoid,
        "missing if": technique.audit,
        "drift": f"at most {technique.drift:g} of the loss over ten steps" if technique.drift else "",
        "options": " ".join(technique.options),
        "instead of": ", ".join(rivals),
    }
    build_display().panel(technique.name, [(name, value) for name, value in rows.items() if value])
