"""Debugging aids: what they find, where they leave it, and that a run is the same with them and without."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from config_trees import check, refused
from running import build_run, same_bits, train, weights
from torch import Tensor, nn

from ptfast.core.errors import ConfigError, MachineError, NumericsError
from ptfast.profiling.debugging import check_gradients, debugging
from ptfast.profiling.step_phases import PHASES, Phases, watched
from ptfast.run import Run
from ptfast.training.fit import fit

SMALL = ("model.hidden=[8]", "steps=6", "batch_size=32", "micro_batches=2", "log_every=3")


class Cube(torch.autograd.Function):
    """x cubed, whose backward forgets the factor of 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x**2


class Net(nn.Module):
    """Whose layer `first` has a right gradient and a wrong one by choice."""

    def __init__(self, num_classes: int, broken: bool = True, casts: bool = False) -> None:
        super().__init__()
        self.broken, self.casts = broken, casts
        self.first, self.norm, self.last = nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, num_classes)
        self.dropout = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.first(images.flatten(1)))
        x = x.float().to(x.dtype) if self.casts else x
        return self.last(self.dropout(Cube.apply(x) if self.broken else x**3))


class WrongLinear(torch.autograd.Function):
    """A linear layer whose backward pass gives the weight a gradient that is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, 1.1 * (grads[0].T @ x)


class Wide(nn.Module):
    """Has a layer of 512 x 512, whose gradient may be wrong."""

    def __init__(self, num_classes: int, broken: bool = True) -> None:
        super().__init__()
        self.first, self.wide, self.broken = nn.Linear(64, 512), nn.Linear(512, 512), broken
        self.last = nn.Linear(512, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1)).tanh()
        x = WrongLinear.apply(x, self.wide.weight) + self.wide.bias if self.broken else self.wide(x)
        return self.last(x.tanh())


@pytest.fixture
def run(in_tmp: Path) -> Iterator[Run]:
    run = build_run(in_tmp / "run", *SMALL)
    yield run
    run.train_loader.close()


def test_phases_of_every_step(run: Run) -> None:
    told: list[tuple[str, str]] = []
    phases = Phases(lambda name: told.append(("enter", name)), lambda name: told.append(("leave", name)))
    with watched(run, phases):
        fit(run)
    # Phases never overlap: each is left before the next is entered.
    entered = [name for what, name in told[::2] if what == "enter"]
    assert entered == [name for what, name in told[1::2] if what == "leave"]
    one_step = ["data", *(2 * ["forward", "backward"]), "optimizer"]
    assert entered[: 6 * len(one_step)] == 6 * one_step


def test_off_leaves_the_run_as_it_is(run: Run) -> None:
    with debugging("none", run):
        assert not torch.is_anomaly_enabled()
        assert "to" not in vars(run.clock)
        assert run.debug_aids == []
    with watched(run, Phases(print, print)):
        assert "to" in vars(run.clock)
    assert "to" not in vars(run.clock)
    assert run.debug_aids == []


def test_runs_are_the_same_with_each_of_them(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "model.dropout=0.1", "debug.wait=1", "debug.warmup=1", "debug.active=2")
    assert train(*words, "run.dir=none") == 0
    for mode in ("profiler", "gradcheck"):
        capsys.readouterr()
        assert train(*words, f"debug={mode}", f"run.dir={mode}") == 0
        assert same_bits(weights(Path("none")), weights(Path(mode)))
        out = capsys.readouterr().out
        assert f"warning: debug={mode} is on" in out
        if mode == "gradcheck":
            assert "gradcheck: gradients match the loss" in out
    trace = json.loads(Path("profiler/trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("data") == 2
    assert names.count("forward") == names.count("backward") == 4
    assert "aten::addmm" in names
    table = Path("profiler/profile.txt").read_text()
    assert "aten::addmm" in table
    assert "CPU Mem" in table


def test_a_run_may_be_resumed_with_another(in_tmp: Path) -> None:
    assert train(*SMALL, "run.dir=whole") == 0
    assert train(*SMALL, "run.dir=other", "saving.every=3steps", "saving.keep=2", "debug=gradcheck") == 0
    resumed = ("run.dir=resumed", "run.resume=other/saved/step-3", "saving.every=3steps", "saving.keep=2")
    looks = ("debug=profiler", "debug.wait=0", "debug.warmup=0", "debug.active=2")
    assert train(*SMALL, *resumed, *looks) == 0
    assert Path("resumed/trace.json").exists()
    assert same_bits(weights(Path("whole")), weights(Path("resumed")))


def test_too_few_steps_to_look_at(run: Run) -> None:
    said = "only 6 steps are left to train, but"
    with (
        pytest.raises(ConfigError, match=said) as caught,
        debugging("profiler", run, wait=4, warmup=1, active=2),
    ):
        pass
    assert caught.value.code == "C011"


@pytest.mark.parametrize("casts", [False, True])
def test_gradcheck_lets_right_gradients_pass(in_tmp: Path, casts: bool) -> None:
    """Also of a model that computes in float32 whatever it gets."""
    words = ("model=custom", "model._target_=test_debug_aids.Net", "model.broken=false", "steps=2")
    words = (*words, f"model.casts={str(casts).lower()}")
    run = build_run(in_tmp / "run", *words)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    check_gradients(run)
    assert same_bits(before, dict(run.model.state_dict()))
    assert all(parameter.grad is None for parameter in run.model.parameters())


@pytest.mark.parametrize("casts", ["false", "true"])
def test_gradcheck_names_what_is_wrong(in_tmp: Path, capsys: pytest.CaptureFixture[str], casts: str) -> None:
    words = (
        f"model.casts={casts}",
        "model=custom",
        "model._target_=test_debug_aids.Net",
        "steps=2",
        "debug=gradcheck",
        "run.dir=run",
    )
    assert train(*words) == 5
    error = capsys.readouterr().err
    assert "error[N002]" in error
    assert "does not match the loss: first." in error or "does not match the loss: norm." in error


@pytest.mark.parametrize("broken", [True, False])
def test_gradcheck_finds_a_wrong_gradient_of_a_large_layer(in_tmp: Path, broken: bool) -> None:
    words = ("model=custom", "model._target_=test_debug_aids.Wide", f"model.broken={str(broken).lower()}")
    run = build_run(in_tmp / "run", *words, "steps=2")
    if not broken:
        check_gradients(run)
        return
    with pytest.raises(NumericsError, match=r"does not match the loss: wide\.weight") as caught:
        check_gradients(run)
    assert caught.value.code == "N002"


@pytest.mark.parametrize("words", [("model=resnet_digits",), ("model=resnet_digits", "checkpointing=full")])
def test_gradcheck_of_a_convolutional_network(in_tmp: Path, words: tuple[str, ...]) -> None:
    check_gradients(build_run(in_tmp / "run", "model.width=4", *words))


def test_nvtx_needs_a_gpu() -> None:
    with pytest.raises(MachineError) as caught:
        check(debug={"mode": "nvtx"}, device="cpu")
    assert (caught.value.code, caught.value.key) == ("E005", "debug")


def test_nvtx_marks_phases(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ranges: list[str] = []
    seen: list[str] = []

    def push(name: str) -> None:
        open_ranges.append(name)
        seen.append(name)

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: open_ranges.pop())
    with debugging("nvtx", run):
        fit(run)
    assert open_ranges == []
    assert set(seen) == set(PHASES)


def test_nvtx_marks_operators(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def emit(enabled: bool) -> contextlib.nullcontext[None]:
        asked.append(enabled)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", emit)
    for operators in (False, True):
        with debugging("nvtx", run, operators=operators):
            pass
    assert asked == [False, True]


def test_bad_values() -> None:
    assert refused(debug={"mode": "profiler", "active": 0}).code == "C005"
    assert refused(debug={"mode": "profiler", "wait": -1}).code == "C005"


def test_an_error_inside_is_passed_on(run: Run) -> None:
    for mode in ("profiler", "memory"):
        with pytest.raises(NumericsError), debugging(mode, run, active=2):  # type: ignore[arg-type]
            raise NumericsError("N001", "the loss is nan")
    assert run.debug_aids == []


def test_an_aid_that_a_model_turns_on_itself_is_told_once_with_its_place(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model=custom", "model._target_=misfits.Net", "model.how=detects", "log_every=1")
    try:
        assert train(*words, "steps=3", "run.dir=a") == 0
    finally:
        torch.autograd.set_detect_anomaly(False)
    told = capsys.readouterr().out.splitlines()
    (line,) = [line for line in told if "anomaly detection is on" in line]
    assert line.startswith("warning: ")
    assert "debug=anomaly" in line


def test_an_aid_that_was_asked_for_is_not_told_of_again(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*SMALL, "debug=anomaly", "run.dir=a") == 0
    assert "is on, which" not in capsys.readouterr().out
