"""The script for machines with a GPU: its stages continue, its tests are found, its runs compose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ptfast.config.read import read_config
from ptfast.core.errors import PtfastError
from scripts.gpu import correctness, limits, progress, speed
from scripts.gpu.check import (
    Check,
    FailedError,
    Figures,
    NotShownError,
    OutOfTimeError,
    Part,
    Record,
    run_stage,
)
from scripts.gpu.noise import write_text

FILE = """
import os, pytest

@pytest.mark.gpu("TF32")
@pytest.mark.filterwarnings("ignore:nothing")
def test_on_a_gpu():
    pass

@pytest.mark.gpu("triton")
def test_compiled():
    pass

def test_on_any_machine():
    pass

def test_that_fails():
    assert 1 == 2

def test_that_ends_its_process():
    os._exit(3)
"""


def run_pytest(folder: Path, kind: str) -> str:
    (folder / "test_it.py").write_text(FILE)
    words = ["-m", "pytest", "-p", "scripts.gpu.progress", "--kind", kind, "--noted", str(folder / "noted")]
    words += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("kind", "name"), [("eager", "test_on_a_gpu"), ("compiling", "test_compiled")])
def test_tests_of_a_kind_are_found(kind: str, name: str, tmp_path: Path) -> None:
    """A mark of pytest's own may not be unknown there: that is an error of the whole file."""
    assert "1 passed, 4 deselected" in run_pytest(tmp_path, kind)
    assert [test.rpartition("::")[2] for test in progress.read_notes(tmp_path / "noted", kind)] == [name]


@pytest.mark.slow
def test_tests_continue_where_the_last_call_ended(tmp_path: Path) -> None:
    for _ in range(progress.TRIES):
        run_pytest(tmp_path, "rest")
    assert "5 deselected" in run_pytest(tmp_path, "rest")
    notes = progress.read_notes(tmp_path / "noted", "rest")
    assert [note["outcome"] for note in notes.values()] == ["passed", "failed", "failed"]
    assert [note["why"] for note in notes.values()][2] == "did not end"
    assert (tmp_path / "noted").read_text().count("test_on_any_machine") == 2
    progress.forget_failed(tmp_path / "noted")
    assert [note["outcome"] for note in progress.read_notes(tmp_path / "noted", "rest").values()] == [
        "passed"
    ]


def part(name: str, error: Exception | None = None, **given: float) -> Part:
    def run(check: Check) -> Figures:
        if error is not None:
            raise error
        return {"time": 1}

    return Part(name, run, **given)


def test_a_stage_leaves_what_its_time_does_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [part("quick", needs_s=1), part("here", NotShownError("no GPU")), part("long", needs_s=1000)]
    assert run_stage(1, parts, Check(tmp_path, tmp_path), Record(tmp_path)) == 3
    assert "left for the next call of the same stage: long" in capsys.readouterr().out
    again = [part("quick", FailedError("ran again")), parts[1], part("long")]
    assert run_stage(1, again, Check(tmp_path, tmp_path), Record(tmp_path)) == 0
    entries = Record(tmp_path).entries(1)
    assert [entry["state"] for entry in entries.values()] == ["passed", "not shown", "passed"]
    record = Record(tmp_path)
    record.forget(1)
    assert list(record.entries(1)) == ["quick", "long"]
    assert "| quick | passed | 0 | time 1 |" in (tmp_path / "gpu_check.md").read_text()


def test_what_takes_a_whole_call_has_failed(tmp_path: Path) -> None:
    """Otherwise it would be begun in every call."""
    assert run_stage(1, [part("endless", OutOfTimeError())], Check(tmp_path, tmp_path), Record(tmp_path)) == 1
    assert (
        run_stage(
            2, [part("tests", OutOfTimeError(), resumes=True)], Check(tmp_path, tmp_path), Record(tmp_path)
        )
        == 3
    )


def test_a_command_ends_with_its_stage(tmp_path: Path) -> None:
    check = Check(tmp_path, tmp_path, limit_s=1)
    with pytest.raises(OutOfTimeError):
        check.python("-c", "import time; print('begun', flush=True); time.sleep(60)")
    assert check.left_s > -30
    with pytest.raises(FailedError, match="exit code 1: ValueError: wrong"):
        Check(tmp_path, tmp_path).python("-c", "raise ValueError('wrong')")
    assert "begun" in (tmp_path / "gpu_check.log").read_text()


RUNS = {name: (*words, *correctness.BASE) for name, words in correctness.RUNS.items()}
ROWS = {
    **RUNS,
    **{
        f"{task} {row}": (f"preset={row.split()[0]}", *speed.WORDS[task], *row.split()[1:])
        for task, rows in limits.SWITCHES.items()
        for row in rows
    },
}


@pytest.mark.parametrize("words", ROWS.values(), ids=ROWS)
def test_every_run_composes_or_says_that_this_machine_cannot_run_it(
    words: tuple[str, ...], in_tmp: Path
) -> None:
    write_text(Path("text.txt"), 64, 1000)
    try:
        # As bench_switches has it: a row's own words take the place of others.
        read_config({word.partition("=")[0]: word for word in words}.values())
    except PtfastError as error:
        if error.code != "E005":
            raise


def test_gaps_between_kernels() -> None:
    """Two kernels at once are busy once; a gap is where none runs."""
    times = [(0, 10), (5, 2), (8, 12), (30, 10), (41, 9)]
    events = [{"cat": "kernel", "ts": 1000.0 + start, "dur": length} for start, length in times]
    figures = limits.gaps([*events, {"cat": "cpu_op", "ts": 0, "dur": 5}, {"name": "no category"}], 2)
    assert (figures["launches a step"], figures["busy"], figures["step ms"]) == (2, 39 / 50, 0.025)
    assert (figures["gaps a step"], figures["longest gap us"]) == (1, 10)
    with pytest.raises(NotShownError, match="no kernels"):
        limits.gaps([{"cat": "cpu_op", "ts": 0, "dur": 5}], 2)


def test_a_table_is_read() -> None:
    said = "round 1/3\n| switches | samples/s |\n|---|--:|\n| `plain` | 10 [9-11] |\n| fast | 20 | |\nend"
    assert limits.table_of(said) == {"plain": "10 [9-11]", "fast": "20"}


def test_rates_beside_a_loop_by_hand() -> None:
    facts = {"flops": 2e12, "batch_size": 8, "peak_memory_bytes": 2**20}
    ours, theirs = (speed.Contender("", None, [seconds] * 2, facts) for seconds in (1.0, 2.0))
    figures = speed.compared(ours, theirs, 2, 16)
    assert (figures["ptfast /s"], figures["by hand /s"], figures["times by hand"]) == (256, 128, 2)
    assert (figures["TFLOP/s"], figures["memory MiB"]) == (4, [1, 1])


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    # Torch itself takes seconds to start.
    (tmp_path / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    words = [ROOT / "scripts" / "gpu_check", "--out", tmp_path / "out"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "LD_PRELOAD": ""}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (4, "gpu_check: no CUDA device is visible\n")
