"""The README is true: its example of own parts trains, and its figures are on benchmarks."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
from conftest import ROOT

from ptfast.cli.command_line import run

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_example_with_a_user_s_own_parts_trains(tmp_path, monkeypatch):
    section = README.split("## Your own model and data")[1].split("\n## ")[0]
    (tmp_path / "mine.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (command,) = re.findall(r"```\nptfast (train .*?)\n```", section, re.DOTALL)
    assert run([*shlex.split(command), "run.dir=run"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["val"]["accuracy"] > 0.9
    monkeypatch.delitem(sys.modules, "mine")
    (handed_over,) = re.findall(r"```\n(import ptfast\n.*?)```", section, re.DOTALL)
    names = {"__name__": "script"}
    exec("\n".join([*re.findall(r"```python\n(.*?)```", section, re.DOTALL), handed_over]), names)
    assert names["result"].best["accuracy"] > 0.9


def test_a_figure_stands_on_benchmarks():
    rows = "\n".join(re.findall(r"^\|.*\|$", README, re.MULTILINE))
    figures = re.findall(r"\d[\d,]*\.?\d*(?=x\b| \[| of the activations| times the time| samples/s)", rows)
    benchmarks = (ROOT / "docs/evidence/cpu-benchmarks.md").read_text()
    assert [figure for figure in figures if figure not in benchmarks] == []
