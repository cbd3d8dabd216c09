"""Outputs of other people's models: tuples, mappings, objects with logits, and losses of their own."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import train
from torch import Tensor, nn
from torch.nn import functional as F

from ptfast.cli import command_line

WORDS = ("data=arrays", "data.path=a.npz", "data.val=8samples", "batch_size=16", "epochs=2", "device=cpu")


@dataclasses.dataclass
class Scores:
    logits: Tensor


class Net(nn.Module):
    """A linear layer whose outputs come in several forms."""

    def __init__(self, num_classes: int, how: str = "tensor") -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, num_classes), how

    def forward(self, inputs: Tensor) -> Any:
        outputs = self.layer(inputs)
        forms = {
            "tuple": (outputs, inputs.mean()),
            "list": [outputs, inputs],
            "mapping": {"hidden": inputs, "logits": outputs},
            "out": {"out": outputs},
            "object": Scores(outputs),
        }
        return forms.get(self.how, outputs)


class WithLoss(nn.Module):
    """Returns its own loss where it is given labels, as models of transformers do."""

    def __init__(self, num_classes: int, factor: float = 1.0) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, num_classes), factor

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = {"logits": self.layer(inputs)}
        if labels is not None:
            outputs["loss"] = self.factor * F.cross_entropy(outputs["logits"], labels)
        return outputs


@pytest.fixture
def data(in_tmp: Path) -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).numpy()
    np.savez("a.npz", x=inputs, y=(inputs[:, 0] > 0).astype(np.int64))
    np.save("new.npy", inputs[:3])


def run(name: str, model: str, *words: str) -> dict[str, Tensor]:
    target = f"model._target_={__name__}.{model}"
    assert train(*WORDS, "model=custom", target, *words, f"run.dir={name}") == 0
    return torch.load(f"{name}/saved/last/model.pt")


@pytest.mark.parametrize("how", ["tuple", "list", "mapping", "out", "object"])
@pytest.mark.usefixtures("data")
def test_the_tensor_among_outputs_is_trained_on_predicted_and_exported(
    capsys: pytest.CaptureFixture[str], how: str
):
    plain, wrapped = run("plain", "Net"), run("wrapped", "Net", f"model.how={how}")
    assert all(plain[name].equal(wrapped[name]) for name in plain)
    shown = capsys.readouterr()
    assert "warning" not in shown.out + shown.err
    assert (shown.out + shown.err).count("set task=... for a task that uses the rest") == 1
    found = []
    for name in ("plain", "wrapped"):
        assert command_line.run(["predict", name, "new.npy"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert command_line.run(["export", "wrapped", "--out", "out"]) == 0


@pytest.mark.usefixtures("data")
def test_a_model_that_computes_its_loss_is_trained_on_it(capsys: pytest.CaptureFixture[str]):
    torch_ones = run("plain", "Net")
    own = run("own", "WithLoss")
    shown = "".join(capsys.readouterr())
    assert "warning" not in shown
    assert "because the model's forward takes labels, and it has a loss" in " ".join(shown.split())
    assert all(torch.allclose(torch_ones[name], own[name], atol=1e-6) for name in own)
    losses = [json.loads(line) for line in Path("own/metrics.jsonl").read_text().splitlines()]
    run("twice", "WithLoss", "model.factor=2")
    doubled = [json.loads(line) for line in Path("twice/metrics.jsonl").read_text().splitlines()]
    assert doubled[0]["loss"] == pytest.approx(2 * losses[0]["loss"], rel=1e-6)
    assert {"loss", "accuracy"} <= losses[-1].keys()
    assert command_line.run(["predict", "own", "new.npy"]) == 0
    ours = run("ours", "WithLoss", "task=classification")
    assert all(torch_ones[name].equal(ours[name]) for name in ours)
