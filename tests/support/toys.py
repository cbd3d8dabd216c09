"""Small data, models and callbacks that runs of the tests name by import path."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ptfast.core.protocols import Callback
from ptfast.models.mlp import Mlp
from ptfast.run import Run

SMALL = ("model.hidden=[16]", "log_every=5", "saving.every=1000steps", "schedule=constant")


class SlowPoints(Dataset[Any]):
    """Points that take a while to come."""

    num_classes = 2

    def __init__(self, read_s: float = 0.0) -> None:
        self.read_s = read_s

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.read_s)
        return torch.full((3,), float(index % 2)), index % 2


class DoubleMlp(nn.Module):
    """An MLP in float64, where sums in another order agree to 1e-12."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.inner = Mlp(input_shape, num_classes, hidden=[8]).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.double())


class Straggler(DoubleMlp):
    """A `DoubleMlp` whose forward pass takes 10 ms longer on the second rank."""

    def forward(self, inputs: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.01)
        return super().forward(inputs)


class Tagger(nn.Module):
    """One label per token, in float64."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, num_classes, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.embed(inputs)


def tagged_tokens(num_samples: int = 22) -> TensorDataset:
    """Sequences whose labels are missing in some places, in the first ones everywhere."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (num_samples, 5), generator=generator)
    missing = torch.rand((num_samples, 5), generator=generator) < torch.linspace(1, 0, num_samples)[:, None]
    dataset = TensorDataset(tokens, (tokens % 3).masked_fill(missing, -100))
    dataset.num_classes = 3  # type: ignore[attr-defined]
    return dataset


def blobs(num_samples: int = 50) -> TensorDataset:
    """Two classes that are easy to tell apart."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(num_samples) % 2
    inputs = torch.randn((num_samples, 4), generator=generator) + 3 * targets[:, None]
    return TensorDataset(inputs, targets)


class Exploding(nn.Module):
    """Its loss is not a number from a certain input on."""

    def __init__(self, after: int = 7) -> None:
        super().__init__()
        self.layer, self.after, self.calls = nn.Linear(4, 2), after, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(inputs) * (math.nan if self.calls > self.after else 1.0)


class Spiking(nn.Module):
    """Is wrong with great confidence in the training steps of some numbers, counted from 1."""

    calls: Tensor

    def __init__(self, steps: list[int]) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 2), steps
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(inputs) * (-50.0 if self.training and int(self.calls) in self.steps else 1.0)


class Stream(IterableDataset[Any]):
    """So many samples, without a length."""

    num_classes = 2

    def __init__(self, num_samples: int = 1000, once: bool = False) -> None:
        self.num_samples, self.once, self.passes = num_samples, once, 0

    def __iter__(self) -> Iterator[Any]:
        # One pass goes to the first sample, which is looked at.
        self.passes += 1
        if self.once and self.passes > 2:
            return
        inputs, targets = blobs().tensors
        for index in range(self.num_samples):
            yield inputs[index % 50], targets[index % 50]


class Recorder(Callback):
    """Notes every event in a list of the class."""

    events: ClassVar[list[tuple[Any, ...]]] = []

    def on_step(self, run: Any, step: int) -> None:
        self.events.append(("step", step))

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, float]) -> None:
        self.events.append((split, step, metrics["loss"]))


class Signals(Callback):
    """Sends this process a signal after a step, or in the evaluation after it."""

    def __init__(self, step: int, name: str = "SIGTERM", evaluation: bool = False) -> None:
        self.step, self.number, self.evaluation = step, signal.Signals[name], evaluation

    def on_step(self, run: Any, step: int) -> None:
        if step == self.step and not self.evaluation:
            os.kill(os.getpid(), self.number)

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, float]) -> None:
        if step == self.step and self.evaluation:
            os.kill(os.getpid(), self.number)


class Worse(Callback):
    """Spoils the weights after a step, so that no evaluation gains on the one before."""

    def __init__(self, step: int, by: str = "10") -> None:
        self.step, self.by = step, float(by)

    def on_step(self, run: Any, step: int) -> None:
        if step >= self.step:
            with torch.no_grad():
                next(run.model.parameters()).add_(step * self.by)


def interrupted_blobs(name: str) -> TensorDataset:
    """Data that takes so long to load that a signal comes."""
    os.kill(os.getpid(), signal.Signals[name])
    return blobs()


class Notes:
    """A logger that keeps the config it is told."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, token: str) -> None:
        assert token == "open sesame"

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        Notes.config = config

    def log(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Unheard(Callback):
    def on_train_start(self, run: Any) -> None:
        raise AssertionError


class Broken(Callback):
    def on_step(self, run: Any, step: int) -> None:
        raise KeyError("mine")


def callback(name: str, /, **keywords: Any) -> str:
    """An argument that names a callback of this file."""
    words = ",".join(f"{key}: {value}" for key, value in keywords.items())
    return f"callbacks=[{{_target_: toys.{name}{', ' if words else ''}{words}}}]"


class Overflowing(nn.Module):
    """Its gradients are not finite in some of its forward passes, counted from 1."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.layer, self.calls, self.count = nn.Linear(4, 2), calls, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += self.training
        return self.layer(inputs) * (math.inf if self.training and self.count in self.calls else 1.0)


class Lines(list[dict[str, Any]]):
    """A logger that keeps what it is given."""

    log = list.append

    def flush(self) -> None:
        """Nothing is queued."""


class DoubleNormed(nn.Module):
    """Two BatchNorms in float64, one of them over positions as well."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.second, self.norm_2d, self.last = (
            nn.Conv1d(2, 3, 2),
            nn.BatchNorm1d(3, momentum=None),
            nn.Linear(6, num_classes),
        )
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs.double())).relu()
        return self.last(self.norm_2d(self.second(hidden.view(-1, 2, 3))).relu().flatten(1))


