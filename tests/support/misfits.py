"""Models, losses, tasks and callbacks of a user's that give or do what they should not, by name."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ptfast.core.protocols import Callback
from ptfast.tasks.ratios import Ratios


class Net(nn.Module):
    """A layer whose outputs are spoilt, from a training step on."""

    def __init__(self, how: str = "", num_classes: int = 10, at: int = 0) -> None:
        super().__init__()
        self.at = at
        self.how, self.layer, self.kept = how, nn.Linear(64, num_classes), torch.zeros(())
        self.passes = 0
        if how == "constructor":
            raise OSError("no such file")
        if how == "exits":
            raise SystemExit(0)
        if how == "lazy":
            self.layer = nn.LazyLinear(num_classes)
        if how == "unused lazy":
            self.spare = nn.LazyLinear(num_classes)
        if how == "detects":
            torch.autograd.set_detect_anomaly(True)

    def forward(self, images: Tensor) -> Any:
        self.passes += self.training
        outputs = self.layer(images.flatten(1))
        if self.how == "late" and self.passes > 8:
            raise IndexError("the ninth")
        if self.how == "kept":
            outputs = self.kept = outputs + self.kept.sum()
        if self.how == "evaluates otherwise":
            return outputs if self.training else ("scores", outputs)
        spoil = MODELS.get(self.how) if self.passes >= self.at else None
        return outputs if spoil is None else spoil(outputs)


def leave(outputs: Tensor) -> None:
    raise SystemExit(0)


def talk(outputs: Tensor) -> None:
    raise ValueError("word " * 1_000_000)


class SpeechlessError(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise LookupError


def stay_silent(outputs: Tensor) -> None:
    raise SpeechlessError


MODELS: dict[str, Any] = {
    "tuple": lambda outputs: ("scores", outputs),
    "dict": lambda outputs: {"scores": outputs},
    "list": lambda outputs: outputs.tolist(),
    "None": lambda outputs: None,
    "scalar": lambda outputs: outputs.sum(),
    "detached": lambda outputs: outputs.detach(),
    "numpy": lambda outputs: outputs.detach().numpy(),
    "other batch": lambda outputs: outputs[:7],
    "fewer classes": lambda outputs: outputs[:, :5],
    "transposed": lambda outputs: outputs.T,
    "classes": lambda outputs: outputs.argmax(1),
    "complex": lambda outputs: outputs.to(torch.complex64),
    "string": lambda outputs: "logits",
    "nan": lambda outputs: outputs * math.nan,
    "raises": lambda outputs: {}["mine"],
    "wrong shape": lambda outputs: F.linear(outputs, torch.ones(3, 4)),
    "changed": lambda outputs: outputs.exp().add_(1).mul_(outputs.exp()).exp_().add_(1),
    "leaves": leave,
    "talks": talk,
    "silent": stay_silent,
}


class Loss:
    """Cross entropy, spoilt."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return LOSSES[self.how](F.cross_entropy(outputs, targets))


LOSSES: dict[str, Any] = {
    "float": lambda loss: loss.item(),
    "None": lambda loss: None,
    "tuple": lambda loss: (loss, loss, loss),
    "dict": lambda loss: {"loss": loss},
    "string": lambda loss: "loss",
    "numpy": lambda loss: loss.detach().numpy(),
    "detached": lambda loss: loss.detach(),
    "whole number": lambda loss: loss.long(),
    "other batch": lambda loss: torch.stack([loss, loss, loss]),
    "raises": lambda loss: 1 // 0,
    "not finite": lambda loss: loss * math.inf,
}


def published(num_classes: int, pretrained: bool = False) -> nn.Module:
    """A model of a library whose weights are out of reach."""
    return unreachable() if pretrained else Net(num_classes=num_classes)


def unreachable(*args: Any, **keywords: Any) -> Any:
    raise URLError("no route to host")


def of_outputs(outputs: Tensor) -> Tensor:
    return outputs.sum()


class Task:
    """A task that fulfils the protocol but for what its loss gives."""

    metric, mode, counts_samples = "loss", "min", True

    def __init__(self, info: Any, how: str = "") -> None:
        self.how = how

    def count(self, data: Any, num_samples: int) -> int:
        return num_samples

    def loss(self, model: nn.Module, data: Any) -> Any:
        inputs, targets = data
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        return TASKS[self.how](loss, len(targets))

    def metrics(self) -> Ratios:
        return Ratios()

    evaluate = loss

    def log_values(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        return {"loss": loss}


TASKS: dict[str, Any] = {
    "no count": lambda loss, count: loss,
    "three": lambda loss, count: (loss, count, 1),
    "float": lambda loss, count: (loss.item(), count),
    "raises": lambda loss, count: (loss, {}["count"]),
}


def unknown() -> TensorDataset:
    """Samples of which one is not known."""
    inputs = torch.ones(20, 4)
    inputs[4] = math.nan
    return TensorDataset(inputs, torch.arange(20) % 2)


class LateFloat(Dataset[Any]):
    """Labels of which a late one is no whole number."""

    num_classes = 2

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index % 2)), index % 2 + (0.5 if index == 70 else 0)


class Measured(Ratios):
    """A metric that gives anything, or lacks a package."""

    def __init__(self, what: Any = None) -> None:
        super().__init__()
        self.what = what

    def compute(self) -> Any:
        if self.what == "import":
            importlib.import_module("no_such_package")
        return self.what


def measure(outputs: Tensor, targets: Tensor) -> Any:
    return None


class Hooked(Callback):
    """Fails in one of its methods."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_start(self, run: Any) -> None:
        self._fail("on_start")

    def on_step(self, run: Any, step: int) -> None:
        self._fail("on_step")

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, Any]) -> None:
        self._fail("on_evaluation")
        if self.how in ("figure", "huge"):
            metrics["mine"] = torch.ones(2) if self.how == "figure" else 10**400

    def state_dict(self) -> dict[str, Any]:
        return {"path": [Path()]} if self.how == "state_dict" else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def _fail(self, name: str) -> None:
        if self.how == name:
            raise KeyError("mine")
