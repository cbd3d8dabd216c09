"""Write the references made from the code, cli.md and config-keys.md; `--check` only compares them."""

from __future__ import annotations

import functools
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ptfast.cli.arguments import COMMON, Command, Flag  # noqa: E402
from ptfast.cli.commands import COMMANDS  # noqa: E402
from ptfast.config.checks.target_checks import own_parameters  # noqa: E402
from ptfast.config.compose import compose  # noqa: E402
from ptfast.config.editors.help import argument_docs, entries  # noqa: E402
from ptfast.config.editors.json_schema import of_type  # noqa: E402
from ptfast.config.files import paths  # noqa: E402
from ptfast.config.schema import Config, entry_of, flatten, section_of  # noqa: E402
from ptfast.core.protocols import TASKS  # noqa: E402
from ptfast.core.sections.coerce import describe  # noqa: E402
from ptfast.core.sections.section import GATHERED, typed  # noqa: E402
from ptfast.core.sections.targets import EMPTY, locate, plain  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
MARK = "<!-- Below: written by scripts/doc_reference.py -->"
"""The text above it on a page is written by hand."""
KEY_TABLE = "| key | default | type and range | meaning |\n|---|---|---|---|"
OPTION_TABLE = "| key | value | meaning |\n|---|---|---|"


def cells(*texts: Any) -> str:
    """A row of a table, whose texts may hold anything."""
    clean = [re.sub(r"\s+", " ", str(text)).replace("|", "\\|").strip() for text in texts]
    return "| " + " | ".join(clean) + " |"


def wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 150, break_long_words=False, break_on_hyphens=False)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


# Commands.


def commands() -> Iterator[tuple[str, Command]]:
    """Every command with its full name: `train`, `find lr`, ..."""
    for name, command in COMMANDS.items():
        if command.kinds:
            yield from ((f"{name} {kind}", each) for kind, each in command.kinds.items())
        else:
            yield name, command


def default_of(name: str, command: Command, flag: Flag) -> str:
    """The default of a flag, as a text of the table."""
    if flag.read is None or flag.default is None:
        return ""
    return code(f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default))


def cli() -> str:
    """The reference of commands and flags."""
    lines: list[str] = []
    for name, command in commands():
        lines += ["", f"## ptfast {name}", "", f"{command.summary[0].upper()}{command.summary[1:]}.", ""]
        examples = "".join(f"\nptfast {example}" for example in command.examples)
        lines += [f"```text\nUsage: ptfast {name} {command.usage}".rstrip() + f"\n{examples}".rstrip(), "```"]
        if command.flags:
            lines += ["", "| flag | default | meaning |\n|---|---|---|"]
            lines += [flag_row(name, command, flag) for flag in command.flags]
    lines += ["", "## Flags of every command", "", "| flag | default | meaning |\n|---|---|---|"]
    lines += [flag_row("train", COMMANDS["train"], flag) for flag in COMMON]
    lines += [cells("`--version`, `-V`", "", "print the version; without a command")]
    return "\n".join(lines)


def flag_row(name: str, command: Command, flag: Flag) -> str:
    names = ", ".join(code(f"{each} {flag.metavar}" if flag.read else each) for each in flag.names.split())
    return cells(names, default_of(name, command, flag), flag.help)


# Config keys.


@functools.cache
def composed() -> dict[str, Any]:
    """The values of a config without a recipe, by key."""
    return flatten(compose([]).tree)


def shown_default(name: str, field: Any) -> str:
    own = EMPTY if field.is_required() else plain(field.get_default(call_default_factory=True))
    # The digits, which are the data without a recipe, set keys for themselves.
    value = own if name.startswith("data.") and own is not EMPTY else composed().get(name, own)
    return "" if value is EMPTY or value == "" else as_typed(value)


def as_typed(value: Any) -> str:
    """A value as it is typed on a command line, in backquotes."""
    if isinstance(value, float):
        return code(f"{value:.6g}")
    return code(json.dumps(value, default=str, ensure_ascii=False).strip('"'))


def type_and_range(field: Any) -> str:
    """The type of a key and the range of its numbers: `a whole number from 1`."""
    signs = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    found = of_type(typed(field))
    limits = {
        name: limit for each in found.get("anyOf", [found]) for name, limit in each.items() if name in signs
    }
    limits = {name: limit for name, limit in limits.items() if abs(limit) < 2**53}
    words = [f"{sign} {limits[name]:g}" for name, sign in signs.items() if name in limits]
    return " ".join([describe(field.annotation).replace("Target", "an import path"), *words])


def key_rows(section: type, prefix: str) -> Iterator[str]:
    """A row for each key of a section, and of the sections in it."""
    for key, field in section.model_fields.items():
        name, inner, entry = f"{prefix}{key}", section_of(field.annotation), entry_of(field.annotation)
        if key in GATHERED:
            continue
        if inner is not None:
            yield from key_rows(inner, f"{name}.")
            continue
        yield cells(code(name), shown_default(name, field), type_and_range(field), field.description or "")
        if entry is not None:
            yield from key_rows(entry, f"{name}[].")


