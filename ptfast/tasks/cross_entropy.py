"""Cross entropy over classes, optionally with class weights, label smoothing or focal loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ptfast.core.errors import ConfigError, did_you_mean, name_some
from ptfast.core.protocols import IGNORE_INDEX, DataInfo, Mixed
from ptfast.core.sections.section import Fraction, NotNegative, Positive, UpToOne
from ptfast.data.map_source import MapSource
from ptfast.tasks.loss_functions import LossFunction, target_weights
from ptfast.tasks.supervised import SupervisedTask, names_of_classes

Weights = list[NotNegative] | dict[str, NotNegative]
"""A weight for each class, in class order or by name; classes not named have weight 1."""


class CrossEntropyTask(SupervisedTask):
    """The base class of tasks with one class per target.

    The mean loss divides by the total weight of all targets not ignored, like torch's loss of a whole batch.
    """

    needs_classes = True
    counts_samples = True
    class_dim = 1
    ignore_index = IGNORE_INDEX

    def __init__(
        self,
        info: DataInfo,
        loss: LossFunction | None = None,
        label_smoothing: Fraction = 0.0,
        class_weights: Literal["balanced"] | Weights | None = None,
        focal_gamma: NotNegative = 0.0,
        teacher: str | None = None,
        distill_weight: UpToOne | None = None,
        temperature: Positive | None = None,
    ) -> None:
        """Build the task.

        Args:
            loss: replaces the cross entropy, see `SupervisedTask`.
            label_smoothing: share of the target spread evenly over all classes, in [0, 1); in training only.
            class_weights: weight of each class: a list, a mapping by name, or `balanced` by training samples.
            focal_gamma: focal loss: a target of probability p has weight (1 - p) ** gamma.
            teacher: run directory of a trained model whose outputs the model also learns from.
            distill_weight: weight of the loss against the teacher's outputs (default 0.5); the loss
                against the targets has the rest.
            temperature: divides the outputs of teacher and student in that loss (default 4).
        """
        super().__init__(info, loss)
        check_own_loss(loss, class_weights=class_weights, focal_gamma=focal_gamma, teacher=teacher)
        if label_smoothing and focal_gamma:
            raise ConfigError("C011", "cannot be combined with label_smoothing", key="task.focal_gamma")
        for name, value in (("distill_weight", distill_weight), ("temperature", temperature)):
            if teacher is None and value is not None:
                what, hint = "there is no teacher to learn from", "Set task.teacher=RUN, or leave it out"
                raise ConfigError("C011", what, key=f"task.{name}", value=value, suggestion=hint)
        self.label_smoothing, self.focal_gamma = label_smoothing, focal_gamma
        self.teacher, self.distill_weight, self.temperature = (
            teacher,
            distill_weight or 0.5,
            temperature or 4.0,
        )
        self.class_weights = read_weights(class_weights, info, "task.class_weights")
        if class_weights is not None or info.ignores_labels:
            self.counts_samples = False

    def num_items(self, targets: Tensor) -> Any:
        # Rows of floats are class probabilities.
        if self.counts_samples or (targets.dim() == 2 and targets.is_floating_point()):
            return targets.shape[0]
        return target_weights(targets, self.class_weights, self.ignore_index).sum()

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.cross_entropy(outputs, targets, reduction="sum", label_smoothing=self.label_smoothing)

    def sample_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        losses = self.cross_entropy(outputs, targets, label_smoothing=self.label_smoothing)
        return losses.reshape(len(targets), -1).sum(1)

    def evaluation_loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.cross_entropy(outputs, targets, reduction="sum")

    def cross_entropy(self, outputs: Any, targets: Tensor, reduction: str = "none", **how: Any) -> Tensor:
        """Return torch's cross entropy of aligned outputs, with class weights, ignored index and focus."""
        outputs, targets = self.aligned(outputs, targets)
        weight, how = self.class_weights, {"ignore_index": self.ignore_index, **how}
        if weight is not None:
            weight = weight.to(torch.promote_types(outputs.dtype, torch.float32))
        if not self.focal_gamma:
            return F.cross_entropy(outputs, targets, weight, reduction=reduction, **how)
        losses = F.cross_entropy(outputs, targets, weight, reduction="none", **how)
        plain = losses if weight is None else F.cross_entropy(outputs, targets, reduction="none", **how)
        losses = losses * focus(plain, self.focal_gamma)
        return losses.sum() if reduction == "sum" else losses

    def distilled(self, loss: Any, taught: Any, model: Any, data: Any) -> tuple[Tensor, Any]:
        """Combine `loss` with the loss against a teacher's outputs: Hinton et al. 2015, arXiv:1503.02531."""
        outputs, learned = self.forward(model, data[0]), taught(data[0])
        total, num_items = loss(lambda *_, **__: outputs, data)
        targets = data[1].targets if isinstance(data[1], Mixed) else data[1]
        weights = target_weights(targets, self.class_weights, self.ignore_index)
        if isinstance(data[1], Mixed):
            shares = data[1].shares.view(-1, *[1] * (targets.dim() - 1))
            partners = target_weights(data[1].partners, self.class_weights, self.ignore_index)
            weights = shares * weights + (1 - shares) * partners
        pair = (self.aligned(each, targets)[0][:, : self.num_classes] for each in (outputs, learned))
        student, teacher = ((each.float() / self.temperature).log_softmax(1) for each in pair)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
        divergence = (divergence * weights.flatten()).sum() * self.temperature**2
        return (1 - self.distill_weight) * total + self.distill_weight * divergence, num_items


