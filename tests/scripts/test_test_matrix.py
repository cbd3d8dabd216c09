"""The script for machines that are not this one: every cell has tests, and says how they ended."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ptfast.core import devices

_loader = importlib.machinery.SourceFileLoader("test_matrix", str(ROOT / "scripts" / "test_matrix"))
_spec = importlib.util.spec_from_loader("test_matrix", _loader)
assert _spec is not None
test_matrix = importlib.util.module_from_spec(_spec)
_loader.exec_module(test_matrix)

Capture = pytest.CaptureFixture[str]
FILE = """
import os

def test_that_passes():
    assert os.environ["NAME"] == "value"
    assert "TAKEN" not in os.environ

def test_that_fails():
    assert False

def test_without_its_fixture(nothing):
    pass
"""


def table(capsys: Capture, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """The output of the script, run with this interpreter."""
    monkeypatch.setattr(sys, "argv", ["test_matrix", "--python", sys.executable, *words])
    return test_matrix.main(), capsys.readouterr().out


@pytest.mark.parametrize("name", test_matrix.CELLS)
def test_every_file_of_a_cell_is_there(name: str) -> None:
    cell = test_matrix.CELLS[name]
    stems = [Path(file).stem.removeprefix("test_") for file in test_matrix.files_of(cell)]
    assert stems
    assert stems == cell.files.split()


def test_a_gpu_is_emulated_for_each_test_that_needs_no_more() -> None:
    mark = "@pytest.mark.gpu" + "\n"
    files = [path for path in (ROOT / "tests").glob("**/test_*.py") if mark in path.read_text()]
    asked = {path.stem.removeprefix("test_") for path in files}
    assert asked <= {*test_matrix.CELLS["emulated_gpu"].files.split()}


def test_a_failing_test_shows_in_the_table_and_below_it(
    in_tmp: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (in_tmp / "test_it.py").write_text(FILE)
    place = test_matrix.Place(tree=in_tmp, env={"NAME": "value", "TAKEN": None})
    monkeypatch.setenv("TAKEN", "yes")
    monkeypatch.setattr(test_matrix, "CELLS", {"mine": test_matrix.Cell("of mine", "", lambda _: place)})
    code, out = table(capsys, monkeypatch, "test_it.py", "-n", "0")
    _, _, line, *rest = out.splitlines()
    assert code == 1
    assert line.startswith("| mine | of mine | Python 3.")
    assert "| test_it.py -n 0 | 1 | 2 | 0 |" in line
    assert [each.partition(" - ")[0] for each in rest if each.startswith("- ")] == [
        "- FAILED test_it.py::test_that_fails",
        "- ERROR test_it.py::test_without_its_fixture",
    ]


def test_a_cell_that_cannot_run_says_why_and_fails_nothing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = {
        "old": test_matrix.Cell("Python 2.0", "devices", python="2.0"),
        "bare": test_matrix.Cell(
            "bare",
            "devices",
            lambda scratch: test_matrix.emulated_gpu(scratch)._replace(prefix=("env", f"PATH={scratch}")),
        ),
        "odd": test_matrix.Cell(
            "odd", "devices", lambda _: test_matrix.Place(prefix=("sh", "-c", "echo no >&2; false"))
        ),
    }
    monkeypatch.setattr(test_matrix, "CELLS", cells)
    code, out = table(capsys, monkeypatch)
    assert code == 0
    assert "| not run: no python2.0 on the PATH or in pyenv |" in out
    assert "| odd | odd |  | not run: no |" in out
    assert "CannotEmulateError: " in out


def test_without_a_compiler_all_else_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("sh", "g++", "x86_64-linux-gnu-g++-12", "clang", "cc", "ccache", "git"):
        (programs / name).touch(mode=0o755)
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", str(programs))
    place = test_matrix.no_compiler(tmp_path / "path")
    assert sorted(path.name for path in Path(place.env["PATH"]).iterdir()) == ["ccache", "git", "sh"]


def test_the_plain_cpu_has_neither_avx_512_nor_bf16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = Path(test_matrix.CELLS["plain_cpu"].place(tmp_path).env["PTFAST_CPUINFO"])
    monkeypatch.setattr(devices, "CPU_INFO", file)
    assert not devices.multiplies_bf16("cpu")
    assert "avx2" in file.read_text()
    assert "avx512" not in file.read_text()


def test_the_lower_bounds_are_those_of_pyproject() -> None:
    bounds = test_matrix.lower_bounds()
    assert "hydra-core~=1.3.2.0" in bounds
    assert not [bound for bound in bounds if bound.startswith("torch")]
