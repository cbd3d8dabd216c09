"""Interfaces between packages: facts about the data, batches, tasks, callbacks and loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

TASKS = {
    "classification": "ptfast.tasks.classification.Classification",
    "multilabel": "ptfast.tasks.multilabel.MultiLabel",
    "regression": "ptfast.tasks.regression.Regression",
    "semantic_segmentation": "ptfast.tasks.semantic_segmentation.SemanticSegmentation",
    "token_classification": "ptfast.tasks.token_classification.TokenClassification",
    "language_modelling": "ptfast.tasks.language_modelling.LanguageModelling",
    "hf": "ptfast.tasks.model_loss.ModelLossTask",
}
"""Built-in tasks by name."""
IGNORE_INDEX = -100
"""The label that torch's losses ignore: padding, or a sample without a label."""


@dataclass(frozen=True)
class DataInfo:
    """Facts about the data for the model and the task.

    A keyword of a model's constructor is filled from the field of its name, unless the config sets it.
    """

    kind: str
    """`image`, `features`, `text` (classified sequences), `tokens` (language modelling) or `other`."""
    task: str
    """The default task for this data, e.g. `classification`; the config may name another."""
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    input_shape: tuple[int, ...] | None = None
    """Shape of one input without the batch dimension: (channels, height, width) or (features,)."""
    in_channels: int | None = None
    vocab_size: int | None = None
    pad_id: int | None = None
    categories: tuple[int, ...] | None = None
    """Sizes of a table's categorical columns, whose indices are the last entries of an input."""
    target_scale: tuple[float, float] | None = None
    """Mean and standard deviation of the training targets of a regression on a table."""
    context_length: int | None = None
    """Longest sequence the data yields, in tokens."""
    ignores_labels: bool = False
    """True if labels may be `IGNORE_INDEX`: the items of each batch then have to be counted."""
    token_bytes: float | None = None
    """Mean bytes of text per token; turns nats per token into bits per byte or character."""
    num_train: int | None = None
    """Training samples; None for data of unknown length."""
    task_reason: str = ""
    """The property of the labels that implies the task, for the panel; empty if nothing was guessed."""
    target_kind: Literal["whole", "mask", "map", "unknown"] = "whole"
    """A target describes the whole input (a class, a number), each pixel of an image (a `mask` of classes, a
    `map` of numbers), or something `unknown`, such as boxes, which augmentation would have to move."""
    ignore_index: int = IGNORE_INDEX
    """The label of ignored pixels in masks."""
    extra: dict[str, Any] = field(default_factory=dict)
    """JSON values that `predict` needs to prepare new inputs the same way (vocabulary, normalization)."""

    def facts(self) -> dict[str, Any]:
        """Return the known facts by name, and all of them as `info`, for a model's constructor."""
        return {name: fact for name, fact in vars(self).items() if fact is not None} | {"info": self}


class MicroBatch(NamedTuple):
    """One forward and backward of one rank."""

    data: Any
    """The task's input, on the device: `(inputs, targets)` for the built-in tasks; the targets of mixed
    samples are a `Mixed`."""
    num_samples: int
    """0 for a rank without samples, which runs a dummy sample so that every rank joins the collectives."""


Watched = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]
"""A function that passes batches on, and may interrupt the wait for one."""


class Mixed(NamedTuple):
    """The targets of samples that are each a mix of two."""

    targets: Tensor
    """Targets of the first sample of each pair, in the order of the batch."""
    partners: Tensor
    """Targets of the second sample: the same targets in another order."""
    shares: Tensor
    """Weight of the first sample of each pair, in [0, 1]; the second has the rest. float32 (batch,)."""


class PackedTokens(NamedTuple):
    """Several sequences in each row of a batch, which must not attend to each other."""

    tokens: Tensor
    """(batch, length)."""
    positions: Tensor
    """(batch, length): the position of each token in its sequence, from 0."""
    num_sequences: int = 0
    """Upper bound of the number of sequences in the batch; 0 if unknown."""


class NamedInputs(dict[str, Any]):
    """A model's inputs as keyword arguments."""


