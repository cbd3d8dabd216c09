"""Runs in half width: what stays in float32, scaled steps, resuming, evaluating."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import LAYERWISE
from resuming import assert_same_run
from running import build_run, same_bits, summary, train, weights
from torch import Tensor, nn

from ptfast.cli import command_line
from ptfast.techniques.ema.weight_averages import MovingAverage
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.gradients.clipping import build_clipper
from ptfast.techniques.precision.mixed_precision import apply_half_weights
from ptfast.training.fit import fit
from ptfast.training.loop.step import Trainer

CPU = torch.device("cpu")
SMALL = ("model.hidden=[16]", "batch_size=64", "log_every=5")
FUSED = ("sgd", "adam", "adamw")
OWN = ("lars", "lamb", "nvlamb", "novograd", "muon")
UNFUSED = ("nadam", "radam", "adafactor")


# Scaled steps on the CPU.


@pytest.mark.parametrize("name", [*FUSED, *OWN, *UNFUSED])
def test_a_step_whose_gradients_overflow_changes_nothing(tmp_path: Path, name: str) -> None:
    """And the steps beside it train, for every optimizer, whose scale is on the device."""
    words = (*SMALL, "precision.mode=amp_fp16", f"optimizer={name}", "steps=4", "eval.every=4steps")
    run = build_run(tmp_path, *words)
    trainer, scaler = Trainer(run), run.precision.scaler
    batches = run.train_loader.steps(0, 4)
    states = []
    for step, scale in enumerate((2.0**10, 2.0**40, 2.0**10), 1):
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
        trainer.update.scale = scaler.scale(torch.ones(()))
        trainer.train(batches, step)
        states.append(
            copy.deepcopy((dict(run.model.named_parameters()), run.optimizer.state_dict()["state"]))
        )
    trainer.losses.read()
    assert run.progress.skipped_steps == 1
    assert same_bits(states[0], states[1])
    assert not same_bits(states[1][0], states[2][0])
    assert all(value.isfinite().all() for value in states[2][0].values())


@pytest.mark.parametrize(("mode", "name"), [("amp_fp16", "adamw"), ("bf16_true", "lamb")])
def test_a_stopped_run_goes_on_to_the_same_bits(in_tmp: Path, mode: str, name: str) -> None:
    words = (*SMALL, f"precision={mode}", f"optimizer={name}", "ema=ema", "ema.decay=0.9", "epochs=1")
    words = (*words, "gradients.clip_norm=1", "callbacks=[{_target_: resuming.Armed, step: 13}]")
    assert train(*words, "run.dir=whole") == 0
    Path("armed").write_text("SIGTERM")
    assert train(*words, "run.dir=stopped") == 75
    assert summary(Path("stopped"))["steps"] == 13
    assert train(*words, "run.dir=stopped", "run.resume=auto") == 0
    assert_same_run(Path("whole"), Path("stopped"))


# Weights in bfloat16.


class Net(nn.Module):
    """With tied weights, BatchNorm, integers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.decode = nn.Linear(6, 4)
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.encode.weight
        self.register_buffer("offset", torch.full((4,), 1 / 3))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, inputs: Tensor, *, mask: Any = None, labels: Tensor | None = None) -> dict[str, Any]:
        hidden = self.norm(self.encode(inputs))
        tensors = {"inputs": inputs, "hidden": hidden, **(mask or {})}
        self.seen = {name: tensor.dtype for name, tensor in tensors.items()}
        if labels is not None:
            self.seen["labels"] = labels.dtype
        return {"logits": self.decode(hidden) + self.offset, "ids": torch.ones(2, dtype=torch.long)}


def test_all_but_batch_norm_is_halved() -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    assert apply_half_weights(model) is model
    floats = {n: t.dtype for n, t in model.state_dict().items() if t.is_floating_point()}
    assert {n for n, dtype in floats.items() if dtype is not torch.bfloat16} == {
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
    }
    assert model.norm.num_batches_tracked.dtype is torch.int64
    assert model.tied.weight is model.encode.weight
    inputs, numbers = torch.randn(8, 4), torch.arange(3)
    outputs = model(inputs, mask={"weights": torch.ones(3), "numbers": numbers}, labels=torch.ones(8))
    half, single = torch.bfloat16, torch.float32
    expected = {"inputs": half, "hidden": half, "weights": half, "numbers": torch.int64, "labels": single}
    assert model.seen == expected
    assert outputs["logits"].dtype is single
    assert outputs["ids"].dtype is torch.int64
    torch.testing.assert_close(outputs["logits"], plain(inputs)["logits"], rtol=0.05, atol=0.05)
    outputs["logits"].sum().backward()
    assert model.encode.weight.grad.dtype is half
    assert model.norm.weight.grad.dtype is single


