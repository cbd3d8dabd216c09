"""Every key, flag, option and environment variable has an entry in the references."""

from __future__ import annotations

import re
from typing import Any

from conftest import ROOT
from shown import PAGES

from ptfast.cli.arguments import COMMON
from ptfast.cli.commands import COMMANDS
from ptfast.config.checks.target_checks import own_parameters
from ptfast.config.files import paths
from ptfast.config.schema import Config, entry_of, section_of
from ptfast.core.protocols import TASKS
from ptfast.core.sections.section import GATHERED
from ptfast.core.sections.targets import locate
from scripts import doc_reference

CLI, KEYS = PAGES["docs/reference/cli.md"], PAGES["docs/reference/config-keys.md"]
HINT = "scripts/doc_reference.py writes it"


def keys(section: Any, prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in section.model_fields.items():
        if name in GATHERED or (not prefix and name in ("recipe", *paths.groups())):
            continue
        inner = section_of(field.annotation)
        found |= keys(inner, f"{prefix}{name}.") if inner else {prefix + name}
        if entry := entry_of(field.annotation):
            found |= keys(entry, f"{prefix}{name}[].")
    return found


def first_cells(page: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)`", page, re.MULTILINE))


def test_every_key_has_an_entry() -> None:
    expected = keys(Config)
    for group in paths.groups():
        if section := section_of(Config.model_fields[group].annotation):
            expected |= keys(section, f"{group}.")
    assert expected - first_cells(KEYS) == set(), HINT


def test_every_option_has_an_entry() -> None:
    expected = {f"{group}={option}" for group in paths.groups() for option in paths.options(group)}
    assert expected - first_cells(KEYS) == set(), HINT
    assert {f"task={name}" for name in TASKS} <= first_cells(KEYS), HINT


def test_every_keyword_of_a_task_has_an_entry() -> None:
    for name, path in TASKS.items():
        expected = {f"task.{key}" for key in own_parameters(locate(path), "task")}
        assert expected - first_cells(KEYS) == set(), (name, HINT)


def test_every_command_and_flag_has_an_entry() -> None:
    parts = dict(re.findall(r"^## ptfast ([\w ]+)\n(.*?)(?=^## |\Z)", CLI, re.MULTILINE | re.DOTALL))
    assert set(parts) == {name for name, _ in doc_reference.commands()}, HINT
    for name, command in doc_reference.commands():
        flags = {each for flag in command.flags for each in flag.names.split()}
        assert flags == set(re.findall(r"(?<=`)--?[\w-]+", parts[name])), (name, HINT)
    common = {each for flag in COMMON for each in flag.names.split()}
    assert common <= set(re.findall(r"(?<=`)--?[\w-]+", CLI.split("## Flags of every command")[1])), HINT
    assert len(parts) > len(COMMANDS)


def test_every_variable_of_ptfast_has_an_entry() -> None:
    code = "".join(file.read_text() for file in (ROOT / "ptfast").rglob("*.py"))
    own = set(re.findall(r'"(PTFAST_[A-Z]+)"', code)) - {"PTFAST_STARTED", "PTFAST_THREADS", "PTFAST_CHAOS"}
    assert own <= set(re.findall(r"`([A-Z_]+)`", PAGES["docs/reference/environment.md"]))
