"""What a run is made of: the facts about the data, the batches, and the protocols that parts fulfil."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class DataInfo:
    """What the data says about the model and the task; models take these as keywords of the same name.

    A model's constructor keyword that has the name of a field here and is not set in the config is filled from it.
    """

    kind: str
    """`image`, `features`, `text` (classified sequences), `tokens` (language modelling) or `other`."""
    task: str
    """The task this data is for unless the config names another, e.g. `classification`."""
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    input_shape: tuple[int, ...] | None = None
    """Shape of one input without the batch: (channels, height, width) of an image, (features,) of a vector."""
    in_channels: int | None = None
    vocab_size: int | None = None
    pad_id: int | None = None
    context_length: int | None = None
    """Longest sequence the data yields, in tokens."""
    token_bytes: float | None = None
    """Mean bytes of text per token; turns nats per token into bits per byte or character."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What `predict` needs to read new inputs the same way (vocabulary, normalisation), JSON-serialisable."""


class MicroBatch(NamedTuple):
    """One forward and backward of one rank."""

    data: Any
    """What the task understands, on the device: `(inputs, targets)` for the built-in tasks."""
    num_samples: int
    """Samples that count. 0 for an empty share, whose one stand-in sample keeps the ranks' collectives in step."""


class StepBatch(NamedTuple):
    """What one rank trains on in one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    num_samples: int
    """Samples of the whole step, over all ranks."""


@runtime_checkable
class TrainLoader(Protocol):
    """The training batches of one rank, a pure function of (seed, step)."""

    steps_per_epoch: int | None
    """None for iterable data of unknown length."""
    kind: str
    """What `auto` was resolved to."""

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` (counted from 0, over epochs) up to, not including, `last_step`."""
        ...

    def close(self) -> None:
        """Stop worker processes."""
        ...


@runtime_checkable
class EvalLoader(Protocol):
    """One rank's share of an evaluation split, each sample exactly once over all ranks."""

    num_samples: int
    """Samples of the whole split, over all ranks."""

    def __iter__(self) -> Iterator[MicroBatch]: ...


class Metrics(Protocol):
    """Figures summed on the device, such as a torchmetrics `MetricCollection`."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...
    def compute(self) -> dict[str, Any]: ...
    def to(self, device: Any) -> Any: ...


class Task(Protocol):
    """What a batch is and what its loss means."""

    metric: str
    """The figure that `best` follows when none is named, e.g. `accuracy`."""
    mode: str
    """`max` or `min`: which way `metric` is better."""

    def count(self, data: Any, num_samples: int) -> int | Tensor:
        """How many items the loss of a micro-batch is averaged over (samples, or tokens that count)."""
        ...

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, Tensor | int]:
        """Sum of the losses of the items (0-d, on the device, with gradient) and their count."""
        ...

    def metrics(self) -> Metrics:
        """Fresh metrics of one evaluation."""
        ...

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, Tensor | int]:
        """One forward pass: update `metrics`, return loss sum and count. Called under `torch.inference_mode`."""
        ...

    def figures(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        """Figures of an evaluation from its mean loss and computed metrics (adds e.g. bits per character)."""
        ...

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """One JSON-serialisable record per input."""
        ...


class Callback:
    """A user's own code in the loop: subclass it, name it under `callbacks`, override either method.

    Runs on every rank, on the host, between steps: reading a tensor's value here makes the host wait for the device.
    """

    def on_step(self, run: Any, step: int) -> None:
        """After optimizer step `step` (the first is 1)."""

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        """After an evaluation of `split` with its `figures`."""


@dataclass
class Progress:
    """Where a run stands; saved with the weights and restored with them."""

    step: int = 0
    samples: int = 0
    best_value: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    train_s: float = 0.0
    """Seconds of training over all attempts, for throughput."""


def device_type(device: torch.device | str) -> str:
    """`cpu`, `cuda` or `mps`."""
    return getattr(device, "type", str(device).split(":")[0])
