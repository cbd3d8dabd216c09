"""Steps that are not finite: left out on all ranks, explained, counted, and gone back to."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from running import WITH_TESTS, build_run, records, same_bits, summary, train, training_state, weights
from toys import Holed, Lines, Plant

from ptfast.config.read import read_config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError
from ptfast.core.plain_display import Display
from ptfast.core.resolved import Progress
from ptfast.core.tensors.trees import map_tensors
from ptfast.launch.rank_main import RankPart
from ptfast.optim.build_optimizer import apply_lr, build_step
from ptfast.run import Run
from ptfast.techniques.numerics import checked_steps
from ptfast.training.build import build
from ptfast.training.fit import fit
from ptfast.training.step import Trainer

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
    trainer = Trainer(run)
    factors, momenta = run.schedule.lr_factors(0, 12), run.schedule.momenta(0, 12)
    run.forward.train()
    for step, batch in enumerate(run.train_loader.steps(0, 12)):
        if step + 1 not in bad:
            trainer.accumulate(batch, step)
            if trainer.batchnorm is not None:
                trainer.batchnorm.merge()
            if run.clip is not None:
                run.clip()
            apply_lr(run.optimizer, trainer.base_lrs, factors[step], momenta and momenta[step])
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
        monkeypatch.setattr(checked_steps, "READ_AT_ONCE", ())
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
        monkeypatch.setattr(checked_steps, "READ_AT_ONCE", ())
        monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", as_on_cuda)
    dtype = {"half": torch.bfloat16, "complex": torch.complex64}.get(kind, torch.float32)
    weight = torch.nn.Parameter(torch.ones(3, 1, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    steps = checked_steps.CheckedSteps(
        optimizer, build_step, [weight], torch.device("cpu"), Ranks(), Progress(), 10
    )
    for value in (1.0, math.nan, 2.0, math.inf, -math.inf, 3.0):
        gradient = torch.ones_like(weight)
        gradient[2] = value
        weight.grad = gradient.to_sparse(1) if kind == "sparse" else gradient
        before = weight.detach().clone()
        steps.check(torch.ones(()))
        steps.take()
        assert torch.equal(before, weight.detach()) != math.isfinite(value)
    assert int(steps.counts[1]) == 3


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
    steps = checked_steps.CheckedSteps(
        optimizer, build_step, [weight], torch.device("cpu"), ranks, Progress(), 10
    )
    steps.check(torch.ones(()))
    steps.take()
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
        monkeypatch.setattr(checked_steps, "READ_AT_ONCE", ())
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
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    numbers = build_run(Path("b"), *merged(*WORDS, *words)).train_loader
    step = next(
        step for step in range(12) if {13, 31} & {n for own in numbers.sample_numbers(step) for n in own}
    )
    found = {13, 31} & {int(n) for own in numbers.sample_numbers(step) for n in own}
    assert f"step {step + 1} was left out" in line
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


def test_going_back_ends_in_the_bits_of_skipping(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, build, models = [7, 8, 11], RankPart.build, list[Any]()

    def built(*args: Any, **keywords: Any) -> Run:
        if "rewinds" in keywords:
            assert models[-1]() is None, "the model before takes memory"
        run = build(*args, **keywords)
        models.append(weakref.ref(run.model))
        return run

    monkeypatch.setattr(RankPart, "build", built)
    assert train(*planted("numerics=skip", "run.dir=skips", steps=bad)) == 0
    assert train(*planted("numerics=rewind", "run.dir=whole", steps=bad)) == 0
    assert "going back to step 5" in capsys.readouterr().out
    monkeypatch.setattr(Plant, "stop", 9)
    assert train(*planted("numerics=rewind", "run.dir=cut", steps=bad)) == 75
    monkeypatch.setattr(Plant, "stop", None)
    capsys.readouterr()
    assert train(*planted("numerics=rewind", "run.dir=cut", "run.resume=auto", steps=bad)) == 0
    assert "going back" not in capsys.readouterr().out, "its steps are checked since"
    for name in ("whole", "cut"):
        assert same_bits(weights(Path("skips")), weights(Path(name)))
        assert same_bits(training_state(Path("skips")), training_state(Path(name)))
        assert [line["step"] for line in records(Path(name))] == [2, 4, 5, 6, 8, 10, 12]
        assert summary(Path(name))["skipped_steps"] == 3


@pytest.mark.slow
def test_sharded_ranks_go_back_to_a_state_that_is_still_being_written(
    in_tmp: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WITH_TESTS.items():
        monkeypatch.setenv(name, value)
    words = ("parallel=fsdp", "parallel.nproc=2", "device=cpu", "saving.background=true")
    for mode in ("skip", "rewind"):
        assert train(*planted(f"numerics={mode}", f"run.dir={mode}", *words, steps=[7, 8, 11])) == 0
    assert "going back to step 5" in capfd.readouterr().out
    assert same_bits(*(weights(Path(mode)) for mode in ("skip", "rewind")))
    assert same_bits(*(training_state(Path(mode)) for mode in ("skip", "rewind")))


def test_weights_that_are_not_finite_are_gone_back_from(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found as the state is saved: the loss of that step was finite, its gradients were not."""
    words = ("run.dir=a", "log_every=50", "model._target_=test_skipped_steps.Steep", "numerics=rewind")
    assert train(*planted(*words, steps=[])) == 0
    assert "the weights are not finite after step 5: going back to step 0" in capsys.readouterr().out
    assert all(bool(weight.isfinite().all()) for weight in weights(Path("a")).values())


class Steep(torch.nn.Module):
    """Has gradients that are not finite, of a finite loss, in its fifth step."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.layer, self.count = torch.nn.Linear(4, num_classes), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += self.training
        outputs = self.layer(inputs)
        return outputs + (outputs * 0).abs().sqrt() if self.training and self.count == 5 else outputs


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("compile=step",), "numerics"),
        (("parallel=ddp", "parallel.nproc=2", "parallel.compression=powersgd"), "numerics"),
    ],
)
def test_what_cannot_leave_a_step_out_is_refused(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(merged(*WORDS, *words, "numerics=skip"))
    assert (caught.value.code, caught.value.key) == ("C011", key)