class Forgetful(nn.Module):
    """Leaves some parameters unused, from a certain pass on."""

    def __init__(self, num_classes: int = 2, after: int = 0) -> None:
        super().__init__()
        self.used, self.unused, self.after, self.calls = nn.Linear(4, num_classes), nn.Linear(4, 1), after, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        outputs = self.used(inputs)
        return outputs if self.calls > self.after else outputs + self.unused(inputs)


class Seldom(nn.Module):
    """Uses `seldom` for some batches, by their first number, and `never` for none."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.used, self.seldom, self.never = (nn.Linear(4, num_classes) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.used(inputs)
        return outputs + self.seldom(inputs) if inputs[0, 0] > 1 else outputs


def shapes(num_samples: int = 96, side: int = 24) -> TensorDataset:
    """Red squares and blue discs on grey noise; 255 lies around each, as in PASCAL VOC."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(60, 160, (num_samples, 3, side, side), dtype=torch.uint8, generator=generator)
    masks = torch.zeros(num_samples, side, side, dtype=torch.uint8)
    centres = torch.randint(5, side - 5, (num_samples, 2, 2), generator=generator)
    down, across = torch.arange(side)[:, None], torch.arange(side)
    for image, mask, places in zip(images, masks, centres.tolist(), strict=True):
        for label, (y, x) in enumerate(places, 1):
            far_y, far_x = (down - y).abs(), (across - x).abs()
            far = torch.maximum(far_y, far_x) if label == 1 else (far_y**2 + far_x**2).float().sqrt()
            mask[far < 5] = 255
            mask[far < 4] = label
            image[:, far < 4] //= 2
            image[2 * label - 2, far < 4] += 120
    return TensorDataset(images, masks)


class PixelNet(nn.Sequential):
    """A class for each pixel, from what is around it."""

    def __init__(self, in_channels: int, num_classes: int, width: int = 16) -> None:
        super().__init__(
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, num_classes, 3, padding=1),
        )


class Holed(Dataset[Any]):
    """Points, of which those at `places` are `mark`, and all are NaN while that is `planted`."""

    num_classes = 2
    planted: ClassVar[bool] = False

    def __init__(self, places: list[int] | None = None, mark: float = math.nan) -> None:
        self.whole, self.places, self.mark = blobs(), places or [], mark

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.whole[index]
        if Holed.planted or index in self.places:
            inputs = torch.full_like(inputs, math.nan if Holed.planted else self.mark)
        return inputs, target


class Plant(Callback):
    """Lets all samples of a rank be not finite in some steps, counted from 1; ends the run after `stop`."""

    stop: ClassVar[int | None] = None

    def __init__(self, steps: list[int], rank: int = 0) -> None:
        self.steps, self.rank = steps, rank

    def on_start(self, run: Run) -> None:
        Holed.planted = run.progress.step + 1 in self.steps and run.ranks.rank == self.rank

    def on_step(self, run: Run, step: int) -> None:
        self.on_start(run)
        if step == self.stop:
            run.stop_signal = signal.SIGTERM
