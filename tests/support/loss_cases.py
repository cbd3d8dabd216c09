"""Losses of every kind, each beside the plain torch computation that a run has to agree with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ptfast.tasks.supervised import SupervisedTask

LR = 0.5
WEIGHTS = torch.tensor([0.1, 1.0, 10.0])
SHORT = "[0.1,1,10]"
CROSS = ("task.loss._target_=torch.nn.CrossEntropyLoss",)
BINARY = ("task.loss._target_=torch.nn.BCEWithLogitsLoss",)


def _drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def classes(num_samples: int = 30, ignored: bool = False) -> TensorDataset:
    """Three classes of which the last is rare, its samples at the end; some may be unlabelled."""
    inputs = torch.randn(num_samples, 4, generator=_drawn())
    targets = (torch.arange(num_samples) * 20 // num_samples > 12).long()
    targets[-num_samples // 10 :] = 2
    inputs += targets[:, None] * 0.5
    if ignored:
        targets[: num_samples // 2 : 2] = -100
    return _with_classes(TensorDataset(inputs, targets), 3)


def masks(num_samples: int = 30, ignored: bool = False) -> TensorDataset:
    """Images with masks of two classes, of which more is foreground in later ones."""
    images = torch.randint(0, 255, (num_samples, 3, 6, 6), generator=_drawn(), dtype=torch.uint8)
    targets = (images[:, 0] > torch.linspace(250, 120, num_samples)[:, None, None]).long()
    if ignored:
        targets[:10, :3] = -100
    return _with_classes(TensorDataset(images, targets), 2)


def values(num_samples: int = 30) -> TensorDataset:
    """Three numbers for each sample."""
    inputs = torch.randn(num_samples, 4, generator=_drawn())
    return _with_classes(TensorDataset(inputs, inputs[:, :3] * 2 + 1), None)


def labels(num_samples: int = 30) -> TensorDataset:
    """Any of three labels for each sample."""
    inputs = torch.randn(num_samples, 4, generator=_drawn())
    return _with_classes(TensorDataset(inputs, (inputs[:, :3] > 0.5).long()), 3)


def _with_classes(dataset: Any, num_classes: int | None) -> TensorDataset:
    dataset.num_classes = num_classes
    return dataset


class Flat(nn.Linear):
    """A linear layer of three outputs, always the same at first."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(4, 3)


class Pixels(nn.Conv2d):
    """Two logits for each pixel."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(3, 2, 1)


class OwnWeights(nn.CrossEntropyLoss):
    """A subclass that only has weights of its own."""

    def __init__(self) -> None:
        super().__init__(weight=WEIGHTS.clone())


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=WEIGHTS)


def weighted_pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(outputs, targets, weight=WEIGHTS, reduction="sum"), WEIGHTS[targets].sum()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum")


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    likelihood = outputs.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    return -((1 - likelihood.exp()) ** 2 * likelihood).mean()


def dice_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    """(batch,)."""
    chosen, wanted = outputs.softmax(1)[:, 1], (targets == 1).float()
    return 1 - 2 * (chosen * wanted).sum((1, 2)) / (chosen.sum((1, 2)) + wanted.sum((1, 2)) + 1e-6)


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of all pixels of a batch together."""
    chosen, wanted = outputs.softmax(1)[:, 1], (targets == 1).float()
    return 1 - 2 * (chosen * wanted).sum() / (chosen.sum() + wanted.sum() + 1e-6)


def pixel_weights(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=WEIGHTS[:2])


def focal_weighted(outputs: Tensor, targets: Tensor, gamma: float = 2.0) -> Tensor:
    likelihood = outputs.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    weights = WEIGHTS[targets]
    return -(weights * (1 - likelihood.exp()) ** gamma * likelihood).sum() / weights.sum()


def focal_labels(outputs: Tensor, targets: Tensor) -> Tensor:
    chances = outputs.sigmoid() * targets + (1 - outputs.sigmoid()) * (1 - targets)
    return -((1 - chances) ** 0.5 * chances.log()).mean()


def balanced(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = targets.bincount(minlength=3)
    return F.cross_entropy(outputs, targets, weight=len(targets) / (3 * counts))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets, reduction="none")


def binary_of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)


class OwnCount(SupervisedTask):
    """Counts the numbers of its targets, and says so by its loss alone."""

    def loss(self, model: nn.Module, data: Any) -> tuple[Tensor, int]:
        inputs, targets = data
        return F.mse_loss(model(inputs), targets, reduction="sum"), targets.numel()

    def evaluate(self, model: nn.Module, data: Any, metrics: Any) -> tuple[Tensor, int]:
        return self.loss(model, data)


class WrongCount(OwnCount):
    """Says that it counts samples, and counts numbers."""

    counts_samples = True