class LinearLogits(NamedTuple):
    """Logits not yet computed, hidden @ weight.T, for a loss that computes them in chunks."""

    hidden: Tensor
    """(..., width)."""
    weight: Tensor
    """(classes, width)."""


class StepBatch(NamedTuple):
    """The data of one rank in one optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    num_samples: int
    """Samples of the step over all ranks."""


class Stateful(Protocol):
    """A part of a run that is saved in checkpoints: tensors and plain values, nested in any way."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Metrics(Protocol):
    """Metrics accumulated on the device, such as a torchmetrics `MetricCollection`."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...
    def compute(self) -> dict[str, Any]: ...
    def to(self, device: Any) -> Any: ...


class Task(Protocol):
    """The loss, metrics and predictions of a batch.

    A task that trains with several optimizers has a method `step(model, data, optimizers)` in place of
    `count` and `loss`. It runs forward and backward, steps each optimizer (by its name in
    `optimizer.groups`), and returns the sum of the losses to log and their count. A task whose samples torch
    cannot collate may have a static method `collate(samples)`.
    """

    metric: str
    """The metric that selects the `best` checkpoint by default, e.g. `accuracy`."""
    mode: str
    """`max` or `min`: the direction in which `metric` is better."""
    counts_samples: bool
    """True if each sample is one item of the loss, so that ranks need not exchange counts."""

    def count(self, data: Any, num_samples: int) -> int | Tensor:
        """Return the number of items that a micro-batch's loss averages over (samples, or counted tokens)."""
        ...

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, Tensor | int]:
        """Return the sum of the items' losses (0-d, on the device, with gradient) and their count."""
        ...

    def metrics(self) -> Metrics:
        """Return new metrics for one evaluation."""
        ...

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, Tensor | int]:
        """Run a forward pass without gradients, update `metrics`, and return the loss sum and count."""
        ...

    def log_values(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        """Return the metrics to log, from the mean loss and `values` (adds e.g. bits per character)."""
        ...

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return one JSON-serializable record per input."""
        ...


def takes_own_steps(task: Task) -> bool:
    return hasattr(task, "step")


class Callback:
    """User code in the training loop: subclass it, override any of its methods, list it under `callbacks`.

    It runs on every rank, on the host, between steps: reading a tensor's value here makes the host wait for
    the device. With `state_dict()` (tensors and plain values; called on the first rank) and
    `load_state_dict(state)` (called on every rank), its state is saved and restored with the run.
    """

    def on_start(self, run: Any) -> None:
        """Called before the first step of this process; `run.progress.step` is above 0 in a resumed run."""

    def on_epoch(self, run: Any, epoch: int) -> None:
        """Called after the last step of `epoch` (from 1), before evaluation; not for endless data."""

    def on_step(self, run: Any, step: int) -> None:
        """Called after optimizer step `step` (from 1). On CUDA, `run.metrics` is one log line behind."""

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, float]) -> None:
        """Called after an evaluation of `split`, before logging; numbers added to `metrics` are logged."""

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        """Called on the first rank, after it has written the checkpoint of `step` to `folder`."""

    def on_end(self, run: Any, status: str) -> None:
        """Called after the last evaluation and save, but not if an error ends the run.

        `status` is `finished`, `stopped`, `paused`, `preempted` or `interrupted`.
        """


LOGGER_METHODS = {"open": ("run_dir", "config"), "log": ("record",), "close": ()}
"""The methods of a configured logger, and their arguments."""

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The names of all callback methods."""


def hooks(callbacks: Sequence[Any], name: str) -> list[Callable[..., None]]:
    """Return the method `name` of each callback that overrides it."""
    methods = [getattr(callback, name, None) for callback in callbacks]
    idle = getattr(Callback, name)
    return [method for method in methods if method and getattr(method, "__func__", None) is not idle]


class Logger:
    """Base class of loggers, which drops all records: host values of `step`, `epoch`, `split` and metrics."""

    def log(self, record: dict[str, Any]) -> None:
        """Write one record."""

    def flush(self) -> None:
        """Write the records so far, before a checkpoint."""

    def close(self) -> None:
        """Write the remaining records, and close files and connections."""
