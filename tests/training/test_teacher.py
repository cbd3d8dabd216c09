"""Distillation: a student that also learns the outputs of a trained run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_cases import CASES, WEIGHTS, Flat, classes
from running import build_run, read_config, train, weights
from strategy_cases import Cases

from ptfast.config.checks.trust import remember
from ptfast.config.files.frozen import freeze
from ptfast.core.distributed import Ranks, on_first_rank
from ptfast.core.errors import ConfigError, DataError, PtfastError, SavedStateError
from ptfast.core.protocols import DataInfo, Mixed
from ptfast.tasks.cross_entropy import CrossEntropyTask
from ptfast.training.fit import fit

PLAIN = CASES["class weights"].run_words()
ALONE = PLAIN[:-1]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teachers") / "teacher"
    assert train(*ALONE, f"run.dir={folder}") == 0
    return folder


def plain(
    teacher: Path, temperature: float, share: float, weight: torch.Tensor
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of three steps in plain torch."""
    losses = list[float]()
    model, taught = Flat(), torch.nn.Linear(4, 3)
    taught.load_state_dict(weights(teacher))
    inputs, targets = classes().tensors
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(inputs)
        soft = (taught(inputs).detach() / temperature).softmax(1)
        each = F.kl_div((outputs / temperature).log_softmax(1), soft, reduction="none").sum(1)
        distilled = (weight[targets] * each).sum() / weight[targets].sum() * temperature**2
        loss = (1 - share) * F.cross_entropy(outputs, targets, weight) + share * distilled
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_student_learns_as_in_plain_torch(
    tmp_path: Path, teacher: Path, accumulate: int, weighted: bool
) -> None:
    words = (*(PLAIN if weighted else ALONE), f"task.teacher={teacher}", "task.distill_weight=0.3")
    run = build_run(tmp_path, *words, "task.temperature=2", f"gradients.accumulate={accumulate}")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    fit(run)
    _, expected = plain(teacher, 2.0, 0.3, WEIGHTS if weighted else torch.ones(3))
    torch.testing.assert_close(weights(tmp_path), expected, rtol=1e-6, atol=1e-6)
    assert run.clock.ledger()["teacher"] > 0
    state = torch.load(tmp_path / "saved/last/model.pt", weights_only=True)
    assert state.keys() == before.keys()


UNEVEN = {"16 and 14 samples": (32, 2), "all samples on one rank": (64, 2)}
"""How two ranks share 30 samples: the size of a batch, and its micro-batches."""


def keep_config(file: Path) -> None:
    """Write the config of a teacher as the launcher does."""
    freeze(read_config(ALONE)[0], file)
    remember(file)


def cases(ranks: Ranks) -> dict[str, Any]:
    """Students of two ranks, and the folder of their teacher."""
    on, folder = Cases(ranks), Path("teacher").absolute()
    on.train("teacher", *ALONE)
    on_first_rank(lambda: keep_config(folder / "config.yaml"), ranks)
    taught = (f"task.teacher={folder}", "task.distill_weight=0.3", "task.temperature=2")
    found: dict[str, Any] = {"teacher": str(folder)}
    words = [word for word in PLAIN if not word.startswith("batch_size")]
    for name, (size, parts) in UNEVEN.items():
        sizes = f"batch_size={size}", f"micro_batches={parts}"
        found[name] = on.train(f"student, {name}", *words, *taught, *sizes)
    return found


@pytest.mark.parametrize("name", UNEVEN)
def test_students_of_two_ranks_learn_as_in_plain_torch(two_ranks: dict[str, Any], name: str) -> None:
    found = two_ranks["test_teacher"]
    losses, expected = plain(Path(found["teacher"]), 2.0, 0.3, WEIGHTS)
    assert found[name]["losses"] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(found[name]["weights"], expected, rtol=1e-6, atol=1e-6)


def test_a_changed_or_missing_teacher_is_rejected_when_a_run_is_resumed(
    tmp_path: Path, teacher: Path
) -> None:
    own = shutil.copytree(teacher, tmp_path / "teacher", symlinks=True)
    words: tuple[str, ...] = (*ALONE, f"task.teacher={own}")
    fit(build_run(tmp_path / "run", *words))
    state: dict[str, Any] = {"checkpoint_folder": tmp_path / "run/saved/last"}
    build_run(tmp_path / "run", *words, **state)
    manifest = next((own / "saved").glob("step-*")) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()), indent=3))
    with pytest.raises(SavedStateError, match="its best checkpoint has changed") as caught:
        build_run(tmp_path / "run", *words, **state)
    assert (caught.value.code, caught.value.key) == ("S003", "task.teacher")
    shutil.rmtree(own)
    with pytest.raises(PtfastError) as gone:
        build_run(tmp_path / "run", *words, **state)
    assert (gone.value.code, gone.value.key) == ("S004", "task.teacher")


def test_a_teacher_of_other_data_is_rejected(tmp_path: Path, teacher: Path) -> None:
    words = ("data=digits", "model=mlp", "model.hidden=[4]", "steps=2", f"task.teacher={teacher}")
    with pytest.raises(DataError) as caught:
        build_run(tmp_path, *words)
    assert caught.value.key == "task.teacher"


@pytest.mark.parametrize("key", ["distill_weight", "temperature"])
def test_keys_of_distillation_need_a_teacher(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="there is no teacher") as caught:
        build_run(tmp_path, *ALONE, f"task.{key}=0.5")
    assert (caught.value.code, caught.value.key) == ("C011", f"task.{key}")


def test_mixed_samples_are_distilled_by_the_weights_of_both_classes() -> None:
    inputs, targets = classes().tensors
    partners, shares = targets.roll(1), torch.linspace(0, 1, len(targets))
    model, taught = Flat(), torch.nn.Linear(4, 3)
    info = DataInfo("features", "classification", num_classes=3)
    task = CrossEntropyTask(
        info, class_weights=WEIGHTS.tolist(), teacher="run", distill_weight=1.0, temperature=2.0
    )
    data = inputs, Mixed(targets, partners, shares)
    found, num_items = task.distilled(task.loss, taught, model, data)
    soft = (taught(inputs) / 2).softmax(1)
    each = F.kl_div((model(inputs) / 2).log_softmax(1), soft, reduction="none").sum(1)
    expected = (each * (shares * WEIGHTS[targets] + (1 - shares) * WEIGHTS[partners])).sum() * 4
    torch.testing.assert_close(found, expected, check_dtype=False)
    assert num_items.item() == pytest.approx(WEIGHTS[targets].sum().item())
