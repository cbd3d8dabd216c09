"""The tasks: sums and counts that add up over micro-batches, figures against plain formulas, predictions."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.distributed import Ranks, on_all_ranks
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo, Task
from ptfast.tasks import TASKS, build_task
from ptfast.tasks.classification import Classification

CLASSES = DataInfo("image", "classification", num_classes=4, class_names=("a", "b", "c", "d"))
TOKENS = DataInfo("tokens", "language_modelling", vocab_size=6, token_bytes=2.0)
LABELLED = DataInfo("text", "token_classification", num_classes=4)


class Fixed(nn.Module):
    """Outputs its inputs, which makes every loss easy to write down."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


def draw(task: str, size: int) -> tuple[DataInfo, Tensor, Tensor]:
    """Facts, outputs and targets of a batch for a task."""
    generator = torch.Generator().manual_seed(size)
    randn = functools.partial(torch.randn, generator=generator)
    randint = functools.partial(torch.randint, generator=generator)
    if task == "classification":
        return CLASSES, randn(size, 4), randint(0, 4, (size,))
    if task == "multilabel":
        return CLASSES, randn(size, 4), randint(0, 2, (size, 4))
    if task == "regression":
        return DataInfo("features", "regression"), randn(size, 1), randn(size)
    if task == "semantic_segmentation":
        targets = randint(0, 4, (size, 3, 5))
        targets[randn(size, 3, 5) > 0] = -100
        return CLASSES, randn(size, 4, 3, 5), targets
    if task == "token_classification":
        targets = randint(0, 4, (size, 5))
        targets[randn(size, 5) > 0] = -100
        return LABELLED, randn(size, 5, 4), targets
    return TOKENS, randn(size, 5, 6), randint(0, 6, (size, 5))


