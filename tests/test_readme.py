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
    module, handed_over = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (command,) = re.findall(r"^ptfast (train .*mine\.Net.*)$", README, re.MULTILINE)
    assert run([*shlex.split(command), "run.dir=run"]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["val"]["accuracy"] > 0.9
    monkeypatch.delitem(sys.modules, "mine")
    names = {"__name__": "script"}
    exec(f"{module}\n{handed_over}", names)
    assert names["result"].best["accuracy"] > 0.9


def test_its_figures_stand_on_benchmarks():
    section = README.split("## How fast is it?")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \|(.*\d.*)\|$", section, re.MULTILINE)
    figures = [figure for row in rows for figure in re.findall(r"\d[\d,.]*(?= \(|\*| \|| $)", row)]
    assert len(figures) == 44
    benchmarks = (ROOT / "docs/evidence/cpu-benchmarks.md").read_text()
    known = {*re.findall(r"\d[\d,.]*\d|\d", benchmarks.split("## Whole trainings")[1].split("\n## ")[0])}
    assert {*figures} <= known


def test_it_stays_short():
    assert len(README.splitlines()) <= 155
    assert len(README.split()) <= 950
