"""What the README shows is run: its own-model example, and the names that its tables list."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from ptfast.cli.command_line import COMMANDS, run
from ptfast.cli.techniques_command import in_readme
from ptfast.config.files import paths

README = (Path(__file__).parents[1] / "README.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS_SHOWN = re.findall(
    r"^ptfast (\w+)", "\n".join(text for kind, text in FENCES if not kind), re.MULTILINE
)
FOR_RECIPES = {"adamw_onecycle", "adamw_gpt", "adamw_text", "resnet_digits"}
"""Options whose numbers belong to one recipe."""


def test_the_examples_with_a_user_s_own_parts_train(tmp_path, monkeypatch, capsys):
    section = README.split("## Your own model and data")[1].split("\n## ")[0]
    (tmp_path / "mine.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    commands = re.findall(r"```\nptfast (train .*?)\n```", section, re.DOTALL)
    assert len(commands) == 2
    for number, command in enumerate(commands):
        assert run([*shlex.split(command.replace("\\\n", " ")), f"run.dir=run{number}"]) == 0
        figures = json.loads((tmp_path / f"run{number}" / "summary.json").read_text())["val"]
        assert figures["accuracy"] > 0.9
    assert "error " in capsys.readouterr().out
    assert '"error": ' in (tmp_path / "run1" / "metrics.jsonl").read_text()
    monkeypatch.delitem(sys.modules, "mine")


def test_the_table_of_groups_lists_the_options_that_there_are():
    section = README.split("## Override anything")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", section, re.MULTILINE)
    listed = {group: set(re.findall(r"`(\w+)`", text)) for group, text in rows}
    assert set(listed) == set(paths.groups())
    for group, options in listed.items():
        assert options == set(paths.options(group)) - FOR_RECIPES, group


def test_the_table_of_switches_is_the_catalogue() -> None:
    assert in_readme(README) == README, "scripts/techniques_table.py writes it anew"


@pytest.mark.parametrize("command", sorted(set(COMMANDS_SHOWN)))
def test_every_command_shown_exists(command):
    assert command in COMMANDS
