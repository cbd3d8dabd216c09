"""The base class of tasks that compare outputs with targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import IGNORE_INDEX, DataInfo, LinearLogits, Metrics, Mixed, NamedInputs
from ptfast.tasks.loss_functions import LossFunction, adapt_loss
from ptfast.tasks.ratios import Ratios, RatioTerms, update_metrics


class SupervisedTask:
    """The base class of tasks with batches of `(inputs, targets)`, and one output per target.

    A subclass defines `loss_sum` and `predict`, and its metrics by `ratios` or `metrics`. With
    `counts_samples=False` its items are not the samples but the targets not ignored. A subclass that defines
    `loss` instead of `loss_sum` returns the count of a batch with it.

    Args:
        loss: replaces the task's own loss: a function of outputs and targets that returns their mean loss,
            the loss of each sample or element, or `(sum, weight)`.
    """

    metric = "loss"
    mode = "min"
    ratios: Mapping[str, Callable[[Tensor, Tensor], RatioTerms]] = {}
    """The metrics besides the loss, by name."""
    counts_samples = True
    """Whether every sample is one item, so that steps need not count items."""
    averages = True
    """Whether the loss of a step is the mean over its items; False for their sum."""
    takes_mixed = True
    """Whether the targets of a training batch may be `Mixed`."""
    needs_classes = False
    """Whether the data must state the number of classes, as `num_classes`."""
    class_dim: int | None = None
    """The dimension of outputs that contains the classes, besides those of the targets: 1 or -1; 0 if outputs
    have the shape of the targets; None if the shape is not known."""
    takes_linear_logits = False
    """Whether the loss of a training batch accepts `LinearLogits`."""
    has_outputs = True
    """Whether models return outputs to compare with targets, which can be averaged over views of an image."""
    measures_aligned = False
    """Whether metrics receive the outputs and targets that `aligned` returns."""

    def __init__(self, info: DataInfo, loss: LossFunction | None = None) -> None:
        self.info, self.own_loss = info, loss
        if self.needs_classes:
            self.num_classes = known_classes(info)
        self.adapted = None if loss is None else adapt_loss(loss, self)
        if self.adapted is not None:
            self.num_items, self.sample_losses = self.adapted.num_items, self.adapted.of_samples
            self.loss_sum = self.evaluation_loss_sum = self.adapted.loss_sum

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        own = vars(cls).keys()
        # Sample losses belong to the `loss_sum` of the same class.
        if "loss_sum" in own and "sample_losses" not in own:
            cls.sample_losses = SupervisedTask.sample_losses
        if "loss" in own and not own & {"count", "counts_samples"}:
            cls.counts_samples, cls.count = False, lambda self, data, num_samples: None
        elif "num_items" in own and "counts_samples" not in own:
            cls.counts_samples = False
        # The description of the outputs belongs to the loss of the same class.
        if own & {"loss_sum", "loss", "evaluate"} and not own & {"class_dim", "misfit"}:
            cls.misfit = None  # type: ignore[assignment] - nothing can be said

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets in the shapes and types that losses compare."""
        return outputs, targets

    def outputs_of(self, given: Any) -> Any:
        """Return the outputs to compare with targets, out of all that a model returns."""
        return output_of(given)

    def forward(self, model: Any, inputs: Any) -> Any:
        """Return the outputs of a model to compare with targets."""
        return self.outputs_of(call(model, inputs))

    def misfit(self, outputs: Any, data: Any) -> str | None:
        """Describe the outputs that a model should return for the batch `data`; None if `outputs` fit.

        A model may have more classes than the data, and a user's loss may accept any number of them.
        """
        targets = data[1].targets if isinstance(data[1], Mixed) else data[1]
        if self.class_dim is None or isinstance(outputs, LinearLogits):
            return None
        if self.class_dim and targets.is_floating_point():
            return None
        wanted = [*targets.shape]
        given = [*outputs.shape] if isinstance(outputs, Tensor) and outputs.is_floating_point() else []
        if self.class_dim:
            place = self.class_dim if self.class_dim > 0 else len(wanted)
            wanted.insert(place, self.num_classes)
            least = self.num_classes if self.own_loss is None else 1
            if len(given) == len(wanted) and given[place] >= least:
                given[place] = self.num_classes
        return None if given == wanted else f"floats of shape ({', '.join(map(str, wanted))})"

    def num_items(self, targets: Tensor) -> Any:
        """Return the items that the loss counts, or their weight; on the device if it depends on values.

        None if only the loss can tell.
        """
        return targets.shape[0] if self.counts_samples else (targets != IGNORE_INDEX).sum()

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the item losses."""
        raise NotImplementedError

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, (batch,), for mixed samples; 0 if all its targets are ignored."""
        return self.losses_one_by_one(outputs, targets)

    def losses_one_by_one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return `loss_sum` of each sample, (batch,), vectorized, which costs about 0.3 ms per call.

        Raises:
            ConfigError: C011 for a loss that cannot be vectorized.
        """
        import torch

        try:
            one_by_one = torch.vmap(lambda output, target: self.loss_sum(output[None], target[None]))
            return one_by_one(outputs, targets)
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            what = "mixed samples need a loss for each, which this loss cannot give"
            hint = "Leave out .item() and branches on values, or set augment.mixup=0 augment.cutmix=0"
            raise ConfigError("C011", what, key="task.loss", suggestion=hint) from error

    def evaluation_loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the item losses, as reported by evaluations."""
        return self.loss_sum(outputs, targets)

    def count(self, data: Any, num_samples: int) -> Any:
        """Count the items that the loss of a micro-batch is averaged over; None if only the loss can tell."""
        if self.counts_samples:
            return num_samples
        targets = data[1]
        return self.num_items(targets.targets if isinstance(targets, Mixed) else targets)

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, int | Tensor]:
        """Return the sum of the losses and the number of items.

        The loss of a mixed sample is the mean over its two targets, weighted by their shares. Partners are
        the same targets in another order, so their count is the same.
        """
        inputs, targets = data
        outputs = self.forward(model, inputs)
        if isinstance(targets, Mixed):
            targets, partners, shares = targets
            own, other = self.sample_losses(outputs, targets), self.sample_losses(outputs, partners)
            loss = (shares * own + (1 - shares) * other).sum()
            if (num_items := self.num_items(targets)) is None:
                _, num_items = self._sums(self.loss_sum, outputs, targets)
            return loss, num_items
        return self._sums(self.loss_sum, outputs, targets)

    def _sums(self, loss_sum: Callable[..., Tensor], outputs: Any, targets: Tensor) -> tuple[Tensor, Any]:
        """Return the sum of the losses of a batch, and the number of items."""
        if self.adapted is not None:
            return self.adapted.sums(outputs, targets)
        return loss_sum(outputs, targets), self.num_items(targets)

    def metrics(self) -> Metrics:
        return Ratios(**self.ratios)

    def evaluate(self, model: nn.Module, data: Any, metrics: Metrics) -> tuple[Tensor, int | Tensor]:
        """Update the metrics; return the sum of the losses and the number of items."""
        inputs, targets = data
        outputs = self.forward(model, inputs)
        given = self.aligned(outputs, targets) if self.measures_aligned else (outputs, targets)
        update_metrics(metrics, *given)
        return self._sums(self.evaluation_loss_sum, outputs, targets)

    def log_values(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        return {"loss": loss, **values}

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return one record per input."""
        raise NotImplementedError


def call(model: Any, inputs: Any) -> Any:
    """Call a model; named inputs are passed as keyword arguments."""
    return model(**inputs) if isinstance(inputs, NamedInputs) else model(inputs)


def output_of(given: Any) -> Any:
    """Return the output tensor of a model's result: itself, `logits` or `out`, or the first of a tuple."""
    if isinstance(given, (Tensor, LinearLogits)):
        return given
    if isinstance(given, Mapping):
        name = next((name for name in ("logits", "out") if name in given), None)
        return given if name is None else given[name]
    if hasattr(given, "logits"):
        return given.logits
    is_first = isinstance(given, (tuple, list)) and bool(given) and isinstance(given[0], Tensor)
    return given[0] if is_first else given


def known_classes(info: DataInfo) -> int:
    """Return the number of classes; D004 if the data does not state it."""
    if not info.num_classes:
        raise DataError("D004", "the data does not say how many classes there are", key="data")
    return info.num_classes


def names_of_classes(info: DataInfo) -> tuple[str, ...]:
    """Return the names of the classes, or their indices if they have no names."""
    return info.class_names or tuple(map(str, range(known_classes(info))))
