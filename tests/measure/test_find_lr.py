"""`ptfast find lr`: what curves suggest, that nothing is changed, and what is written."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, same_bits, train

from ptfast.cli import command_line
from ptfast.config.files.overlay import check_overlay, write_overlay
from ptfast.config.read import read_config
from ptfast.core.errors import MachineError
from ptfast.measure.find.lr_finder import descend, measure, range_test, run_trials, smooth, start_lr

LRS = [1e-6 * 10 ** (step / 20) for step in range(140)]
SMALL = ("model=mlp", "model.hidden=[8]", "batch_size=32")
BRIEF = {"lowest": 1e-4, "highest": 10.0, "num_steps": 30}


def curve(falls_at: float, explodes_at: float) -> list[float]:
    """A loss of 2 that falls to 1 around one learning rate and rises without bounds around another."""
    return [
        1 + 1 / (1 + (lr / falls_at) ** 2) + min((lr / explodes_at) ** 3, 1e3) + 0.02 * math.sin(7 * step)
        for step, lr in enumerate(LRS)
    ]


@pytest.mark.parametrize(("falls_at", "explodes_at"), [(1e-4, 1e-2), (1e-3, 0.1), (1e-2, 1.0)])
def test_a_clear_curve(falls_at: float, explodes_at: float) -> None:
    found = start_lr(LRS, smooth(curve(falls_at, explodes_at)))
    assert found is not None
    assert falls_at / 3 < found < explodes_at / 3


def losses_around(best: float, explodes_at: float) -> Callable[[float], float]:
    return lambda lr: math.inf if lr > explodes_at else 1 + math.log10(lr / best) ** 2


@pytest.mark.parametrize("start", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("best", [3e-3, 0.02])
def test_trials_walk_to_the_best_learning_rate(best: float, start: float) -> None:
    losses = descend(losses_around(best, 0.3), start, 1e-6, 10.0)
    assert len(losses) <= 6
    assert best / 2 < min(losses, key=losses.__getitem__) < best * 2
    # Neighbors only, and no way back.
    lrs = sorted(losses)
    assert all(high / low == pytest.approx(10**0.5) for low, high in pairwise(lrs))


def test_trials_stay_in_the_range() -> None:
    assert sorted(descend(lambda lr: 1 / lr, 1.0, 0.5, 9.0)) == pytest.approx([1.0, 10**0.5])
    assert sorted(descend(lambda lr: lr, 1.0, 0.5, 9.0)) == pytest.approx([1.0, 10**0.5])


def test_losses_that_explode_do_not_move_what_lies_before() -> None:
    losses = curve(1e-3, 0.1)
    wild = [min(loss, 3.0) if loss < 3 else loss * 1e6 for loss in losses]
    assert start_lr(LRS, smooth(wild)) == start_lr(LRS, smooth(losses))
    # The first loss alone may lie far above the others.
    assert start_lr(LRS, smooth([9.0, *losses[1:]])) == start_lr(LRS, smooth(losses))


@pytest.mark.parametrize("losses", [[2.0] * 140, [2.0 + 0.01 * step for step in range(140)]])
def test_no_curve_no_suggestion(losses: list[float]) -> None:
    assert start_lr(LRS, smooth(losses)) is None


@pytest.mark.parametrize(
    "words",
    [
        ("model=resnet_digits", "model.width=4", "ema=ema", "optimizer=adamw"),
        (*SMALL, "model.dropout=0.2", "optimizer=sgd", "precision=amp_fp16", "gradients.accumulate=2"),
    ],
)
def test_the_run_is_left_as_it_was(words: tuple[str, ...], tmp_path: Path) -> None:
    run = build_run(tmp_path, *words)

    def state() -> Any:
        scaler = run.precision.scaler.state_dict() if run.precision.scaler else {}
        return copy.deepcopy(
            [run.model.state_dict(), run.optimizer.state_dict(), scaler]
        ), torch.get_rng_state()

    before = state()
    schedule, average, progress = run.schedule, run.ema, run.progress.step
    test = range_test(run, **BRIEF)
    assert len(test.losses) > 10
    assert test.lrs[0] == BRIEF["lowest"]
    assert same_bits(state(), before)
    assert (run.schedule, run.ema, run.progress.step) == (schedule, average, progress)
    trials = run_trials(run, 0.1, lowest=0.05, highest=0.5, num_steps=20)
    assert len(trials) == 2
    assert all(math.isfinite(loss) for loss in trials.values())
    assert same_bits(state(), before)
    # The same test again sees the same.
    assert range_test(run, **BRIEF).losses == test.losses


def test_a_step_that_fp16_skips_does_not_count(tmp_path: Path) -> None:
    """It has no loss, and the learning rate does not rise over it."""
    data = ("data=custom", "data._target_=toys.blobs", "data.val=0", "batch_size=10")
    model = ("model=custom", "model._target_=toys.Overflowing", "+model.calls=[3,4,8]")
    run = build_run(tmp_path, *data, *model, "optimizer=sgd", "precision=amp_fp16", "steps=20")
    test = range_test(run, lowest=1e-4, highest=1e-3, num_steps=20)
    assert len(test.losses) == len(test.lrs) == 17
    assert min(test.losses) > 0
    lrs = [1e-4 * 10 ** (step / 19) for step in range(20)]
    # One step late, as in training: of the 3rd and 4th steps the 5th knows one, of the 8th the 9th does not.
    assert test.lrs == pytest.approx([*lrs[:2], lrs[3], *lrs[3:5], lrs[6], *lrs[6:17]])


def test_the_command_writes_a_recipe_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("defaults:\n  - resnet_digits\n  - override /schedule: onecycle\n")
    words = [*SMALL, "recipe=./mine.yaml", "run.name=x"]
    assert command_line.run(["find", "lr", *words, "--write", "found.yaml", "--out", "out"]) == 0
    out = capsys.readouterr().out
    facts = json.loads(Path("out/lr.json").read_text())
    bars = [line.split()[2] for line in out.splitlines() if line.endswith("*")]
    assert 5 < len(bars) <= 16
    assert 20 < len(max(bars)) <= 40
    assert any(f"chosen {facts['chosen']:.2g} " in " ".join(line.split()) for line in out.splitlines())
    assert min((loss, lr) for lr, loss in facts["trials"] if loss is not None)[1] == facts["chosen"]
    _, config = read_config(["recipe=./found.yaml"])
    assert config.optimizer.target.kwargs["lr"] == pytest.approx(facts["chosen"], rel=0.01)
    assert config.model.target.path.endswith("Mlp")
    assert config.schedule.target.path.endswith("OneCycle")
    assert config.run.name is None
    assert train("recipe=./found.yaml", "epochs=null", "steps=3", "run.dir=run") == 0
    assert command_line.run(["find", "lr", *words, "--write", "found.yaml"]) == 4
    assert "exists already" in capsys.readouterr().err


def test_a_reference_batch_scales_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "optimizer.lr_scaling=linear", "optimizer.reference_batch=8"]
    assert command_line.run(["find", "lr", *words, "--write", "found.yaml", "--out", "out"]) == 0
    facts = json.loads(Path("out/lr.json").read_text())
    _, config = read_config(["recipe=./found.yaml"])
    assert config.optimizer.target.kwargs["lr"] * 4 == pytest.approx(facts["chosen"], rel=0.01)


def test_a_config_that_never_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    range_of_lrs = ["--from", "1e-9", "--to", "1e-8", "--steps", "20"]
    assert (
        command_line.run(["find", "lr", *SMALL, *range_of_lrs, "--write", "found.yaml", "--out", "out"]) == 8
    )
    assert "makes the loss decrease" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["lr.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["find"], "an argument is missing"),
        (["find", "lrr"], "Did you mean lr?"),
        (["find", "lr", "--from", "x"], "--from=x"),
        (["find", "lr", "--from", "\uff11"], "expected a number above 0"),
        (["find", "lr", "--from", "1", "--to", "0.1"], "--from=1"),
        (["find", "lr", "--steps", "3"], "at least 20"),
        (["find", "lr", "--steps", "20.7"], "expected a whole number of at least 20"),
        (["find", "lr", "--write", "x.txt"], "ends in .yaml"),
        (["find", "lr", "optimizer.lrr=1"], "Did you mean optimizer.lr?"),
    ],
)
def test_bad_flags(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(words) == 2
    assert said in capsys.readouterr().err


def test_what_is_found_for_a_recipe_of_ones_own_builds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file inherits the one before it wherever both lie, and whoever asks."""
    (tmp_path / "of mine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "of mine")
    Path("a.yaml").write_text("defaults:\n  - override /model: mlp\nmodel: {hidden: [8]}\nbatch_size: 32\n")
    found = {"b": {"optimizer.lr": 0.25}, "c": {"batch_size": 64}, "d": {"dataloader.kind": "plain"}}
    given = "recipe=./a.yaml"
    for name, values in found.items():
        given = f"recipe={write_overlay(Path(f'{name}.yaml'), [given, 'seed=3'], values, ['Found'])}"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert write_overlay(Path("choices.yaml"), ["optimizer=sgd"], {}, []) == "./choices.yaml"
    assert read_config(["recipe=./choices.yaml"])[1].optimizer.target.path.endswith("SGD")
    assert write_overlay(Path("e.yaml"), ["recipe=../of mine/d.yaml"], {"epochs": 2}, []) == "./e.yaml"
    check_overlay(Path("new folder/f.yaml"))
    with pytest.raises(MachineError, match="cannot be written to"):
        check_overlay(Path("e.yaml/f.yaml"))
    for name in ("./e.yaml", str(tmp_path / "elsewhere" / "e.yaml")):
        _, config = read_config([f"recipe={name}"])
        assert config.optimizer.target.kwargs["lr"] == 0.25
        assert config.model.target.kwargs["hidden"] == [8]
        assert (config.batch_size, config.dataloader.kind) == (64, "plain")
        assert (config.epochs, config.seed, config.recipe) == (2, 3, "e")


@pytest.mark.slow
def test_rate_batch_and_loader_are_found_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("defaults:\n  - override /model: mlp\nmodel: {hidden: [8]}\nbatch_size: 32\n")
    lr = ["find", "lr", "recipe=./a.yaml", "--write", "b.yaml"]
    batch = ["find", "batch", "recipe=./b.yaml", "--write", "c.yaml", "--to", "128", "--seconds", "0.1"]
    workers = ["find", "workers", "recipe=./c.yaml", "--write", "d.yaml", "--to", "1", "--seconds", "0.1"]
    for command in (lr, batch, workers):
        assert command_line.run(command) == 0
    assert train("recipe=./d.yaml", "epochs=null", "steps=3", "run.dir=run") == 0
    _, config = read_config(["recipe=./d.yaml"])
    _, of_batch = read_config(["recipe=./c.yaml"])
    assert (config.batch_size, config.optimizer) == (of_batch.batch_size, of_batch.optimizer)
    assert config.model.target.kwargs["hidden"] == [8]
    assert config.dataloader.kind != "auto"


def test_ranks_are_measured_by_their_micro_batches() -> None:
    words = [*SMALL, "device=cpu"]
    seen = [
        measure(read_config([*words, *own])[1], **BRIEF, trial_steps=20)
        for own in (["micro_batches=2"], ["parallel=ddp", "parallel.nproc=2"])
    ]
    assert seen[0] == seen[1]