def option_rows(group: str, option: str, known: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The key, value and meaning of the keys that an option adds to those of its group."""
    values: Mapping[str, Any] = {"_target_": TASKS.get(option)}
    if group != "task":
        values = compose([f"{group}={option}"], complete=False).tree.get(group) or {}
    path = values.get("_target_")
    target = locate(path) if isinstance(path, str) and path != "???" else None
    docs = argument_docs(target) if target is not None else {}
    parameters = own_parameters(target, group) if target is not None else {}
    for key in dict.fromkeys([*parameters, *(key for key in values if key != "_target_")]):
        default = parameters[key].default if key in parameters else EMPTY
        value = values.get(key, default)
        if key in known and key not in parameters:
            continue
        shown = "required" if value == "???" else "" if value is EMPTY else as_typed(value)
        yield code(f"{group}.{key}"), shown, first_sentence(docs.get(key, "") or known.get(key, ""))


def first_sentence(text: str) -> str:
    """The first sentence, which is enough beside a name; those of torch go on for a page."""
    text = re.sub(r" ?\(default:? [^()]*(\([^()]*\))?[^()]*\)", "", " ".join(text.split()))
    return re.split(r"(?<=[a-z)`])(?<!i\.e)(?<!e\.g)\. (?=[A-Za-z])", text)[0].removesuffix(".")


def config_keys() -> str:
    """The reference of config keys: those outside groups, and each group with its options."""
    fields = {name: (field, section_of(field.annotation)) for name, field in Config.model_fields.items()}
    lines = ["", "## Keys outside groups", "", KEY_TABLE]
    for name, (field, section) in fields.items():
        if section is None and name not in paths.groups() and name != "recipe":
            lines.append(
                cells(code(name), shown_default(name, field), type_and_range(field), field.description or "")
            )
    lines += [
        "",
        f"## {paths.PRESETS}",
        "",
        fields[paths.PRESETS][0].description or "",
        "",
        *option_list(paths.PRESETS),
    ]
    for name, (_, section) in fields.items():
        if section is not None:
            lines += section_lines(name, section)
    return "\n".join(lines)


def section_lines(name: str, section: type) -> Iterator[str]:
    yield from ("", f"## {name}", "", wrapped(section.__doc__ or ""))
    grouped = name in paths.groups() or name == "task"
    if grouped and (listed := option_list(name)):
        yield from ("", *listed)
    if rows := list(key_rows(section, f"{name}.")):
        yield from ("", f"Example: {code(example(name, section))}", "", KEY_TABLE, *rows)
    if not grouped or (name != "task" and "target" not in section.model_fields):
        return
    shared = {key: field.description or "" for key, field in section.model_fields.items()}
    found = {
        option: tuple(option_rows(name, option, shared))
        for option in (TASKS if name == "task" else paths.options(name))
    }
    alike: dict[Any, list[str]] = {}
    for option, rows in found.items():
        alike.setdefault(tuple((key, meaning) for key, _, meaning in rows), []).append(option)
    for meanings, options in alike.items():
        if meanings:
            yield from ("", wrapped(f"Keys of {', '.join(code(f'{name}={option}') for option in options)}:"))
            yield from ("", OPTION_TABLE)
        for number, (key, meaning) in enumerate(meanings):
            values = list(dict.fromkeys(found[option][number][1] for option in options))
            yield cells(key, ", ".join(value for value in values if value), meaning)


def example(name: str, section: type) -> str:
    """One key of the section with its default, as it is typed."""
    for key, field in section.model_fields.items():
        if key not in GATHERED and not field.is_required():
            value = plain(field.get_default(call_default_factory=True))
            if (
                isinstance(value, (bool, int, float, str))
                and value != ""
                and section_of(field.annotation) is None
            ):
                return f"{name}.{key}={json.dumps(value).strip(chr(34))}"
    return f"{name}.KEY=VALUE"


def option_list(group: str) -> list[str]:
    found = entries(group)
    if not found:
        return []
    rows = [cells(code(f"{group}={entry.name}"), entry.summary) for entry in found]
    return ["| option | |\n|---|---|", *rows]


def write(page: Path, text: str) -> str:
    """The page with everything below its mark replaced."""
    before, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{page.name} has lost its mark {MARK}"
    return f"{before}{mark}\n{text}\n"


PAGES = {"cli.md": cli, "config-keys.md": config_keys}

if __name__ == "__main__":
    for name, written in PAGES.items():
        page = REFERENCE / name
        text = write(page, written())
        if "--check" not in sys.argv:
            page.write_text(text, encoding="utf-8")
        elif text != page.read_text(encoding="utf-8"):
            sys.exit(f"docs/reference/{name} is out of date: run scripts/doc_reference.py")
