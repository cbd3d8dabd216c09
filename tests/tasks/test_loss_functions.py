"""Losses of every kind train as in plain torch: in one piece, in several, on several ranks, and mixed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import loss_cases
import pytest
import torch
import torch.nn.functional as F
from loss_cases import CASES, WEIGHTS
from running import build_run, same_bits, weights
from strategy_cases import Cases
from torch import nn
from toys import Lines

from ptfast.config.read import read_config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo, Mixed
from ptfast.core.sections.targets import Target, built
from ptfast.run import Run
from ptfast.tasks import build_task
from ptfast.training.fit import fit
from ptfast.training.stages.data_stage import on_device

LAYOUTS = {
    "ddp": ("ddp", "micro_batches=2"),
    "fsdp": ("fsdp", "micro_batches=4"),
    "elastic": ("ddp", "micro_batches=4", "determinism=elastic"),
    "elastic, one sample": ("ddp", "micro_batches=4", "determinism=elastic", "data.num_samples=1"),
}
"""Strategy and words of runs on two ranks."""
COUNTED = ("weights", "weights of a subclass", "a function of sum and weight", "sum", "a task's own count")
"""Those that run in every layout."""
ADDING = [name for name, case in CASES.items() if case.adds_up]
COMPARED = [
    name
    for name in ADDING
    if not any(word in name for word in ("own count", "ignored", "balanced", "in training"))
]
"""Those whose task needs no data and evaluates as it trains."""
REST = [name for name in CASES if name not in ADDING]


def run_of(folder: Path, *words: str, **given: Any) -> Run:
    """A run of `words`, of which later ones replace earlier ones of their key."""
    return build_run(folder, *{word.partition("=")[0]: word for word in words}.values(), **given)


def trained(folder: Path, *words: str) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses and norms of gradients by step, and the weights, of a run."""
    run = run_of(folder, *words)
    run.logger = logger = Lines()
    assert fit(run) == "finished"
    lines = [line for line in logger if line["split"] == "train"]
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines], weights(folder)


