"""The steps of docs/contributing/adding-a-part.md, done in a copy of the tree as the page says, and run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import ROOT
from test_layers import violations

PAGE = ROOT / "docs/contributing/adding-a-part.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_ALL = """
import sys
from ptfast.cli.command_line import run
for words in {commands}:
    print(">", *words)
    sys.stdout.flush()
    assert run(words) == 0, words
"""


def apply_diff(tree: Path, diff: str) -> None:
    """Change a file of `tree` where it says, word for word, what the diff goes by."""
    first, *lines = diff.splitlines()
    file = tree / first.removeprefix("--- ")
    before = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
    after = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+"))
    text = file.read_text("utf-8")
    assert text.count(before) == 1, f"{file.name} has not once:\n{before}"
    file.write_text(text.replace(before, after), "utf-8")


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with all that the page adds."""
    tree = tmp_path_factory.mktemp("extended")
    for folder in ("ptfast", "conf", "recipes", "docs", "scripts", "tests"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, tree / name)
    for language, text in FENCE.findall(PAGE.read_text("utf-8")):
        if language == "diff":
            apply_diff(tree, text)
        elif new := re.match(r"# ([\w/]+\.(?:py|yaml))\n", text):
            file = tree / new[1]
            assert not file.exists(), f"{new[1]} is there already"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text[new.end() :], "utf-8")
    return tree


def python(tree: Path, *words: str) -> str:
    """Run Python on the copy, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONWARNINGS": "error::UserWarning:ptfast"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shown_commands() -> list[list[str]]:
    blocks = [text for language, text in FENCE.findall(PAGE.read_text("utf-8")) if language == "sh"]
    return [shlex.split(line)[1:] for text in blocks for line in text.splitlines()]


def run_commands(tree: Path, commands: Sequence[Sequence[str]]) -> dict[str, str]:
    """The output of each command, all in one process, which imports torch once."""
    printed = python(tree, "-c", RUN_ALL.format(commands=[list(words) for words in commands]))
    parts = re.split(r"^> (.*)\n", printed, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_part_trains_and_shows(extended: Path) -> None:
    printed = run_commands(extended, [*shown_commands(), ["techniques"], ["train", "--help"]])
    panels = {command: text for command, text in printed.items() if "steps=2" in command}
    (relu,) = (text for command, text in panels.items() if "inplace_relu" in command)
    assert "every ReLU overwrites its input" in relu
    assert "ReLU in place" in printed["techniques"]
    assert "rewrites.inplace_relu=false" in printed["techniques ReLU-in-place"]


@pytest.mark.slow
def test_the_tests_of_every_addition_pass(extended: Path) -> None:
    """Those that the page names, as far as they are about what it adds."""
    python(extended, "scripts/doc_tables.py")
    tests = (
        *("it_gives_what_plain_gives[ReLU-in-place]", "a_record_is_complete"),
        *("every_option_has_a_record", "options_that_records_name_exist"),
    )
    python(
        extended,
        *("-m", "pytest", "-p", "no:xdist", "tests/techniques/test_inplace_relu.py"),
        *(f"tests/test_techniques.py::test_{name}" for name in tests),
        "tests/test_layers.py::test_names_and_folders_can_be_told_apart",
        "tests/test_docs.py::test_the_tables_of_techniques_are_the_catalogue",
        "tests/config/test_json_schema.py::test_every_key_is_there_and_explained",
    )


def test_the_rooms_keep_their_order(extended: Path) -> None:
    assert violations(extended / "ptfast") == []


def test_a_technique_touches_three_places() -> None:
    text = PAGE.read_text("utf-8").partition("\n## A technique\n")[2].partition("\n## ")[0]
    touched = {
        found[1]
        for _, block in FENCE.findall(text)
        if (found := re.match(r"(?:---|#) ([\w/]+\.(?:py|yaml))\n", block))
    }
    places = {name if name.startswith(("conf/", "tests/")) else name.rpartition("/")[0] for name in touched}
    assert len(places) == 3, touched