def focus(losses: Tensor, gamma: float) -> Tensor:
    """Return (1 - p) ** gamma for losses -log(p): the focal loss of Lin et al. 2017, arXiv:1708.02002."""
    return (-torch.expm1(-losses)).clamp_min(1e-12) ** gamma  # at 0 the gradient may not be finite


def check_own_loss(loss: LossFunction | None, **options: Any) -> None:
    """Reject options of the task's own loss if `task.loss` replaces it (C011)."""
    for name, value in options.items():
        if loss is not None and value:
            raise ConfigError("C011", "changes the loss that task.loss replaces", key=f"task.{name}")


def read_weights(given: Any, info: DataInfo, key: str) -> Any:
    """Return the weight of each class, float32; C005 if invalid. None and `balanced` are unchanged."""
    if given is None or isinstance(given, str):
        return given
    names, weights = names_of_classes(info), given
    what, hint = (
        "",
        f"Give a weight for each class ({name_some(names, 10)}), or for some by name: {{NAME: 2}}",
    )
    if isinstance(given, Mapping):
        by_name = {str(name): weight for name, weight in given.items()}
        if strange := next((name for name in by_name if name not in names), None):
            what, hint = f"there is no class {strange}", did_you_mean(strange, names) or hint
        weights = [by_name.get(name, 1.0) for name in names]
    if len(weights) != len(names):
        what = f"{len(weights)} weights, where the data has {len(names)} classes"
    elif not all(0 <= weight < float("inf") for weight in weights):
        what = "weights must be finite numbers of at least 0"
    elif not any(weights):
        what = "every weight is 0, so that nothing would be learned"
    if what:
        raise ConfigError("C005", what, key=key, value=given, suggestion=hint)
    return torch.tensor(weights, dtype=torch.float32)


def balanced_weights(source: MapSource, num_classes: int, ignore_index: int) -> list[float]:
    """Return weights that balance the classes: n / (k * n_c) for n_c of n targets in one of k classes.

    A class without targets gets weight 0 and is not one of the k. Cost: if labels are not known, each sample
    is read once. Source: King and Zeng 2001, as in scikit-learn's `compute_class_weight`.
    """
    counts, known = torch.zeros(num_classes, dtype=torch.float64), source.known_labels()
    parts = np.array_split(np.arange(len(source)), -(-len(source) // 256))
    for labels in [known] if known is not None else (source.fetch(part)[1] for part in parts):
        labels = labels.long().flatten()
        counts += torch.bincount(labels[labels != ignore_index], minlength=num_classes)
    return (counts.sum() / ((counts > 0).sum() * counts)).where(counts > 0, 0.0).tolist()