def assert_as_in_plain_torch(found: tuple[Any, Any, Any], name: str) -> None:
    losses, norms, ended = CASES[name].trained()
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=2e-6)
    torch.testing.assert_close(found[2], ended, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("name", ADDING)
def test_a_loss_trains_as_in_plain_torch(tmp_path: Path, name: str, accumulate: int) -> None:
    words = (*CASES[name].run_words(), f"gradients.accumulate={accumulate}")
    assert_as_in_plain_torch(trained(tmp_path, *words), name)


@pytest.mark.parametrize("name", REST)
def test_a_loss_whose_parts_do_not_add_up_trains_in_one_piece_only(tmp_path: Path, name: str) -> None:
    words = CASES[name].run_words()
    assert_as_in_plain_torch(trained(tmp_path, *words), name)
    for accumulate in (2, 30):
        run = run_of(tmp_path / str(accumulate), *words, "batch_size=30", f"micro_batches={accumulate}")
        with pytest.raises(
            ConfigError, match=r"not the mean over its parts .* return \(sum, weight\)"
        ) as caught:
            fit(run)
        assert (caught.value.code, caught.value.key) == ("C017", "task.loss._target_")
        assert run.progress.step == 0


ON_RANKS = [(name, layout) for name in CASES for layout in LAYOUTS if layout == "ddp" or name in COUNTED]
OF_ALL = [(name, layout) for name, layout in ON_RANKS if "one sample" not in layout]


def cases(ranks: Ranks) -> dict[str, Any]:
    """Every loss on two ranks, of which one has fewer samples in the last micro-batch, or none at all."""
    on, found = Cases(ranks), dict[str, Any]()
    for name, layout in ON_RANKS:
        folder, (strategy, *words) = f"loss {name} {layout}", LAYOUTS[layout]
        run = on.build(folder, *CASES[name].run_words(), *words, strategy=strategy)
        try:
            fit(run)
        except ConfigError as error:
            found[f"{name} {layout}"] = str(error)
            continue
        torch.distributed.barrier()
        figures = [[line[figure] for line in run.logger] for figure in ("loss", "grad_norm")]  # type: ignore[attr-defined]
        found[f"{name} {layout}"] = (*figures, weights(Path(folder)))
    return found


@pytest.mark.parametrize(("name", "layout"), OF_ALL)
def test_two_ranks_train_as_in_plain_torch_or_not_at_all(
    two_ranks: dict[str, Any], name: str, layout: str
) -> None:
    found = two_ranks["test_loss_functions"][f"{name} {layout}"]
    if CASES[name].adds_up:
        assert_as_in_plain_torch(found, name)
    else:
        assert "not the mean over its parts" in found


@pytest.mark.parametrize("layout", ["elastic", "elastic, one sample"])
@pytest.mark.parametrize("name", COUNTED)
def test_an_elastic_run_has_the_same_bits_on_any_ranks(
    tmp_path: Path, two_ranks: dict[str, Any], name: str, layout: str
) -> None:
    losses, _, ended = trained(tmp_path, *CASES[name].run_words(), *LAYOUTS[layout][1:])
    found = two_ranks["test_loss_functions"][f"{name} {layout}"]
    assert same_bits([losses, ended], [found[0], found[2]])


def test_weights_of_other_classes_are_an_error_of_the_loss(tmp_path: Path) -> None:
    run = run_of(tmp_path, *CASES["weights"].run_words(), "task.loss.weight=[1,2]")
    with pytest.raises(ConfigError, match="weight tensor should be defined") as caught:
        fit(run)
    assert (caught.value.code, caught.value.key) == ("C017", "task.loss._target_")


def built_task(name: str) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The task of a run, and some outputs and targets for it."""
    case, task = CASES[name], None
    dataset = getattr(loss_cases, case.data.partition(" ")[0])()
    outputs = torch.randn(30, *((2, 6, 6) if "masks" in case.data else (3,)))
    options = built(read_config(case.run_words())[1].task.options)
    kind = {"masks": "semantic_segmentation", "values": "regression", "labels": "multilabel"}
    kind_of_task = kind.get(case.data.partition(" ")[0], "classification")
    task = build_task(kind_of_task, DataInfo("features", kind_of_task, dataset.num_classes), **options)
    return task, outputs, dataset.tensors[1]


@pytest.mark.parametrize("name", COMPARED)
def test_an_evaluation_gives_the_same_loss_for_batches_of_any_size(name: str) -> None:
    task, outputs, targets = built_task(name)
    total, items = 0.0, 0.0
    for part in (slice(0, 13), slice(13, 30)):
        given = lambda inputs, part=part: outputs[part]  # noqa: E731
        loss, count = task.evaluate(given, (None, targets[part]), task.metrics())
        total, items = total + float(loss), items + float(count)
    as_given = targets.float() if task.class_dim == 0 else targets
    assert total / items == pytest.approx(float(CASES[name].plain(outputs, as_given)) / CASES[name].logged)


def test_weights_of_classes_weigh_shares_of_classes_as_torch_does() -> None:
    task, outputs, _ = built_task("weights")
    targets = torch.rand(30, 3).softmax(1)
    loss, count = task.loss(lambda inputs: outputs, (None, targets))
    torch.testing.assert_close(loss / count, F.cross_entropy(outputs, targets, weight=WEIGHTS))


@pytest.mark.parametrize("name", COMPARED)
def test_a_mixture_weighs_classes_as_its_parts_do(name: str) -> None:
    task, outputs, targets = built_task(name)
    partners, share = targets.flip(0), 0.3
    loss, count = task.loss(
        lambda inputs: outputs, (outputs, Mixed(targets, partners, torch.full((30,), share)))
    )
    as_given = (lambda t: t.float()) if task.class_dim == 0 else (lambda t: t)
    plain = CASES[name].plain
    expected = share * plain(outputs, as_given(targets)) + (1 - share) * plain(outputs, as_given(partners))
    torch.testing.assert_close(float(loss / count), float(expected) / CASES[name].logged, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", REST)
def test_a_loss_whose_parts_do_not_add_up_cannot_be_mixed(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path, *CASES[name].run_words(), "augment.mixup=0.5")
    with pytest.raises(ConfigError, match=r"samples are mixed.* return \(sum, weight\)"):
        fit(run)


def test_a_task_whose_counts_differ_is_rejected_in_the_first_step(tmp_path: Path) -> None:
    run = run_of(tmp_path, *CASES["values"].run_words()[:-1], "task=loss_cases.WrongCount")
    with pytest.raises(
        ConfigError, match=r"loss returns a count of 90, but counts_samples returns 30"
    ) as caught:
        fit(run)
    assert (caught.value.code, caught.value.key, run.progress.step) == ("C017", "task", 0)


@pytest.mark.parametrize(
    "name", ["weights", "a function of sum and weight", "sum", "class weights, balanced"]
)
def test_a_run_of_weights_resumes_to_the_same_bits(tmp_path: Path, name: str) -> None:
    words = (
        *CASES[name].run_words(),
        "gradients.accumulate=4",
        "saving.every=1steps",
        "log_every=3",
        "eval.every=3epochs",
    )
    whole = trained(tmp_path / "whole", *words, "saving.keep=9")
    run = run_of(tmp_path / "again", *words, checkpoint_folder=tmp_path / "whole" / "saved" / "step-2")
    run.logger = logger = Lines()
    fit(run)
    assert same_bits(weights(tmp_path / "again"), whole[2])
    assert [line["loss"] for line in logger] == whole[0][-1:]


def test_weights_in_yaml_move_to_the_device_of_the_run() -> None:
    name, _, loss = on_device(
        {"name": 1, "list": [2], "loss": nn.CrossEntropyLoss(weight=torch.ones(3))}, torch.device("meta")
    ).values()
    assert (name, loss.weight.device.type) == (1, "meta")
    partial = on_device(functools.partial(F.cross_entropy, weight=torch.ones(3)), torch.device("meta"))
    assert partial.keywords["weight"].device.type == "meta"


def test_a_list_becomes_a_tensor_where_the_parameter_is_one(tmp_path: Path) -> None:
    loss = Target("torch.nn.CrossEntropyLoss", {"weight": [1, 2]}).build()
    assert loss.weight.tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match="no list of numbers") as caught:
        Target("torch.nn.CrossEntropyLoss", {"weight": ["a"]}).build()
    assert (caught.value.code, caught.value.key) == ("C004", "weight")
