"""`ptfast chaos`: its plan, its kills, and a comparison that one bit makes fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from running import train, write_state

from ptfast.cli import command_line
from ptfast.core.clock import Clock
from ptfast.core.distributed import Ranks
from ptfast.core.tensors.checkpoint_files import CheckpointContent, ShardedDraft, read_checkpoint
from ptfast.core.tensors.checkpoint_writer import CheckpointWriter
from ptfast.measure.chaos import chaos_run
from ptfast.measure.chaos.chaos_run import ChaosTest, compare_runs, differences
from ptfast.measure.chaos.kills import (
    MOMENTS,
    PLAN,
    SAVING_POINTS,
    STRIKES,
    Kill,
    RunShape,
    Strikes,
    draw_kills,
    install,
)
from ptfast.measure.outputs import run_ptfast

SHAPE = RunShape(30, [*range(4, 30, 4), 30], [10, 20, 30], world_size=2, launched=True, workers=2)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_repeated_by_its_seed_and_finds_its_moments(seed: int) -> None:
    kills = draw_kills(SHAPE, 20, seed)
    assert kills == draw_kills(SHAPE, 20, seed) != draw_kills(SHAPE, 20, seed + 1)
    assert {kill.moment for kill in kills} == {*MOMENTS}
    steps = [kill.step for kill in kills if kill.step is not None]
    assert steps == sorted(steps)
    assert all(1 <= step <= 30 for step in steps)
    published = [kill for kill in kills if kill.point in SAVING_POINTS[2:]]
    assert all(kill.step in SHAPE.save_steps[:-1] and kill.rank == 0 for kill in published)
    # Nothing is planned for a save that a state makes needless, nor for a start that may not come.
    assert len({kill.step for kill in published}) == len(published)
    for kill, after in pairwise(kills):
        assert not (kill in published and after.moment == "saving" and after.step == kill.step)
        assert not (kill.target == "worker" and after.moment == "start-up")


def test_plans_aim_at_all_that_there_is() -> None:
    def targets(shape: RunShape) -> set[tuple[str, int]]:
        return {(kill.target, kill.rank) for seed in range(9) for kill in draw_kills(shape, 20, seed)}

    ranks = {("rank", 0), ("rank", 1), ("worker", 0), ("worker", 1)}
    assert targets(SHAPE) == ranks | {("launcher", 0)}
    assert targets(RunShape(30, [30], [])) == {("rank", 0)}
    no_val = draw_kills(RunShape(30, [30], []), 50, 0)
    assert "evaluation" not in {kill.moment for kill in no_val}


@pytest.mark.filterwarnings("ignore:.*fork")
def test_kills_go_on_in_a_run_that_outlives_one(tmp_path: Path) -> None:
    kills = [Kill("step", 2, "worker"), Kill("step", 2, "worker"), Kill("saving", 3, point="in place")]
    (tmp_path / PLAN).write_text(json.dumps([asdict(kill) for kill in kills]))
    (tmp_path / STRIKES).touch()
    if (pid := os.fork()) == 0:
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2)]
        for worker in workers:
            worker.start()
        strikes = Strikes(tmp_path, 0)
        for step in range(1, 9):
            strikes.on_step(None, step)
            strikes.at("saving", step, "begun")
            strikes.at("evaluation", step)
            if step == 2:
                for worker in workers:
                    worker.join(10)
                (tmp_path / "workers").write_text(str([worker.exitcode for worker in workers]))
            strikes.at("saving", step - 1, "in place")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "workers").read_text() == "[-9, -9]"
    assert [json.loads(line)["step"] for line in (tmp_path / STRIKES).read_text().splitlines()] == [2, 2, 3]
    # What comes after them finds nothing to do.
    Strikes(tmp_path, 0).on_step(None, 9)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps."""
    folder = tmp_path_factory.mktemp("trained")
    words = ("model.hidden=[8]", "epochs=null", "steps=8", "log_every=2steps", "ema.decay=0.9")
    assert train(*words, f"run.dir={folder}/run") == 0
    return folder / "run"


def test_one_bit_makes_runs_differ(trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained, tmp_path / "other", symlinks=True)
    assert compare_runs(trained, other) == ([], [])
    (other / "saved" / "best").unlink()
    assert compare_runs(trained, other)[0] == ["saved.best: 'step-8' and 'best'"]
    (other / "saved" / "best").symlink_to("step-8")
    state = read_checkpoint(trained / "saved" / "last")
    name, weight = next(iter(state.model.items()))
    weight.view(-1).view(torch.int32)[3] ^= 1
    write_state(other / "saved", 8, state)
    assert compare_runs(trained, other) == ([f"model.{name}: 1 of {weight.numel():,} values differ"], [])
    state = read_checkpoint(trained / "saved" / "last")
    state.training["ema"] = {"step": -1}
    write_state(other / "saved", 8, state)
    (found, *_), _ = compare_runs(trained, other)
    assert found.startswith("training.ema.")


