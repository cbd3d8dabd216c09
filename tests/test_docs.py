"""What the docs show is tried: links, commands, keys, options, codes and the examples of one's own parts."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import ROOT

from ptfast.cli.command_line import COMMANDS, run
from ptfast.cli.find_command import SEARCHES
from ptfast.cli.flags import read_flags
from ptfast.config.catalogue import CATALOGUE
from ptfast.config.editors.json_schema import schema
from ptfast.config.files import paths
from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core import errors

FILES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
LINKING = {**PAGES, **{name: (ROOT / name).read_text() for name in ("CONTRIBUTING.md", "CHANGELOG.md")}}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FOR_RECIPES = {"adamw_onecycle", "adamw_gpt", "adamw_text", "resnet_digits"}
"""Options whose numbers belong to one recipe."""
OTHERS_KEYS = {"docs/migrating.md"}
"""Pages that show the arguments of other frameworks."""
FORMS = {"group=option", "group.key=value", "model=net"}
"""What stands for any key, and an option that a page has the reader make."""
ASKS_MACHINE = {"E004", "E005"}
"""Refusals for what only this machine lacks: the command is right."""


class Shown(NamedTuple):
    """A command line on a page."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{Path(self.page).stem}: {' '.join(self.words)}"[:100]


def fences(page: str, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(PAGES[page]) if kind == language]


