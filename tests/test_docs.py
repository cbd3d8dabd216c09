"""The docs are right: links, commands, keys, options and codes."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from config_trees import explained_schema
from conftest import ROOT
from failures import failures
from shown import (
    COMMANDS_SHOWN,
    DRY_RUN,
    FENCE,
    OWN_CONF,
    OWN_PARTS,
    PAGES,
    TASKS,
    Shown,
    fences,
    form,
    points,
    spans,
    users_folder,
)

from ptfast.cli.command_line import read, run
from ptfast.config.catalogue import CATALOGUE
from ptfast.config.files import paths
from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core import errors
from scripts import doc_tables

LINKING = {**PAGES, **{name: (ROOT / name).read_text() for name in ("CONTRIBUTING.md", "CHANGELOG.md")}}
QUICK = [shown for shown in COMMANDS_SHOWN if shown.words[0] in ("recipes", "copy", "schema", "completion")]
COMPOSING = ("train", "find", "ablate", "audit", "race", "chaos", "launch")
COMPOSED = [
    shown
    for shown in COMMANDS_SHOWN
    if shown.words[0] in COMPOSING
    and not form(shown)
    # Those are trained, or take a few steps, in test_docs_examples.
    and shown not in DRY_RUN
    and shown.page not in OWN_PARTS
]
OTHERS_KEYS = {*(page for page in PAGES if page.startswith("docs/compare/")), OWN_CONF}
"""Pages that show the arguments of other frameworks."""
NO_KEYS = {"group=option", "group.key=value", "model=net"}
"""A word that stands for any key, and an option that a page has the reader make."""
ASKS_MACHINE = {"E004", "E005"}
"""Refusals for what only this machine lacks: the command is right."""


@pytest.fixture(scope="module")
def in_users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with users_folder(tmp_path_factory.mktemp("user")) as folder:
        yield folder


# Links and form.


def slug(heading: str) -> str:
    """The anchor that a heading has on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(title) for title in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)}


def test_no_page_shows_a_folder_of_the_machine_it_was_written_on() -> None:
    assert [page for page, text in PAGES.items() if re.search(r"/(tmp|root|work)/", text)] == []


def test_links_lead_somewhere() -> None:
    assert failures(check_links, LINKING) == []


