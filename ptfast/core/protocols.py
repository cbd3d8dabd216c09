"""Contracts between parts: facts about the data, batches, tasks, callbacks and loggers."""

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
"""The label that torch's losses skip: of padding, of a sample without a label."""


@dataclass(frozen=True)
class DataInfo:
    """Facts about the data for the model and the task.

    A model's constructor keyword with the name of a field here is filled from it, unless the config sets it.
    """

    kind: str
    """`image`, `features`, `text` (classified sequences), `tokens` (language modelling) or `other`."""
    task: str
    """The task this data is for unless the config names another, e.g. `classification`."""
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    input_shape: tuple[int, ...] | None = None
    """Shape of one input by itself: (channels, height, width) of an image, (features,) of a vector."""
    in_channels: int | None = None
    vocab_size: int | None = None
    pad_id: int | None = None
    categories: tuple[int, ...] | None = None
    """Sizes of a table's categorical columns, whose numbers are the last entries of an input."""
    target_scale: tuple[float, float] | None = None
    """Mean and standard deviation of the training targets of a regression on a table."""
    context_length: int | None = None
    """Longest sequence the data yields, in tokens."""
    ignores_labels: bool = False
    """True if there may be labels that do not count (`IGNORE_INDEX`): items then have to be counted."""
    token_bytes: float | None = None
    """Mean bytes of text per token; turns nats per token into bits per byte or character."""
    num_train: int | None = None
    """Training samples; None for data of unknown length."""
    task_reason: str = ""
    """The labels' trait that implies the task, in words for the panel; empty if nothing was guessed."""
    target_kind: Literal["whole", "mask", "map", "unknown"] = "whole"
    """A target describes the whole input (a class, a number), each pixel of an image (a `mask` of classes, a
    `map` of numbers), or something `unknown`, such as boxes, which would move with the pixels."""
    ignore_index: int = IGNORE_INDEX
    """The label of pixels that do not count, in masks."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Facts that `predict` needs to read new inputs the same way (vocabulary, normalization), for JSON."""

    def facts(self) -> dict[str, Any]:
        """What a model's constructor may take: the known facts by name, and all of them as `info`."""
        return {name: fact for name, fact in vars(self).items() if fact is not None} | {"info": self}


class MicroBatch(NamedTuple):
    """One forward and backward of one rank."""

    data: Any
    """In the form that the task takes, on the device: `(inputs, targets)` for the built-in tasks, where mixed
    samples have `Mixed` for targets."""
    num_samples: int
    """0 for a rank without samples, which runs a dummy sample so that every rank joins the collectives."""


Watched = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]
"""Passes batches on, and may interrupt the wait for one."""


class Mixed(NamedTuple):
    """Targets of samples that are each mixed from two."""

    targets: Tensor
    """Of the first sample of each pair, in the order of the batch."""
    partners: Tensor
    """Of the second: the same targets in another order."""
    shares: Tensor
    """Part of the first sample of each pair, in [0, 1]; the rest is the second's. float32 (batch,)."""


class PackedTokens(NamedTuple):
    """Several sequences in each row of a batch, which must not attend to each other."""

    tokens: Tensor
    """(batch, length)."""
    positions: Tensor
    """(batch, length): of each token in its sequence, from 0."""
    num_sequences: int = 0
    """At most so many in the batch; 0 if unknown."""


class NamedInputs(dict[str, Any]):
    """Inputs that a model takes by the names of its parameters."""


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
    """Samples of the whole step, over all ranks."""


class Stateful(Protocol):
    """A part of a run that is saved in checkpoints: tensors and plain values, in any nest."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Metrics(Protocol):
    """Metrics summed on the device, such as a torchmetrics `MetricCollection`."""

    def update(self, *args: Any, **kwargs: Any) -> None: ...
    def compute(self) -> dict[str, Any]: ...
    def to(self, device: Any) -> Any: ...


class Task(Protocol):
    """Meaning of a batch: its loss, its metrics and its predictions.

    A task that trains with several optimizers has a method `step(model, data, optimizers)` in place of
    `count` and `loss`: it runs forward and backward, steps each of the optimizers, by the names of
    `optimizer.groups`, and returns the sum of the losses to log and their count. One whose samples torch
    cannot collate may have a static method `collate(samples)`.
    """

    metric: str
    """The metric that `best` follows when none is named, e.g. `accuracy`."""
    mode: str
    """`max` or `min`: which way `metric` is better."""
    counts_samples: bool
    """True if every sample is one item of the loss, so that no rank needs another's count."""

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
        """One forward pass, without gradients: update `metrics`, return loss sum and count."""
        ...

    def log_values(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        """The metrics to log, from the mean loss and the computed ones (adds e.g. bits per character)."""
        ...

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """One JSON-serializable record per input."""
        ...


def takes_own_steps(task: Task) -> bool:
    return hasattr(task, "step")


class Callback:
    """A user's own code in the loop: subclass it, name it under `callbacks`, override any of its methods.

    Runs on every rank, on the host, between steps: reading a tensor's value here makes the host wait for
    the device. With `state_dict()` (tensors and plain values; called on the first rank) and
    `load_state_dict(state)` (called on every rank), its state is saved with the run and restored.
    """

    def on_start(self, run: Any) -> None:
        """Before the first step of this process: `run.progress.step` is above 0 if a run is resumed."""

    def on_epoch(self, run: Any, epoch: int) -> None:
        """After the last step of epoch `epoch` (the first is 1), before evaluation; not for endless data."""

    def on_step(self, run: Any, step: int) -> None:
        """After optimizer step `step` (the first is 1). On CUDA `run.metrics` is then a log line behind."""

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        """After an evaluation of `split`, before it is logged: numbers added to `figures` are logged too."""

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        """After the checkpoint of `step` was written to `folder`; on the first rank, which writes it."""

    def on_end(self, run: Any, status: str) -> None:
        """After the last evaluation and save: `finished`, `stopped`, `paused`, `preempted`, `interrupted`.

        Not called if an error ends the run.
        """


LOGGER_METHODS = {"open": ("run_dir", "config"), "log": ("record",), "close": ()}
"""The methods that a logger of the config has, and what each is called with."""

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The methods of callbacks that are called."""


def hooks(callbacks: Sequence[Any], name: str) -> list[Callable[..., None]]:
    """The method `name` of every callback that overrides it."""
    methods = [getattr(callback, name, None) for callback in callbacks]
    idle = getattr(Callback, name)
    return [method for method in methods if method and getattr(method, "__func__", None) is not idle]


class Logger:
    """Takes records of plain host values: `step`, `epoch`, `split`, metrics by name. This one drops them."""

    def log(self, record: dict[str, Any]) -> None:
        """Write one record."""

    def flush(self) -> None:
        """Write the records so far, before a checkpoint."""

    def close(self) -> None:
        """Write the remaining records, and close files and connections."""
