"""Counts and their precision: labels to ignore, targets beside half-width outputs, aligned losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import build_run, same_bits
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ptfast.core.durations import Duration
from ptfast.core.protocols import DataInfo
from ptfast.data.build_data import build_data
from ptfast.tasks import build_task
from ptfast.training.fit import fit

NO_VAL = Duration(0, "percent")


class Fixed(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def half_labelled(num_samples: int = 48, ignored: bool = True) -> TensorDataset:
    """Vectors of which most of the first half have no label."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((num_samples, 4), generator=generator)
    labels = torch.arange(num_samples) % 3
    if ignored:
        labels[torch.arange(num_samples) < 20] = -100
    dataset = TensorDataset(inputs, labels)
    dataset.num_classes = 3  # type: ignore[attr-defined]
    return dataset


class Linear64(nn.Module):
    """In float64, where sums in another order agree to 1e-12."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.double())


class Read(Dataset[Any]):
    """The same, read sample by sample; `labels` as the attribute `targets` where they are given."""

    num_classes = 3

    def __init__(self, ignored: bool, targets: bool) -> None:
        self.inner = half_labelled(ignored=ignored)
        if targets:
            self.targets = self.inner.tensors[1].tolist()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


class Stream(IterableDataset[Any]):
    num_classes = 3

    def __iter__(self) -> Any:
        return iter(half_labelled())


@pytest.mark.parametrize(
    ("dataset", "ignores"),
    [
        (half_labelled(), True),
        (half_labelled(ignored=False), False),
        (Read(ignored=True, targets=True), True),
        (Read(ignored=False, targets=True), False),
        (Read(ignored=False, targets=False), True),
        (Stream(), True),
    ],
    ids=["some", "none", "named some", "named none", "unseen", "stream"],
)
def test_labels_are_counted_where_some_may_not_count(dataset: Any, ignores: bool) -> None:
    info = build_data(dataset, val=NO_VAL, seed=0, task="auto").info
    assert info.ignores_labels is ignores
    task = build_task("auto", info)
    assert task.counts_samples is not ignores
    count = task.count((torch.zeros(3, 4), torch.tensor([0, -100, 2])), 3)
    assert isinstance(count, Tensor) is ignores
    assert int(count) == (2 if ignores else 3)


WORDS = (
    *(
        "data=custom",
        "data._target_=test_tasks_precision.half_labelled",
        "data.val=0",
        "data.normalize=false",
    ),
    *("model=custom", "model._target_=test_tasks_precision.Linear64", "batch_size=48", "log_every=1"),
)


def test_ignored_labels_weigh_nothing_wherever_they_stand(tmp_path: Path) -> None:
    one, four = (build_run(tmp_path / str(m), *WORDS, "steps=3", f"micro_batches={m}") for m in (1, 4))
    assert fit(one) == fit(four) == "finished"
    for a, b in zip(one.model.parameters(), four.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_gradient_is_that_of_the_mean_over_labels_that_count(tmp_path: Path) -> None:
    plain = ("optimizer=sgd", "optimizer.lr=1.0", "optimizer.momentum=0", "optimizer.weight_decay=0")
    run = build_run(tmp_path, *WORDS, *plain, "steps=1", "schedule=constant")
    inputs, labels = half_labelled().tensors
    before = [p.detach().clone() for p in run.model.parameters()]
    loss = F.cross_entropy(run.model(inputs), labels)
    gradients = torch.autograd.grad(loss, list(run.model.parameters()))
    assert fit(run) == "finished"
    for parameter, old, gradient in zip(run.model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter.detach(), old - gradient, rtol=0, atol=1e-12)
    assert run.metrics["train"]["loss"] == pytest.approx(loss.item())


def test_accuracies_leave_ignored_labels_out() -> None:
    info = DataInfo("image", "classification", num_classes=100, ignores_labels=True)
    outputs, labels = torch.randn(40, 100), torch.arange(40)
    labels[::2] = -100
    task = build_task("auto", info)
    metrics = task.metrics()
    loss, count = task.evaluate(Fixed(), (outputs, labels), metrics)
    kept = labels != -100
    figures = {name: float(value) for name, value in metrics.compute().items()}
    top5 = (outputs[kept].topk(5).indices == labels[kept, None]).any(1).float().mean()
    accuracy = (outputs[kept].argmax(1) == labels[kept]).float().mean()
    assert figures == pytest.approx({"accuracy": float(accuracy), "top5_accuracy": float(top5)})
    assert float(loss / count) == pytest.approx(float(F.cross_entropy(outputs, labels)))


def test_models_with_their_own_loss_leave_ignored_labels_out() -> None:
    info = DataInfo("features", "classification", num_classes=3, ignores_labels=True)
    task = build_task("hf", info)
    logits, labels = torch.randn(6, 3), torch.tensor([0, -100, 2, 1, -100, -100])

    class Model(nn.Module):
        def forward(self, logits: Tensor, labels: Tensor) -> Any:
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    total, count = torch.zeros(()), 0
    for part in (slice(0, 2), slice(2, 6)):
        loss, items = task.loss(Model(), {"logits": logits[part], "labels": labels[part]})
        total, count = total + loss, count + int(items)
    assert count == 3
    torch.testing.assert_close(total / count, F.cross_entropy(logits, labels))


def test_running_text_without_padding_may_ignore_tokens_too() -> None:
    targets = torch.tensor([[1, -100, 2]])
    plain = DataInfo("tokens", "language_modelling", vocab_size=4)
    assert build_task("auto", plain).count((targets, targets), 1) == 3
    ignoring = DataInfo("tokens", "language_modelling", vocab_size=4, ignores_labels=True)
    assert int(build_task("auto", ignoring).count((targets, targets), 1)) == 2


@pytest.mark.parametrize("name", ["regression", "multilabel"])
def test_half_width_outputs_are_compared_in_float32(name: str) -> None:
    info = DataInfo("features", name, num_classes=1)
    outputs = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    # bf16 holds neither 1.003 nor the sum of the squares.
    targets = torch.tensor([[1.003], [2.0]]) if name == "regression" else torch.tensor([[0.0], [1.0]])
    task = build_task(name, info)
    for loss, _ in (
        task.loss(Fixed(), (outputs, targets)),
        task.evaluate(Fixed(), (outputs, targets), task.metrics()),
    ):
        wide = build_task(name, info).loss(Fixed(), (outputs.float(), targets))[0]
        assert loss.dtype == torch.float32
        assert same_bits(loss, wide)


def test_float64_models_are_compared_in_float64() -> None:
    outputs, targets = torch.tensor([[1.0 + 1e-12]], dtype=torch.float64), torch.tensor([1.0])
    loss, _ = build_task("regression", DataInfo("features", "regression")).loss(Fixed(), (outputs, targets))
    assert loss.item() == pytest.approx(1e-24, rel=1e-3)


@pytest.mark.parametrize(
    ("info", "outputs", "targets"),
    [
        (DataInfo("features", "regression"), torch.randn(5, 1), torch.randn(5)),
        (
            DataInfo("text", "token_classification", num_classes=4),
            torch.randn(2, 3, 4),
            torch.arange(6).view(2, 3) % 4,
        ),
        (DataInfo("tokens", "language_modelling"), torch.randn(2, 3, 4), torch.arange(6).view(2, 3) % 4),
    ],
    ids=lambda value: value.task if isinstance(value, DataInfo) else "",
)
def test_a_users_loss_gets_outputs_and_targets_that_fit(
    info: DataInfo, outputs: Tensor, targets: Tensor
) -> None:
    loss = nn.MSELoss() if info.task == "regression" else nn.CrossEntropyLoss()
    own = build_task("auto", info, loss=loss).loss(Fixed(), (outputs, targets))
    built_in = build_task("auto", info).loss(Fixed(), (outputs, targets))
    torch.testing.assert_close(own[0], built_in[0])