def check_links(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", FENCE.sub("", LINKING[page])):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), target


def test_the_index_names_every_page() -> None:
    linked = re.findall(r"^- \[.+?\]\(([\w/-]+\.md)\): .", PAGES["docs/README.md"], re.MULTILINE)
    assert len(linked) == len(set(linked))
    assert {f"docs/{name}" for name in linked} == set(PAGES) - {"README.md", "docs/README.md"}


def test_a_page_says_what_it_is_for() -> None:
    assert failures(check_opening, PAGES) == []


def check_opening(page: str) -> None:
    title, _, opening, *_ = PAGES[page].split("\n")
    assert re.match(r"# \w", title)
    assert re.match(r"\w", opening), "a page opens with what it is for"
    for line in FENCE.sub("", PAGES[page]).splitlines():
        assert len(line) <= 150 or line.startswith("|"), line


# Commands.


def test_a_command_is_read() -> None:
    assert failures(check_command, COMMANDS_SHOWN) == []


def check_command(shown: Shown) -> None:
    name, *rest = shown.words
    if name in ("--help", "COMMAND"):
        return
    others = read(name, rest)[2].words if rest else []
    if name == "techniques" and others != ["NAME"]:
        known = {technique.name for technique in CATALOGUE} | {technique.family for technique in CATALOGUE}
        assert not others or " ".join(others) in known
    if name in ("train", "eval", "predict", "find", "ablate") and shown.page not in TASKS:  # composed below
        for word in others:
            key = word.partition("=")[0].lstrip("+")
            assert "=" not in word or is_key(key) or is_of_ours(word), word


@functools.cache
def composes(words: tuple[str, ...]) -> bool:
    """Return True for a config that is valid, here or on a machine that has what it needs."""
    try:
        read_config(words)
    except errors.PtfastError as error:
        return error.code in ASKS_MACHINE
    return True


@pytest.mark.parametrize("shown", COMPOSED, ids=str)
def test_a_config_composes(
    shown: Shown, in_users_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty folder, where composing is quick, or else in the user's."""
    name, *rest = shown.words
    flags = read(name, rest)[2]
    sweeps = name == "race" or getattr(flags, "multirun", False)
    for point in points(flags.words) if sweeps else [tuple(flags.words)]:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            if composes(point):
                continue
        read_config(point)


@pytest.mark.parametrize("shown", QUICK, ids=str)
def test_a_quick_command_runs(shown: Shown, in_tmp: Path) -> None:
    assert shown.words[1:] == ("NAME", "FILE") or run(shown.words) == 0


def test_scripts_exist() -> None:
    assert failures(check_scripts, PAGES) == []


def check_scripts(page: str) -> None:
    commands = re.findall(r"\bpython (scripts/\w+\.py)([^`\n]*)", PAGES[page])
    for script, words in commands:
        code = (ROOT / script).read_text()
        assert all(f'"{word}"' in code for word in words.split() if word.startswith("--")), words
    for script in re.findall(r"\bscripts/\w+(?:\.py)?", PAGES[page]):
        assert (ROOT / script).is_file()


# Keys and options.


def keys_of(section: str) -> set[str]:
    """The keys of a section, those of all its options' targets included."""
    found: set[str] = set()

    def walk(node: Any, inside: bool) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item, inside)
        if not isinstance(node, dict):
            return
        for name, sub in node.items():
            if name == "properties":
                found.update(sub if inside else ())
                for key, value in sub.items():
                    walk(value, inside or key == section)
            elif name == "propertyNames" and inside:
                found.update(sub.get("enum", ()))
            else:
                walk(sub, inside)

    walk(SCHEMA, False)
    return found


SCHEMA = explained_schema()
KEYS = {section: keys_of(section) for section in Config.model_fields}
OURS = ("data", "model", "sampling", "task", "schedule", "optimizer", "logger")
"""Sections in which a part of one's own may be named, with keys that it alone knows."""


def is_key(word: str) -> bool:
    section, *rest = word.split(".")
    if section == "metrics":
        return True  # by names of one's own
    if section in paths.SEVERAL and len(rest) > 1:
        rest = rest[1:]
    if section == "evals" or rest[:1] == ["parts"]:
        section, rest = "data", rest[1 if section == "evals" else 2 :]
    return section in KEYS and (not rest or rest[0] in KEYS[section] | {"_target_"})


def is_of_ours(word: str) -> bool:
    """Return True for a keyword or a group of an example, or of Hydra."""
    section, _, name = word.partition("=")[0].lstrip("+").partition(".")
    if section.startswith(("hydra", "recipe")) or section in ("vars", "paths", "experiment"):
        return True
    code = "".join(fences(OWN_PARTS, "python"))
    return section in OURS and bool(re.search(rf"def \w+\(.*\b{name}: ", code))


def test_keys_and_options_exist() -> None:
    assert failures(check_keys, PAGES) == []


def check_keys(page: str) -> None:
    for word in [word for span in spans(page) if not span.startswith("ptfast ") for word in span.split()]:
        match = re.fullmatch(r"\+?([a-z_]+(?:\.[a-z_0-9]+)*)(=)?(.*)", word.rstrip(";,"))
        if not match or word in NO_KEYS or word.endswith(")"):
            continue
        key, equals, value = match.groups()
        section = key.split(".")[0]
        if section not in KEYS:
            assert not equals or section == "recipe" or page in OTHERS_KEYS, word
        elif "." in key or (equals and value):
            assert is_key(key), word
            if equals and key in paths.groups() and re.fullmatch(r"[a-z_0-9]+", value):
                assert value in paths.options(key), word


def test_the_tables_of_techniques_are_the_catalogue() -> None:
    page = PAGES["docs/reference/techniques.md"]
    assert doc_tables.techniques(page) == page, "scripts/doc_tables.py writes it"


def test_the_list_of_the_audit_is_its_checks() -> None:
    code = "".join(file.read_text() for file in (ROOT / "ptfast/measure/audit").glob("*_checks.py"))
    checks = PAGES["docs/speed/audit.md"].partition("## Checks\n")[2]
    items = re.findall(r"^- (`.+?`): ", checks, re.MULTILINE)
    names = [name for item in items for name in re.findall(r"`([^`]+)`", item)]
    assert sorted(names) == sorted(set(re.findall(r'Finding\(\s*"([^"]+)"', code)))


def test_every_code_is_explained() -> None:
    page = PAGES["docs/reference/errors.md"]
    rows = re.findall(r"^\| ([A-Z]\d{3}) \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    assert {code: meaning for code, meaning, _ in rows} == errors.CODES
    assert all(remedy.strip() for *_, remedy in rows)
    kinds = (errors.PtfastError, *errors.PtfastError.__subclasses__())
    known = {kind.exit_code for kind in kinds} | {
        value for name, value in vars(errors).items() if name.startswith("EXIT_")
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == known | {
        128 + signal.SIGKILL
    }