class Case(NamedTuple):
    """A loss of a run, and the plain function of all outputs and targets that it stands for."""

    data: str
    words: tuple[str, ...]
    plain: Callable[[Tensor, Tensor], Tensor]
    adds_up: bool = True
    """Parts of a batch add up to it."""
    logged: float = 1.0
    """What the plain loss is divided by to be logged."""

    def run_words(self) -> tuple[str, ...]:
        """The words of a run of three steps, each on all samples."""
        name, _, ignored = self.data.partition(" ")
        model = "Pixels" if name == "masks" else "Flat"
        words = ("data=custom", f"data._target_=loss_cases.{name}", "data.val=0", "data.normalize=false")
        words += (f"data.ignored={str(bool(ignored)).lower()}",) if name in ("classes", "masks") else ()
        words += ("model=custom", f"model._target_=loss_cases.{model}", *PLAIN, *self.words)
        return words

    def trained(self, num_steps: int = 3) -> tuple[list[float], list[float], dict[str, Tensor]]:
        """Losses, norms of gradients, and weights of a loop in plain torch."""
        name, _, ignored = self.data.partition(" ")
        dataset = globals()[name](**({"ignored": True} if ignored else {}))
        inputs, targets = dataset.tensors
        model = Pixels() if name == "masks" else Flat()
        inputs = inputs.float() / 255 if name == "masks" else inputs
        targets = targets.float() if name == "labels" else targets
        optimizer = torch.optim.SGD(model.parameters(), LR)
        losses, norms = list[float](), list[float]()
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = self.plain(model(inputs), targets)
            loss.backward()
            losses.append(loss.item() / self.logged)
            norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())  # type: ignore[union-attr]
            optimizer.step()
        return losses, norms, model.state_dict()


PLAIN = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0")
PLAIN = (*PLAIN, f"optimizer.lr={LR}", "schedule=constant", "schedule.warmup=0", "log_every=1")
PLAIN = (*PLAIN, "gradients.log_norm=true", "epochs=3", "batch_size=32", "saving.every=1000steps")
"""A batch is larger than the data: its last micro-batch is short."""


def own(name: str) -> tuple[str, ...]:
    return (f"task.loss=loss_cases.{name}",)


CASES = {
    "weights": Case("classes", (*CROSS, f"task.loss.weight={SHORT}"), weighted),
    "weights of a function": Case(
        "classes",
        ("task.loss._target_=torch.nn.functional.cross_entropy", f"task.loss.weight={SHORT}"),
        weighted,
    ),
    "weights of a subclass": Case("classes", own("OwnWeights"), weighted),
    "weights, smoothed": Case(
        "classes",
        (*CROSS, f"task.loss.weight={SHORT}", "task.loss.label_smoothing=0.1"),
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, label_smoothing=0.1),
    ),
    "weights, unlabelled": Case("classes ignored", (*CROSS, f"task.loss.weight={SHORT}"), weighted),
    "a class ignored": Case(
        "classes", (*CROSS, "task.loss.ignore_index=1"), lambda o, t: F.cross_entropy(o, t, ignore_index=1)
    ),
    "sum": Case("classes", (*CROSS, "task.loss.reduction=sum"), summed, logged=30),
    "none": Case("classes", (*CROSS, "task.loss.reduction=none"), F.cross_entropy),
    "a function of weights": Case("classes", own("weighted"), weighted, adds_up=False),
    "a function that sums": Case("classes", own("summed"), summed, adds_up=False),
    "a function of sum and weight": Case("classes", own("weighted_pair"), weighted),
    "focal": Case("classes", own("focal"), focal),
    "pixels, weights": Case("masks", (*CROSS, "task.loss.weight=[0.1,1]"), pixel_weights),
    "pixels, weights, ignored": Case("masks ignored", (*CROSS, "task.loss.weight=[0.1,1]"), pixel_weights),
    "pixels, a function of weights": Case("masks", own("pixel_weights"), pixel_weights, adds_up=False),
    "dice of each": Case("masks", own("dice_of_each"), lambda o, t: dice_of_each(o, t).mean()),
    "dice of each, ignored": Case(
        "masks ignored", own("dice_of_each"), lambda o, t: dice_of_each(o, t).mean()
    ),
    "dice": Case("masks", own("dice"), dice, adds_up=False),
    "labels, positive weights": Case(
        "labels",
        (*BINARY, "task.loss.pos_weight=[1,5,20]"),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=torch.tensor([1.0, 5.0, 20.0])),
    ),
    "labels, each": Case("labels", own("binary_of_each"), F.binary_cross_entropy_with_logits),
    "labels, elements": Case(
        "labels", (*BINARY, "task.loss.reduction=none"), F.binary_cross_entropy_with_logits
    ),
    "class weights": Case("classes", (f"task.class_weights={SHORT}",), weighted),
    "class weights by name, unlabelled": Case(
        "classes ignored", ("task.class_weights={0: 0.1, 2: 10}",), weighted
    ),
    "class weights, smoothed in training": Case(
        "classes",
        (f"task.class_weights={SHORT}", "task.label_smoothing=0.1"),
        lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, label_smoothing=0.1),
    ),
    "class weights, balanced": Case("classes", ("task.class_weights=balanced",), balanced),
    "class weights of pixels, ignored": Case("masks ignored", ("task.class_weights=[0.1,1]",), pixel_weights),
    "focal, class weights": Case(
        "classes", (f"task.class_weights={SHORT}", "task.focal_gamma=2"), focal_weighted
    ),
    "focal of the task": Case("classes", ("task.focal_gamma=2",), focal),
    "focal of labels": Case("labels", ("task.focal_gamma=0.5",), focal_labels),
    "labels, positive weights of the task": Case(
        "labels",
        ("task.pos_weight=[1,5,20]",),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t, pos_weight=torch.tensor([1.0, 5.0, 20.0])),
    ),
    "values, elements": Case("values", own("squares"), F.mse_loss),
    "values": Case("values", ("task.loss=torch.nn.MSELoss",), F.mse_loss),
    "a task's own count": Case("values", ("task=loss_cases.OwnCount",), F.mse_loss),
}