def test_a_halved_model_is_pickled() -> None:
    model = apply_half_weights(nn.Sequential(nn.Linear(2, 2)))
    assert pickle.loads(pickle.dumps(model))(torch.ones(1, 2)).dtype is torch.float32


def test_running_statistics_follow_what_bf16_could_not() -> None:
    """A thousandth of the way at a time, as statistics are averaged."""
    model = apply_half_weights(nn.Sequential(nn.Identity(), nn.BatchNorm1d(1, momentum=1e-3)))
    for _ in range(1000):
        model(torch.tensor([[2.0], [4.0]]))
    assert model[1].running_mean.item() == pytest.approx(3 * (1 - 0.999**1000), rel=1e-3)


def test_the_average_of_half_weights_is_kept_in_float32() -> None:
    """As that of the same weights in float32: in bf16 it would never move."""
    narrow, wide = nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2)
    averages = []
    for model in (narrow, wide):
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(1.0)
        ema = MovingAverage(model, 0.999)
        ema.update(1)
        with torch.no_grad():
            model.weight.fill_(2.0)
        for _ in range(100):
            ema.update(1)
        averages.append(ema.state_dict()["averages"])
    assert averages[0]["weight"].dtype is torch.float32
    assert same_bits(averages[0], averages[1])
    ema = MovingAverage(narrow, 0.999)
    ema.load_state_dict({"averages": averages[0], "updates": 101})
    with ema.swapped():
        assert torch.equal(narrow.weight, averages[0]["weight"].bfloat16())
    assert torch.equal(narrow.weight, torch.full((2, 2), 2.0, dtype=torch.bfloat16))


def test_half_gradients_are_measured_in_float32() -> None:
    parameters = [nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(10))]
    for parameter in parameters:
        parameter.grad = torch.linspace(0.1, 1, parameter.numel()).to(parameter.dtype)
    exact = sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None) ** 0.5
    clip = build_clipper(Gradients(clip_norm=1.0), parameters)
    assert clip is not None
    assert float(clip()) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", [*FUSED, *OWN, *UNFUSED])
def test_every_optimizer_trains_half_weights(tmp_path: Path, name: str) -> None:
    words = (*SMALL, f"optimizer={name}", "steps=20", "eval.every=20steps")
    single, half = (
        build_run(tmp_path / mode, *words, f"precision.mode={mode}") for mode in ("fp32", "bf16_true")
    )
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert fit(single) == fit(half) == "finished"
    assert half.metrics["val"]["loss"] == pytest.approx(single.metrics["val"]["loss"], rel=0.05)
    values = [(n, v) for state in half.optimizer.state.values() for n, v in state.items() if n != "step"]
    dtypes = {value.dtype for _, value in values if isinstance(value, Tensor)}
    if name in LAYERWISE:
        assert dtypes == {torch.float32}


@pytest.mark.parametrize(
    "words",
    [
        ("model=resnet20", "task.label_smoothing=0.1", "batch_size=64"),
        ("data=text_tsv", "data.path=text.tsv", "model=text_encoder", "batch_size=8"),
        ("data=text_file", "data.path=text.txt", "model=gpt", "data.context_length=16", "batch_size=8"),
    ],
    ids=["images", "text", "running text"],
)
def test_built_in_models_run_in_half_weights(in_tmp: Path, words: tuple[str, ...]) -> None:
    Path("text.tsv").write_text(
        "".join(f"{'good' if i % 2 else 'bad'} film {i}\t{i % 2}\n" for i in range(80))
    )
    Path("text.txt").write_text("to be or not to be that is the question " * 40)
    run = build_run(in_tmp / "run", *words, "precision=bf16_true", "steps=2")
    assert torch.bfloat16 in {p.dtype for p in run.model.parameters()}
    assert fit(run) == "finished"
    assert run.metrics["val"]["loss"] < 10


def test_a_saved_run_evaluates_to_what_training_saw(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "model=resnet20",
        "precision=bf16_true",
        "ema=ema",
        "ema.decay=0.5",
        "steps=4",
        "eval.every=4steps",
    )
    assert train(*words, "run.dir=run", "batch_size=32") == 0
    saved = weights(Path("run"))
    assert {t.dtype for t in saved.values()} == {torch.bfloat16, torch.float32, torch.int64}
    capsys.readouterr()
    assert command_line.run(["eval", "run"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[0])
    for name, value in summary(Path("run"))["val"].items():
        assert figures[name] == value


def test_weights_go_from_one_format_to_another(in_tmp: Path) -> None:
    assert train(*SMALL, "precision=bf16_true", "steps=2", "run.dir=half") == 0
    run = build_run(in_tmp / "wide", *SMALL, "model.weights=half", "steps=1")
    for name, value in run.model.state_dict().items():
        assert value.dtype is torch.float32
        assert torch.equal(value, weights(Path("half"))[name].float())
