"""Steps that are not finite: left out on all ranks, explained and counted."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import build_run, records, same_bits, summary, train, training_state, weights
from toys import Holed, Lines, Plant

from ptfast.config.read import read_config
from ptfast.core.distributed import Ranks
from ptfast.core.plain_display import Display
from ptfast.core.protocols import StepBatch
from ptfast.core.run_records import Progress
from ptfast.core.tensors.trees import map_tensors
from ptfast.optim.build_optimizer import apply_lr
from ptfast.run import Run
from ptfast.training.build import build
from ptfast.training.fit import fit
from ptfast.training.loop import updates
from ptfast.training.loop.accumulation import GradientExchange
from ptfast.training.loop.step import Trainer

DATA = ("data=custom", "data._target_=toys.Holed", "data.val=0", "batch_size=10", "dataloader=plain")
WORDS = (*DATA, "steps=12", "log_every=2", "saving.every=5steps", "model=custom", "schedule=onecycle")
WORDS = (*WORDS, "model._target_=toys.DoubleNormed", "optimizer.lr=0.01", "optimizer=sgd", "seed=3")
KINDS = {
    "fp32": (),
    "bf16, clipped, averaged, in parts": (
        *("precision=bf16", "gradients.clip_norm=0.5", "ema.decay=0.8", "optimizer=adamw"),
        "gradients.accumulate=2",
    ),
    "layer by layer": ("optimizer=lamb", "gradients.clip_value=0.01"),
    "sharded": ("parallel=fsdp", "gradients.clip_norm=0.5"),
    "elastic": ("determinism=elastic", "micro_batches=2", "ema.decay=0.8"),
    "not fused": ("optimizer=nadam", "gradients.clip_adaptive=0.1"),
}
AMONG_RANKS = ("fp32", "bf16, clipped, averaged, in parts", "sharded", "elastic")
BAD = [1, 4, 5, 9]
"""The steps, counted from 1, that are not finite."""


@pytest.fixture(autouse=True)
def _nothing_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holed, "planted", False)


def merged(*words: str) -> list[str]:
    """Words, later ones in place of earlier ones of their key."""
    return [*{word.partition("=")[0]: word for word in words}.values()]


def planted(*words: str, steps: list[int] = BAD, rank: int = 0) -> list[str]:
    plant = f"callbacks=[{{_target_: toys.Plant, steps: {steps}, rank: {rank}}}]"
    return merged(*WORDS, *words, plant)


def state_of(run: Run) -> dict[str, Any]:
    average = run.ema.state_dict() if run.ema is not None else {}
    parts = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()["state"]}
    return map_tensors(full, {**parts, "average": average})


def full(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "full_tensor", tensor.clone)()


def by_hand(run: Run, bad: list[int] = BAD) -> dict[str, Any]:
    """The state after a loop that takes every step of clean data but these, of which it reads the batch."""
    trainer, base_lrs = Trainer(run), [group["initial_lr"] for group in run.optimizer.param_groups]
    factors, momenta = run.schedule.lr_factors(0, 12), run.schedule.momenta(0, 12)
    run.forward.train()
    for step, batch in enumerate(run.train_loader.steps(0, 12)):
        if step + 1 not in bad:
            run.progress.step = step
            trainer.accumulate(batch)
            trainer.exchange.merge_statistics()
            if run.clip is not None:
                run.clip()
            apply_lr(run.optimizer, base_lrs, factors[step], momenta and momenta[step])
            run.optimizer.step()
            run.optimizer.zero_grad()
            if run.ema is not None:
                run.ema.update(step + 1)
    return state_of(run)


@pytest.mark.parametrize("decides", ["host", "device"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sharded"])
def test_a_step_that_is_not_finite_is_as_if_it_had_not_been(
    kind: str, decides: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decides == "device":
        monkeypatch.setattr(updates, "READ_AT_ONCE", ())
    run = build_run(tmp_path / "skips", *planted(*KINDS[kind], "numerics=skip"))
    if decides == "device":
        # As a GPU gets it.
        from ptfast.optim.build_optimizer import start_momentum

        start_momentum(run.optimizer)
    run.logger = Lines()
    assert fit(run) == "finished"
    assert run.progress.skipped_steps == len(BAD)
    assert sum(line.get("skipped_steps", 0) for line in run.logger) == len(BAD)
    expected = by_hand(build_run(tmp_path / "by-hand", *merged(*WORDS, *KINDS[kind])))
    found = state_of(run)
    if decides == "device" and "ema.decay=0.8" in KINDS[kind]:
        # Where only the device knows, the average is another formula.
        torch.testing.assert_close(found.pop("average"), expected.pop("average"))
    assert same_bits(found, expected)


def checked_update(optimizer: torch.optim.Optimizer, ranks: Ranks) -> updates.CheckedUpdate:
    """A `CheckedUpdate` of nothing but an optimizer."""
    run: Any = SimpleNamespace(optimizer=optimizer, device=torch.device("cpu"), ranks=ranks, clip=None)
    run.progress, run.display, run.model = Progress(), Display(), torch.nn.Module()
    run.plan = SimpleNamespace(numerics=SimpleNamespace(limit=10))
    window: Any = SimpleNamespace(loss_sum=torch.ones(()))
    return updates.CheckedUpdate(run, window, GradientExchange())


@pytest.mark.parametrize("decides", ["host", "device"])
@pytest.mark.parametrize("kind", ["half", "complex", "sparse"])
def test_gradients_of_every_kind_are_checked(
    kind: str, decides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = torch._amp_foreach_non_finite_check_and_unscale_

    def as_on_cuda(tensors: list[torch.Tensor], *others: torch.Tensor) -> None:
        assert all(tensor.dtype != torch.bfloat16 for tensor in tensors)
        kernel(tensors, *others)

    if decides == "device":
        monkeypatch.setattr(updates, "READ_AT_ONCE", ())
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", as_on_cuda)
    dtype = {"half": torch.bfloat16, "complex": torch.complex64}.get(kind, torch.float32)
    weight = torch.nn.Parameter(torch.ones(3, 1, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    update = checked_update(optimizer, Ranks())
    for value in (1.0, math.nan, 2.0, math.inf, -math.inf, 3.0):
        gradient = torch.ones_like(weight)
        gradient[2] = value
        weight.grad = gradient.to_sparse(1) if kind == "sparse" else gradient
        before = weight.detach().clone()
        update.step(StepBatch((), 1))
        assert torch.equal(before, weight.detach()) != math.isfinite(value)
    assert int(update.counts[1]) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("words", [("optimizer=adamw", "precision=bf16"), ("optimizer=lamb",)], ids=str)
def test_a_gpu_leaves_out_the_steps_that_a_cpu_does(words: tuple[str, ...], tmp_path: Path) -> None:
    skipped = []
    for device in ("cpu", "cuda"):
        holes = ("data.places=[13,31,77]", "numerics=skip", f"device={device}")
        run = build_run(tmp_path / device, *merged(*WORDS, *words, *holes))
        run.logger = Lines()
        assert fit(run) == "finished"
        assert all(bool(part.isfinite().all()) for part in run.model.state_dict().values())
        skipped.append([line.get("skipped_steps", 0) for line in run.logger])
    assert skipped[0] == skipped[1]
    assert sum(skipped[0]) > 1


def test_checking_changes_no_bit_of_a_run_that_is_finite(tmp_path: Path) -> None:
    ends = []
    for mode in ("stop", "skip"):
        words = merged(*WORDS, *KINDS["bf16, clipped, averaged, in parts"], f"numerics={mode}")
        run = build_run(tmp_path / mode, *words)
        fit(run)
        ends.append(state_of(run))
    assert same_bits(*ends)


def cases(ranks: Ranks) -> dict[str, Any]:
    """Whether two ranks, the second with NaN in some steps, end as by hand and with the same bits."""
    found: dict[str, Any] = {}

    def built(name: str, *words: str) -> Run:
        words = ("parallel=ddp", *words, "parallel.nproc=2", "device=cpu", "gradients.accumulate=1")
        folder = Path(f"skips {name}")
        folder.mkdir(exist_ok=True)
        return build(read_config(merged(*words))[1], ranks=ranks, folder=folder, display=Display())

    for name in AMONG_RANKS:
        run = built(name, *planted(*KINDS[name], "numerics=skip", rank=1))
        fit(run)
        ends, skipped = state_of(run), [run.progress.skipped_steps]
        expected = by_hand(built(f"{name}-by-hand", *WORDS, *KINDS[name]))
        every: list[Any] = [None, None]
        torch.distributed.all_gather_object(every, (same_bits(ends, expected), ends["model"], skipped))
        alike = same_bits(every[0][1], every[1][1])
        found[name] = [every[0][0], every[1][0], alike, every[0][2] == every[1][2] == [len(BAD)]]
    # Gradients that only one rank has, as of its share of sharded weights.
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), math.nan if ranks.rank == 1 else 1.0)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    checked_update(optimizer, ranks).step(StepBatch((), 1))
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, weight.tolist())
    found["of one rank"] = told == [[1.0] * 3] * 2
    return found


def test_ranks_agree_on_a_step_that_one_of_them_cannot_take(two_ranks: dict[str, Any]) -> None:
    expected = {name: [True] * 4 for name in AMONG_RANKS}
    assert two_ranks["test_skipped_steps"] == {**expected, "of one rank": True}


def test_steps_that_are_never_finite_end_the_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = planted("numerics=skip", "numerics.limit=3", "run.dir=a", "log_every=1", steps=[*range(5, 13)])
    assert train(*words) == 5
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "error[N001]" in line
    assert "not finite in 3 steps in a row, by step 7" in line
    assert summary(Path("a"))["skipped_steps"] == 3


@pytest.mark.parametrize(("loader", "decides"), [("plain", "host"), ("workers", "host")])
def test_the_first_step_left_out_is_explained(
    loader: str,
    decides: str,
    in_tmp: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if decides == "device":
        monkeypatch.setattr(updates, "READ_AT_ONCE", ())
    words = (
        "data.places=[13,31]",
        "data.mark=-1e4",
        "numerics=skip",
        "run.dir=a",
        f"dataloader={loader}",
        "seed=1",
    )
    words = (*words, "model._target_=test_skipped_steps.Rooted", "gradients.accumulate=2")
    assert train(*merged(*WORDS, *words)) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "was skipped" in line]
    numbers = build_run(Path("b"), *merged(*WORDS, *words)).train_loader
    step = next(
        step for step in range(12) if {13, 31} & {n for own in numbers.sample_numbers(step) for n in own}
    )
    found = {13, 31} & {int(n) for own in numbers.sample_numbers(step) for n in own}
    assert f"step {step + 1} was skipped" in line
    assert "first in the output of layers.1 (Root); " in line
    named = {int(word) for word in line.partition("samples ")[2].partition(".")[0].split(", ")}
    assert named
    assert named <= found


class Root(torch.nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs + 100).sqrt()


class Rooted(torch.nn.Module):
    """Makes NaN of very negative inputs, in a module of its own."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Identity(), Root(), torch.nn.Linear(4, num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def test_a_run_that_skips_steps_resumes_bit_for_bit(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [7, 8, 11]
    assert train(*planted("numerics=skip", "run.dir=whole", steps=bad)) == 0
    monkeypatch.setattr(Plant, "stop", 9)
    assert train(*planted("numerics=skip", "run.dir=cut", steps=bad)) == 75
    monkeypatch.setattr(Plant, "stop", None)
    assert train(*planted("numerics=skip", "run.dir=cut", "run.resume=auto", steps=bad)) == 0
    assert same_bits(weights(Path("whole")), weights(Path("cut")))
    assert same_bits(training_state(Path("whole")), training_state(Path("cut")))
    for name in ("whole", "cut"):
        assert [line["step"] for line in records(Path(name))] == [2, 4, 5, 6, 8, 10, 12]
        assert summary(Path(name))["skipped_steps"] == 3