def mean_loss(task: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss as torch defines it."""
    if task == "multilabel":
        return F.binary_cross_entropy_with_logits(outputs, targets.float())
    if task == "regression":
        return F.mse_loss(outputs.reshape(targets.shape), targets)
    if task == "semantic_segmentation":
        return F.cross_entropy(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def evaluate(task: Task, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The metrics of a split, as the loop makes them."""
    metrics = task.metrics()
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.inference_mode():
        for data in batches:
            loss, count = task.evaluate(Fixed(), data, metrics)
            sums += torch.tensor([float(loss), float(count)])
    values = {name: float(value) for name, value in metrics.compute().items()}
    return task.log_values(float(sums[0] / sums[1]), values)


SUPERVISED = [name for name in TASKS if name != "hf"]


@pytest.mark.parametrize("name", SUPERVISED)
def test_ragged_micro_batches_add_up_to_the_mean_loss(name: str) -> None:
    info, outputs, targets = draw(name, 9)
    task = build_task(name, info)
    total, items = torch.zeros(()), 0
    for part in (slice(0, 1), slice(1, 6), slice(6, 9)):
        data = (outputs[part], targets[part])
        loss, count = task.loss(Fixed(), data)
        assert int(task.count(data, len(outputs[part]))) == int(count)
        total, items = total + loss, items + int(count)
    torch.testing.assert_close(total / items, mean_loss(name, outputs, targets))


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_users_mean_loss_gives_what_the_built_in_gives(name: str) -> None:
    info, outputs, targets = draw(name, 7)
    own = build_task(name, info, loss=functools.partial(mean_loss, name))
    if name == "token_classification":
        own = build_task(name, info, loss=lambda o, t: F.cross_entropy(o.flatten(0, -2), t.flatten()))
    for data in ((outputs, targets), (outputs[:2], targets[:2])):
        theirs, ours = own.loss(Fixed(), data), build_task(name, info).loss(Fixed(), data)
        torch.testing.assert_close(theirs[0], ours[0])
        assert int(theirs[1]) == int(ours[1])
        evaluated = own.evaluate(Fixed(), data, own.metrics())
        torch.testing.assert_close(evaluated[0], ours[0])


def test_classification_figures() -> None:
    _, outputs, targets = draw("classification", 10)
    batches = [(outputs[:7], targets[:7]), (outputs[7:], targets[7:])]
    figures = evaluate(build_task("auto", CLASSES, label_smoothing=0.1), batches)
    assert figures["accuracy"] == pytest.approx((outputs.argmax(1) == targets).float().mean().item())
    assert figures["loss"] == pytest.approx(F.cross_entropy(outputs, targets).item())
    assert set(figures) == {"loss", "accuracy"}


def test_label_smoothing_is_for_training() -> None:
    _, outputs, targets = draw("classification", 6)
    loss, _ = build_task("classification", CLASSES, label_smoothing=0.2).loss(Fixed(), (outputs, targets))
    torch.testing.assert_close(loss, 6 * F.cross_entropy(outputs, targets, label_smoothing=0.2))


def test_many_classes_also_give_top5() -> None:
    outputs, targets = torch.randn(50, 100), torch.randint(0, 100, (50,))
    figures = evaluate(build_task("auto", DataInfo("image", "classification", 100)), [(outputs, targets)])
    hits = (outputs.topk(5).indices == targets[:, None]).any(1).float().mean().item()
    assert figures["top5_accuracy"] == pytest.approx(hits)


def test_multilabel_figures() -> None:
    _, outputs, targets = draw("multilabel", 8)
    figures = evaluate(
        build_task("multilabel", CLASSES), [(outputs[:3], targets[:3]), (outputs[3:], targets[3:])]
    )
    chosen = outputs > 0
    hits = (chosen & (targets == 1)).sum()
    assert figures["f1"] == pytest.approx((2 * hits / (chosen.sum() + targets.sum())).item())
    assert figures["accuracy"] == pytest.approx((chosen == (targets == 1)).float().mean().item())


def test_regression_does_not_broadcast_a_column_against_a_vector() -> None:
    info, outputs, targets = draw("regression", 8)
    figures = evaluate(build_task("auto", info), [(outputs, targets)])
    assert figures["mae"] == pytest.approx((outputs[:, 0] - targets).abs().mean().item())
    assert figures["loss"] == pytest.approx((outputs[:, 0] - targets).square().mean().item())
    wide = torch.randn(8, 3)
    loss, count = build_task("auto", info).loss(Fixed(), (wide, torch.zeros(8, 3)))
    assert (loss / count).item() == pytest.approx(wide.square().mean().item())


def test_token_figures_leave_ignored_tokens_out() -> None:
    info, outputs, targets = draw("token_classification", 6)
    figures = evaluate(build_task("auto", info), [(outputs[:2], targets[:2]), (outputs[2:], targets[2:])])
    counted = targets != -100
    assert figures["accuracy"] == pytest.approx(
        (outputs.argmax(-1) == targets)[counted].float().mean().item()
    )


@pytest.mark.parametrize("loss", [None, lambda o, t: F.cross_entropy(o.flatten(0, -2), t.flatten())])
def test_a_batch_whose_tokens_are_all_ignored_adds_nothing(loss: Any) -> None:
    outputs = torch.randn(2, 3, 4, requires_grad=True)
    data = (outputs, torch.full((2, 3), -100))
    total, count = build_task("auto", LABELLED, loss=loss).loss(Fixed(), data)
    total.backward()
    assert total.item() == 0
    assert int(count) == 0
    assert outputs.grad is not None
    assert outputs.grad.abs().sum() == 0


def test_language_modelling_figures() -> None:
    task = build_task("auto", TOKENS)
    figures = task.log_values(math.log(8), {})
    assert figures["perplexity"] == pytest.approx(8)
    assert figures["bits_per_byte"] == pytest.approx(1.5)
    assert "bits_per_character" not in figures
    characters = DataInfo(
        "tokens", "language_modelling", token_bytes=1.0, extra={"tokenizer": {"kind": "characters"}}
    )
    assert build_task("auto", characters).log_values(math.log(8), {})["bits_per_character"] == pytest.approx(
        3
    )
    assert math.isfinite(task.log_values(1e6, {})["perplexity"])


def test_predictions() -> None:
    logits = torch.tensor([[0.0, 3.0, 0.2, 1.0]])
    record = build_task("auto", CLASSES).predict(Fixed(), logits)[0]
    assert record["class"] == "b"
    assert record["probability"] == pytest.approx(logits.softmax(1)[0, 1].item())
    assert list(record["top"]) == ["b", "d", "c", "a"]
    assert build_task("multilabel", CLASSES).predict(Fixed(), logits - 0.5)[0]["classes"] == ["b", "d"]
    regression = build_task("regression", DataInfo("features", "regression"))
    assert regression.predict(Fixed(), torch.tensor([[1.0], [2.0]])) == [{"value": 1.0}, {"value": 2.0}]
    assert regression.predict(Fixed(), torch.tensor([[1.0, 2.0]])) == [{"value": [1.0, 2.0]}]
    tokens = build_task("auto", LABELLED).predict(Fixed(), torch.eye(4)[None] * 9)[0]
    assert tokens["classes"] == ["0", "1", "2", "3"]


def test_language_model_prediction_is_the_loss_of_the_text_without_padding() -> None:
    info = DataInfo("tokens", "language_modelling", vocab_size=6, pad_id=0)
    table = torch.randn(6, 6)
    text = torch.tensor([[1, 2, 3, 4], [1, 5, 0, 0], [1, 0, 0, 0]])
    task, model = build_task("auto", info), nn.Embedding.from_pretrained(table)
    records = task.predict(model, text)
    assert [record["tokens"] for record in records] == [3, 1, 0]
    assert records[2] == task.predict(model, text[2:, :1])[0]
    assert records[2]["loss"] is None
    assert records[1]["loss"] == pytest.approx(
        F.cross_entropy(table[[1]], torch.tensor([5])).item(), abs=1e-5
    )
    expected = F.cross_entropy(table[[1, 2, 3]], torch.tensor([2, 3, 4])).item()
    assert records[0]["loss"] == pytest.approx(expected, abs=1e-5)


class OwnLossModel(nn.Module):
    """A classifier that returns its own mean loss, as those of transformers do."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
        logits = F.one_hot(input_ids[:, 0] % 4, 4).float() * attention_mask.sum(1, keepdim=True)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def test_models_with_their_own_loss_add_up_too() -> None:
    info = DataInfo("text", "classification", num_classes=4, class_names=("a", "b", "c", "d"), pad_id=0)
    task, model = build_task("hf", info), OwnLossModel()
    tokens, labels = torch.tensor([[1, 2, 0], [2, 3, 1], [3, 0, 0]]), torch.tensor([1, 0, 3])
    whole, count = task.loss(model, (tokens, labels))
    assert count == 3
    mapping = {"input_ids": tokens[:1], "attention_mask": (tokens[:1] != 0).long(), "labels": labels[:1]}
    first, second = task.loss(model, mapping)[0], task.loss(model, (tokens[1:], labels[1:]))[0]
    torch.testing.assert_close(first + second, whole)
    metrics = task.metrics()
    task.evaluate(model, (tokens, labels), metrics)
    assert float(metrics.compute()["accuracy"]) == pytest.approx(2 / 3)
    assert task.predict(model, tokens)[2]["class"] == "d"
    for batch in ((tokens, tokens != 0, labels), tokens):
        with pytest.raises(ValueError, match="unpack"):
            task.count(batch, 3)


def test_losses_of_single_elements_are_averaged_over_all_of_them() -> None:
    outputs, targets = torch.randn(5, 2), torch.randn(5, 2)
    task = build_task("regression", CLASSES, loss=functools.partial(F.mse_loss, reduction="none"))
    loss, count = task.loss(Fixed(), (outputs, targets))
    torch.testing.assert_close(loss / count, F.mse_loss(outputs, targets))
    assert count == 5


def test_tasks_by_name_and_import_path() -> None:
    for name in TASKS:
        task = build_task(name, CLASSES)
        assert task.mode in ("min", "max")
    by_path = build_task("ptfast.tasks.classification.Classification", CLASSES)
    assert by_path.metric == "accuracy"
    cases = [
        ("clasification", "C003", "Did you mean classification"),
        ("nowhere.Task", "C009", "cannot be imported"),
    ]
    cases += [
        ("ptfast.tasks.Nothing", "C009", "cannot be imported"),
        ("builtins.repr", "C009", "is not a task"),
    ]
    for name, code, what in cases:
        with pytest.raises(ConfigError, match=what) as caught:
            build_task(name, CLASSES)
        assert caught.value.code == code
    with pytest.raises(ConfigError, match="takes no such option") as caught:
        build_task("regression", CLASSES, label_smoothing=0.1)
    assert caught.value.code == "C002"


def test_a_task_with_the_old_name_of_log_values_is_rejected() -> None:
    with pytest.raises(ConfigError, match="Rename it to log_values") as caught:
        build_task(f"{__name__}.Renamed", CLASSES)
    assert caught.value.code == "C009"


class Renamed(Classification):
    def figures(self, loss: float, values: dict[str, float]) -> dict[str, float]:
        return {"loss": loss}


def test_classes_must_be_known() -> None:
    for name in ("classification", "multilabel", "token_classification"):
        with pytest.raises(DataError, match="how many classes"):
            build_task(name, DataInfo("image", name))


def cases(ranks: Ranks) -> list[dict[str, dict[str, float]]]:
    """Figures of every task on each of two ranks, which have uneven shares of the samples."""
    share, figures = slice(8, 11) if ranks.rank else slice(0, 8), {}
    for name in ("classification", "token_classification", "regression", "multilabel"):
        info, outputs, targets = draw(name, 11)
        task = build_task(name, info)
        metrics = task.metrics()
        with torch.inference_mode():
            task.evaluate(Fixed(), (outputs[share], targets[share]), metrics)
            figures[name] = {key: float(value) for key, value in metrics.compute().items()}
    return on_all_ranks(figures, ranks.world_size)


def test_ranks_with_uneven_shares_agree_on_the_exact_figures(two_ranks: dict[str, Any]) -> None:
    first, second = two_ranks["test_tasks"]
    assert first == second
    for name, figures in first.items():
        info, outputs, targets = draw(name, 11)
        whole = evaluate(build_task(name, info), [(outputs, targets)])
        assert figures == pytest.approx({key: whole[key] for key in figures})


def test_scores_are_those_of_torchmetrics() -> None:
    from torchmetrics import classification as scores
    from torchmetrics import regression as errors

    references = {
        "multilabel": {
            "f1": scores.MultilabelF1Score(4, average="micro"),
            "accuracy": scores.MultilabelAccuracy(4, average="micro"),
        },
        "regression": {"mae": errors.MeanAbsoluteError()},
        "token_classification": {
            "accuracy": scores.MulticlassAccuracy(4, average="micro", ignore_index=-100)
        },
    }
    for name, expected in references.items():
        info, outputs, targets = draw(name, 50)
        figures = evaluate(
            build_task(name, info), [(outputs[:20], targets[:20]), (outputs[20:], targets[20:])]
        )
        for figure, metric in expected.items():
            if name == "multilabel":
                reference = metric(outputs.sigmoid(), targets)
            elif name == "regression":
                reference = metric(outputs[:, 0], targets)
            else:
                reference = metric(outputs.flatten(0, 1), targets.flatten())
            assert figures[figure] == pytest.approx(float(reference), rel=1e-6)


def test_a_split_without_anything_that_counts_scores_0() -> None:
    metrics = build_task("auto", CLASSES).metrics().to(torch.device("cpu"))
    assert float(metrics.compute()["accuracy"]) == 0.0