def test_figures_of_several_ranks_may_differ_by_rounding(trained: Path, tmp_path: Path) -> None:
    other = shutil.copytree(trained, tmp_path / "other", symlinks=True)
    log = other / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line, factor in zip(lines, (1 + 1e-9, 1 + 1e-4, 1, 1, 1 + 1e-9), strict=True):
        line["loss"] *= factor
        line["samples_per_s"] = 1.0
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, close = compare_runs(trained, other, tolerates=True)
    names = [text.partition(":")[0].removeprefix("metrics.jsonl.") for text in (*found, *close)]
    assert names == ["train.1.loss", "val.0.loss", "train.0.loss"]
    assert len(compare_runs(trained, other)[0]) == 3
    nearly = {"recent_losses": [1.0], "best_states": [[1.0, 3]], "largest_spike": {"loss": 2.0, "usual": 1.0}}
    exact = json.loads(json.dumps(nearly).replace("1.0", "1.000000001"))
    close = []
    assert not [*differences(nearly, exact, "progress", close)]
    assert len(close) == 3
    log.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    assert "metrics.jsonl.val.0 is missing" in compare_runs(trained, other)[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(2, 0), torch.zeros(0, 2)),
        (torch.tensor(1.0), 1.0),
        (1, 1.0),
        ({"a": 1}, {}),
        ([1, 2], [1]),
        ([None], {0: None}),
    ],
)
def test_all_but_equal_is_different(one: object, other: object) -> None:
    assert list(differences(one, other, "it"))
    assert not list(differences(one, one, "it"))


def test_not_a_number_is_equal_to_itself() -> None:
    nan = torch.tensor([float("nan")], dtype=torch.bfloat16)
    assert not list(differences([nan, float("nan")], [nan.clone(), float("nan")], "it"))


@pytest.fixture
def ended(tmp_path: Path) -> ChaosTest:
    """A test whose two kills were delivered."""
    test = ChaosTest([], tmp_path, [Kill("step", 3), Kill("saving", 4, point="begun")])
    (tmp_path / STRIKES).write_text('{"step": 3}\n{"step": 4}\n')
    test.killed.mkdir()
    (test.killed / "summary.json").write_text('{"goodput": {"training": 0.94}}')
    return test


def test_the_last_line_claims_what_was_found(ended: ChaosTest) -> None:
    trained = "training took 94 % of the time"
    assert ended.verdict([], []) == (f"2 of 2 kills survived, all bits equal; {trained}", 0)
    line, code = ended.verdict([], ["progress.window_loss: 1.0 and 1.0000001"])
    assert (code, "all bits equal" in line, "training losses to 1e-06" in line) == (0, False, True)
    assert ended.verdict(["a"], []) == (
        f"2 of 2 kills survived, but 1 difference from the undisturbed run; {trained}",
        6,
    )
    (ended.folder / STRIKES).write_text('{"step": 3}\n')
    said = "1 kill could not be delivered, first rank 0 in saving at step 4 (begun)"
    assert ended.verdict([], []) == (f"1 of 2 kills survived, all bits equal; {trained}; {said}", 6)
    ended.failure = "attempt 2 hangs"
    assert ended.verdict([], []) == ("0 of 2 kills survived after rank 0 after step 3: attempt 2 hangs", 6)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import time; time.sleep(600)", "attempt 1 hangs: not finished after 1.0s"),
        (
            "raise SystemExit('ptfast: error[S001]: gone')",
            "fails without a kill: ptfast: error[S001]: gone",
        ),
    ],
)
def test_an_attempt_that_nobody_struck_must_end_well(
    in_tmp: Path, code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("stand_in.py").write_text(code)
    monkeypatch.setattr(chaos_run, "MODULE", "stand_in")
    monkeypatch.setattr(chaos_run, "LEAST_LIMIT_S", 1.0)
    test = ChaosTest([], in_tmp, [Kill("step", 3)])
    test.whole_s = 0.1
    test.train_under_kills()
    assert test.failure is not None
    assert said in test.failure
    assert test.verdict([], [])[1] == 6


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run.dir=a"],
            "error[C011]: run.dir (command line): differs between the runs of chaos. Leave it out",
        ),
        (["--out", "full"], "error[E001]: --out=full (command line): is not empty"),
        (["--seed", "x"], "error[C005]: --seed=x"),
    ],
)
def test_bad_requests_start_nothing(
    in_tmp: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("full").mkdir()
    Path("full/file").touch()
    assert command_line.run(["chaos", "data=digits", "model=mlp", *words]) in (2, 4)
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_kill_once_files_are_written_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several ranks write no state in the background, but all in its publication."""
    from ptfast.core.tensors import checkpoint_files
    from ptfast.training import build, checkpointer, evaluate
    from ptfast.training.checkpointer import Checkpointer

    patched = {build: ["build"], evaluate: ["interruptible"], checkpointer: ["prune"]}
    for module, names in {
        **patched,
        checkpoint_files: ["write_manifest", "point"],
        ShardedDraft: ["publish"],
        Checkpointer: ["save"],
    }.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    seen: list[list[str]] = []

    class Watch(Strikes):
        def at(self, moment: str, step: int | None = None, point: str = "") -> None:
            if point == "files written":
                seen.append(sorted(file.name for file in tmp_path.glob("saved/.step-*/*")))

    (tmp_path / PLAN).write_text("[]")
    install(Watch(tmp_path, 0), tmp_path)
    saver = CheckpointWriter(Ranks(), Clock(), background=False)
    facts: dict[str, Any] = {"progress": {"step": 4}}
    draft = ShardedDraft(
        tmp_path / "saved", 4, CheckpointContent({"weight": torch.ones(2)}, {}, facts), Ranks()
    )
    saver.write(draft)
    assert "shard-00001-of-00001.safetensors" in seen[0]


@pytest.mark.slow
def test_a_run_survives_three_kills(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/chaos", "--only", "saving beside training", "--kills", "3"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("3 of 3 kills survived")
    (file,) = tmp_path.glob("*/chaos.json")
    assert all(kill["struck"] for kill in json.loads(file.read_text())["kills"])


def test_the_process_of_a_run_writes_a_log(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    code, said = run_ptfast(["train", "optimizer.lrr=1"], log)
    assert code == 2
    assert said.startswith("ptfast: error[C002]: optimizer.lrr=1")