def spans(page: str) -> list[str]:
    """The code within the text of a page."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[page]))


def shown_commands() -> Iterator[Shown]:
    """Every `ptfast` and `-m ptfast` command line, without its comment."""
    for page in PAGES:
        blocks = [text for kind in ("", "bash") for text in fences(page, kind)]
        lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
        for line in [*lines, *spans(page)]:
            command = re.match(r"(?:.*-m )?ptfast (?=[a-z-])(.*)", line)
            if command:
                yield Shown(page, tuple(shlex.split(command[1], comments=True)))


COMMANDS_SHOWN = sorted({shown.words: shown for shown in shown_commands()}.values())
"""Each once, whatever pages show it."""
OWN_PARTS = "docs/own-parts.md"
"""The page of which every example is trained."""
TRAINING = [s for s in COMMANDS_SHOWN if s.words[0] in ("train", "find") and s.page != OWN_PARTS]
QUICK = [shown for shown in COMMANDS_SHOWN if shown.words[0] in ("recipes", "copy", "schema", "completion")]


@pytest.fixture(scope="module")
def in_users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the commands on the pages name: `mine.py` and recipes."""
    folder = tmp_path_factory.mktemp("user")
    code = [text for page in (OWN_PARTS, "docs/streams.md") for text in fences(page, "python")]
    (folder / "mine.py").write_text("\n".join(code))
    for text in [*fences("docs/config.md", "yaml"), *fences(OWN_PARTS, "yaml")]:
        if name := re.match(r"# (\w+\.yaml)", text):
            (folder / name[1]).write_text(text)
    (folder / "found.yaml").write_text("defaults:\n  - resnet_digits\n\noptimizer:\n  lr: 0.0076\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        yield folder
        patch.delitem(sys.modules, "mine", raising=False)


# Links and form.


def slug(heading: str) -> str:
    """The anchor that a heading has on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(title) for title in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)}


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", FENCE.sub("", LINKING[page])):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.is_file(), target
        assert not anchor or anchor in anchors(file), target


def test_the_index_names_every_page() -> None:
    linked = re.findall(r"^\| \[.+?\]\(([\w-]+\.md)\) \|", PAGES["docs/README.md"], re.MULTILINE)
    assert len(linked) == len(set(linked))
    assert {f"docs/{name}" for name in linked} == set(PAGES) - {"README.md", "docs/README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_is_for(page: str) -> None:
    title, _, opening, *_ = PAGES[page].split("\n")
    assert re.match(r"# \w", title)
    assert re.match(r"\w", opening), "a page opens with what it is for"
    for line in FENCE.sub("", PAGES[page]).splitlines():
        assert len(line) <= 150 or line.startswith("|"), line


# Commands.


@pytest.mark.parametrize("shown", COMMANDS_SHOWN, ids=str)
def test_a_command_is_read(shown: Shown) -> None:
    name, *rest = shown.words
    if name in ("--help", "COMMAND"):
        return
    command = COMMANDS[name]
    _, others = read_flags(rest, command.flags)
    assert command.max_arguments is None or len(others) <= command.max_arguments
    if name == "find":
        assert not others or others[0] in SEARCHES
    if name == "techniques" and others != ["NAME"]:
        known = {technique.name for technique in CATALOGUE} | {technique.family for technique in CATALOGUE}
        assert not others or " ".join(others) in known
    if name in ("train", "eval", "predict", "find"):
        for word in others:
            key = word.partition("=")[0].lstrip("+")
            assert "=" not in word or is_key(key) or is_of_ours(word), word


def points(words: list[str]) -> list[tuple[str, ...]]:
    """Configs of a sweep in which each choice of `key=a,b` is made once."""
    choices = []
    for word in words:
        key, equals, value = word.partition("=")
        whole = not equals or value.startswith(("[", "{", "'"))
        choices.append([word] if whole else [f"{key}={one}" for one in value.split(",")])
    length = max(map(len, choices))
    return list(zip(*[(choice * length)[:length] for choice in choices], strict=True))


@functools.cache
def composes(words: tuple[str, ...]) -> bool:
    """Return True for a config that is valid, here or on a machine that has what it needs."""
    try:
        read_config(words)
    except errors.MachineError as error:
        if error.code not in ASKS_MACHINE:
            raise
    return True


@pytest.mark.parametrize("shown", TRAINING, ids=str)
def test_a_config_composes(shown: Shown, in_users_folder: Path) -> None:
    flags, words = read_flags(shown.words[1:], COMMANDS[shown.words[0]].flags)
    words = words[1:] if shown.words[0] == "find" else words
    if {"FILE", "NAME", "..."} & {*words, *flags.values()} and "--write" not in flags:
        return  # a form, not a command
    for point in points(words) if "--multirun" in flags else [tuple(words)]:
        assert composes(point)


@pytest.mark.parametrize("shown", QUICK, ids=str)
def test_a_quick_command_runs(shown: Shown, in_tmp: Path) -> None:
    assert shown.words[1:] == ("NAME", "FILE") or run(shown.words) == 0


@pytest.mark.parametrize("page", PAGES)
def test_scripts_exist(page: str) -> None:
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


SCHEMA = schema()
KEYS = {section: keys_of(section) for section in Config.model_fields}
OURS = ("data", "model", "task", "schedule", "optimizer", "logger")
"""Sections in which a part of one's own may be named, with keys that it alone knows."""


def is_key(word: str) -> bool:
    section, *rest = word.split(".")
    return section in KEYS and (not rest or rest[0] in KEYS[section] | {"_target_"})


def is_of_ours(word: str) -> bool:
    """Return True for a keyword of an example, or of Hydra."""
    section, _, name = word.partition("=")[0].lstrip("+").partition(".")
    if section.startswith(("hydra", "recipe")):
        return True
    code = "".join(fences(OWN_PARTS, "python"))
    return section in OURS and bool(re.search(rf"def __init__\(.*\b{name}: ", code))


@pytest.mark.parametrize("page", PAGES)
def test_keys_and_options_exist(page: str) -> None:
    for word in [word for span in spans(page) if not span.startswith("ptfast ") for word in span.split()]:
        match = re.fullmatch(r"\+?([a-z_]+(?:\.[a-z_0-9]+)*)(=)?(.*)", word.rstrip(";,"))
        if not match or word in FORMS or word.endswith(")"):
            continue
        key, equals, value = match.groups()
        section = key.split(".")[0]
        if section not in KEYS:
            assert not equals or section == "recipe" or page in OTHERS_KEYS, word
        elif "." in key or (equals and value):
            assert is_key(key), word
            if equals and key in paths.groups() and re.fullmatch(r"[a-z_0-9]+", value):
                assert value in paths.options(key), word


def test_the_table_of_groups_lists_the_options_that_there_are() -> None:
    section = PAGES["docs/config.md"].split("## Groups and options")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", section, re.MULTILINE)
    listed = {group: set(re.findall(r"`(\w+)`", text)) for group, text in rows}
    assert set(listed) == set(paths.groups())
    for group, options in listed.items():
        assert options == set(paths.options(group)) - FOR_RECIPES, group


def test_the_tables_of_techniques_are_the_catalogue() -> None:
    page = PAGES["docs/techniques.md"]
    assert import_module("scripts.techniques_table").written(page) == page, (
        "scripts/techniques_table.py writes it"
    )


def test_every_code_is_explained() -> None:
    page = PAGES["docs/error-codes.md"]
    assert dict(re.findall(r"^\| ([A-Z]\d{3}) \| (.+) \|$", page, re.MULTILINE)) == errors.CODES
    kinds = (errors.PtfastError, *errors.PtfastError.__subclasses__())
    known = {kind.exit_code for kind in kinds} | {
        value for name, value in vars(errors).items() if name.startswith("EXIT_") and name != "EXIT_FINDINGS"
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == known


# What a user copies.


def test_every_own_part_trains(in_users_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown_there = [shown for shown in shown_commands() if shown.page == OWN_PARTS]
    commands = [shown for shown in shown_there if shown.words[0] == "train"]
    assert len(commands) >= 9
    accuracy = {}
    for number, shown in enumerate(commands):
        folder = in_users_folder / f"run{number}"
        assert run([*shown.words, f"run.dir={folder}"]) == 0
        figures = json.loads((folder / "summary.json").read_text())["val"]
        accuracy[" ".join(shown.words)] = figures["accuracy"]
        assert figures["accuracy"] > 0.5
        if "task=mine.WithRecall" in shown.words:
            assert 0 < figures["outer_recall"] <= 1
        if any("mine.Watch" in word for word in shown.words):
            assert figures["error"] == pytest.approx(1 - figures["accuracy"])
            assert '"error": ' in (folder / "metrics.jsonl").read_text()
        if "logger._target_=mine.Lines" in shown.words:
            assert len((folder / "figures.txt").read_text().splitlines()) == 5
    assert "error " in capsys.readouterr().out
    assert all(value > 0.9 for words, value in accuracy.items() if "NAdam" in words)


def test_a_stream_trains(in_users_folder: Path) -> None:
    words = ["train", "data=custom", "data._target_=mine.Stream", "steps=20", "run.dir=streamed"]
    assert run(words) == 0
    assert json.loads(Path("streamed/summary.json").read_text())["steps"] == 20


def test_files_of_config_say_what_the_page_says(in_users_folder: Path) -> None:
    (groups,) = [text for text in fences("docs/config.md", "yaml") if "groups:" in text]
    Path("groups.yaml").write_text(groups)
    config = read_config(["+recipe=./groups.yaml"])[1]
    assert [group.match for group in config.optimizer.groups] == ["*.bias", "layers.1.*"]
    assert read_config(["+recipe=./mine.yaml"])[1].epochs == 60
    (option,) = [text for text in fences(OWN_PARTS, "yaml") if text.startswith("# conf/")]
    file = Path(re.match(r"# (\S+)\n", option)[1])  # type: ignore[index]
    file.parent.mkdir(parents=True)
    file.write_text(option.partition("\n")[2])
    words = ["data=custom", "data._target_=mine.Rings", "model=net", "model.width=32"]
    assert read_config(words)[1].model.target.path == "mine.Net"


def test_weights_of_lightning_become_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = torch.nn.Linear(2, 3).state_dict()
    torch.save({"state_dict": {f"model.{name}": value for name, value in weights.items()}}, "epoch=9.ckpt")
    (code,) = fences("docs/migrating.md", "python")
    exec(code, {})
    assert torch.load("weights.pt", weights_only=True).keys() == weights.keys()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_the_first_commands_run(page: str, in_tmp: Path) -> None:
    """Those on the digits that come with the package, one after another, as a newcomer types them."""
    shown = [shown.words for shown in shown_commands() if shown.page == page]
    on_digits = [words for words in shown if "+recipe=resnet_digits" in words]
    assert on_digits
    for words in on_digits:
        plain = [word for word in words if not word.startswith("epochs=")]
        short = [] if {"--cfg", "--dry-run", "find"} & {*words} else ["epochs=2"]
        assert run([*plain, *short]) == 0, words
