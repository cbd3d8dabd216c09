"""Mixup and CutMix: against samples mixed one by one, and the same whoever loads them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resuming import Armed, arm, assert_same_run, train_in_child
from running import build_run, same_bits, train
from torch import Tensor, nn
from torch.nn import functional as F

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo, Mixed
from ptfast.data.transforms.mixup_cutmix import Draw, Mix, beta
from ptfast.tasks.classification import Classification
from ptfast.tasks.multilabel import MultiLabel
from ptfast.tasks.regression import Regression

__all__ = ["Armed"]
MIXED = ("augment.mixup=0.4", "augment.cutmix=1", "augment.flip=true", "augment.crop_padding=1")
SMALL = ("model.hidden=[16]", "batch_size=128", "steps=12", "log_every=5", "saving.every=4steps")


def batch(size: int = 6, height: int = 5, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, height, width, generator=generator), torch.arange(size) % 4


def mixed_one_by_one(inputs: Tensor, targets: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Inputs, and soft targets over 4 classes."""
    images, labels = [], []
    for index, partner in enumerate(draw.partners.tolist()):
        image, own = inputs[index].clone(), float(draw.shares[index])
        if not draw.cuts[index]:
            image = own * image + (1 - own) * inputs[partner]
        else:
            top, bottom, left, right = draw.boxes[:, index].tolist()
            inside = torch.zeros(inputs.shape[2:], dtype=torch.bool)
            inside[top:bottom, left:right] = True
            image[:, inside] = inputs[partner][:, inside]
            own = 1 - float(inside.float().mean())
        labels.append(own * F.one_hot(targets[index], 4) + (1 - own) * F.one_hot(targets[partner], 4))
        images.append(image)
    return torch.stack(images), torch.stack(labels)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.3, 0.0), (0.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_batch_equals_samples_mixed_one_by_one(mixup: float, cutmix: float, smoothing: float) -> None:
    inputs, targets = batch()
    mix = Mix(mixup, cutmix, seed=3)
    task = Classification(DataInfo("image", "classification", num_classes=4), label_smoothing=smoothing)
    model = nn.Sequential(nn.Flatten(), nn.Linear(120, 4))
    for step in range(12):
        draw = mix.draw(step, 1, inputs.shape)
        expected, soft = mixed_one_by_one(inputs, targets, draw)
        for layout in (torch.contiguous_format, torch.channels_last):
            data = mix((inputs.contiguous(memory_format=layout), targets), step, 1)
            assert data[0].is_contiguous(memory_format=layout)
            torch.testing.assert_close(data[0], expected)
            # What is pasted, and what is left, keeps its bits.
            assert torch.equal(data[0][draw.cuts], expected[draw.cuts])
        loss, count = task.loss(model, data)
        reference = nn.CrossEntropyLoss(reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(loss, reference(model(expected), soft))
        assert count == task.count(data, 6) == 6


@pytest.mark.parametrize("shape", [(7, 5), (4, 1, 6, 6), (4, 2, 3, 6, 5)])
def test_inputs_of_any_shape_mix(shape: tuple[int, ...]) -> None:
    inputs = torch.randn(shape, dtype=torch.float64)
    mix = Mix(0.5, 0.5 if len(shape) > 2 else 0.0, seed=0)
    draw, (mixed, _) = mix.draw(0, 0, inputs.shape), mix((inputs, torch.arange(shape[0])), 0, 0)
    for index, partner in enumerate(draw.partners.tolist()):
        weight = torch.ones((), dtype=torch.float64)
        if len(shape) > 2:
            top, bottom, left, right = draw.boxes[:, index].tolist()
            weight = torch.zeros(shape[-2:], dtype=torch.float64)
            weight[top:bottom, left:right] = 1
        weight = weight if draw.cuts[index] else weight * (1 - float(draw.shares[index]))
        expected = inputs[index] + weight * (inputs[partner] - inputs[index])
        torch.testing.assert_close(mixed[index], expected, rtol=1e-6, atol=1e-6)


def test_labels_that_do_not_count_weigh_nothing_in_a_mixture() -> None:
    inputs, targets = batch()
    targets[[1, 2]] = -100
    task = Classification(DataInfo("image", "classification", num_classes=4, ignores_labels=True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(120, 4))
    data = Mix(1.0, 0.0, seed=0)((inputs, targets), 0, 0)
    partners, shares = data[1].partners, data[1].shares
    outputs = model(data[0]).log_softmax(1)
    expected = sum(
        -part[index] * outputs[index, label]
        for part, labels in ((shares, targets), (1 - shares, partners))
        for index, label in enumerate(labels.tolist())
        if label >= 0
    )
    loss, count = task.loss(model, data)
    torch.testing.assert_close(loss, expected)
    assert int(count) == int(task.count(data, 6)) == 4


def test_targets_of_many_labels_mix_too() -> None:
    inputs = torch.randn(5, 7)
    targets = torch.randint(2, (5, 3)).float()
    task = MultiLabel(DataInfo("features", "multilabel", num_classes=3))
    model = nn.Linear(7, 3)
    mixed, pairs = Mix(1.0, 0.0, seed=1)((inputs, targets), 4, 0)
    shares = pairs.shares[:, None]
    soft = shares * pairs.targets + (1 - shares) * pairs.partners
    reference = F.binary_cross_entropy_with_logits(model(mixed), soft, reduction="none")
    loss, count = task.loss(model, (mixed, pairs))
    torch.testing.assert_close(loss / count, reference.mean(1).sum() / 5)


def mean_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """A user's loss, of which only the mean is known."""
    return ((outputs.softmax(1) - F.one_hot(targets, 4)) ** 2).sum(1).mean()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same, one for each sample."""
    return ((outputs.softmax(1) - F.one_hot(targets, 4)) ** 2).sum(1)


def read_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The same, unless a value that the host reads says otherwise."""
    return mean_squares(outputs, targets) if outputs.isfinite().all().item() else outputs.sum()


@pytest.mark.parametrize("loss", [mean_squares, squares])
def test_of_a_users_loss_each_sample_weighs_by_its_own_share(loss: Any) -> None:
    inputs, targets = batch()
    data = Mix(1.0, 1.0, seed=5)((inputs, targets), 0, 0)
    task = Classification(DataInfo("image", "classification", num_classes=4), loss=loss)
    outputs, shares = torch.randn(6, 4), data[1].shares
    expected = shares * squares(outputs, targets) + (1 - shares) * squares(outputs, data[1].partners)
    torch.testing.assert_close(task.loss(lambda inputs: outputs, data)[0], expected.sum())


@pytest.mark.parametrize("ignored", [[], [0, 4], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_weights_of_classes_count_as_they_do_without_mixing(ignored: list[int], smoothing: float) -> None:
    inputs, targets = batch()
    targets[ignored] = -100
    weights = torch.tensor([1.0, 20.0, 0.3, 4.0])
    loss = nn.CrossEntropyLoss(weight=weights, label_smoothing=smoothing)
    info = DataInfo("image", "classification", num_classes=4, ignores_labels=True)
    task, outputs = Classification(info, loss=loss), torch.randn(6, 4)
    order = torch.tensor([3, 5, 1, 0, 2, 4])
    for share in (1.0, 0.0):
        pairs = Mixed(targets, targets[order], torch.full((6,), share))
        mixed, count = task.loss(lambda inputs: outputs, (inputs, pairs))
        plain, same = task.loss(lambda inputs: outputs, (inputs, targets if share else targets[order]))
        torch.testing.assert_close(mixed, plain)
        kept = [label for label in targets.tolist() if label >= 0]
        assert float(count) == float(same) == pytest.approx(float(weights[kept].sum()))


def test_a_task_of_ones_own_mixes_by_its_own_sum() -> None:
    class Cooler(Classification):
        def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return super().loss_sum(outputs / 2, targets)

    data = Mix(1.0, 0.0, seed=5)(batch(), 0, 0)
    info, outputs = DataInfo("image", "classification", num_classes=4), torch.randn(6, 4)
    expected = Classification(info).loss(lambda inputs: outputs / 2, data)[0]
    torch.testing.assert_close(Cooler(info).loss(lambda inputs: outputs, data)[0], expected)


def test_a_loss_that_cannot_be_taken_sample_by_sample_is_refused() -> None:
    data = Mix(1.0, 0.0, seed=5)(batch(), 0, 0)
    task = Classification(DataInfo("image", "classification", num_classes=4), loss=read_squares)
    with pytest.raises(ConfigError, match="a loss for each") as caught:
        task.loss(lambda inputs: torch.randn(6, 4), data)
    assert (caught.value.code, caught.value.key) == ("C011", "task.loss")


def test_values_mix_by_the_shares_too() -> None:
    pairs = Mix(1.0, 0.0, seed=2)((torch.randn(5, 3), torch.randn(5, 2)), 0, 0)[1]
    outputs, shares = torch.randn(5, 2), pairs.shares[:, None]
    task = Regression(DataInfo("features", "regression"))
    errors = shares * (outputs - pairs.targets) ** 2 + (1 - shares) * (outputs - pairs.partners) ** 2
    loss, count = task.loss(lambda inputs: outputs, (torch.randn(5, 3), pairs))
    torch.testing.assert_close(loss / count, errors.mean(1).mean())


def test_every_sample_of_every_micro_batch_has_a_draw_of_its_own() -> None:
    shape = torch.Size([8, 3, 16, 16])
    mix = Mix(0.5, 1.0, seed=0)
    drawn = [mix.draw(step, part, shape) for step in range(200) for part in (0, 1)]
    for draw in drawn:
        assert sorted(draw.partners) == list(range(8))
        assert not (draw.partners == np.arange(8)).any()
    partners = np.stack([draw.partners for draw in drawn])
    assert all(np.bincount(partners[:, index], minlength=8)[index + 1 :].min() > 30 for index in range(7))
    cuts = np.concatenate([draw.cuts for draw in drawn])
    assert cuts.mean() == pytest.approx(0.5, abs=0.03)
    assert len({draw.cuts.tobytes() for draw in drawn}) > 150
    blended = np.concatenate([draw.shares[~draw.cuts] for draw in drawn])
    assert len(np.unique(blended)) > 0.99 * len(blended)
    corners = np.concatenate([draw.boxes[:, draw.cuts] for draw in drawn], 1)
    assert len(np.unique(corners, axis=1).T) > 800
    again = Mix(0.5, 1.0, seed=0).draw(7, 1, shape)
    assert all(np.array_equal(a, b) for a, b in zip(again, drawn[15], strict=True))
    assert not np.array_equal(Mix(0.5, 1.0, seed=1).draw(7, 1, shape).shares, again.shares)


@pytest.mark.parametrize(
    ("alpha", "below"),
    [
        (1.0, lambda x: x),
        (0.5, lambda x: 2 / np.pi * np.arcsin(np.sqrt(x))),
        (2.0, lambda x: x**2 * (3 - 2 * x)),
        (4.0, lambda x: x**4 * (35 - 84 * x + 70 * x**2 - 20 * x**3)),
    ],
)
def test_shares_follow_the_beta_distribution(alpha: float, below: Any) -> None:
    chances = np.linspace(0, 1, 10_001)[:-1]
    np.testing.assert_allclose(below(beta(alpha, chances)), chances, atol=2e-6)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 30.0, 2000.0])
def test_shares_have_the_mean_and_the_variance_of_their_parameter(alpha: float) -> None:
    shares = beta(alpha, (np.arange(1_000_000) + 0.5) / 1_000_000)
    assert ((shares >= 0) & (shares <= 1)).all()
    assert shares.mean() == pytest.approx(0.5, abs=1e-6)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=1e-3)


def test_a_sample_alone_stays_as_it_is() -> None:
    inputs, targets = batch(1)
    for mix in (Mix(1.0, 0.0, seed=0), Mix(0.0, 1.0, seed=0)):
        mixed, pairs = mix((inputs, targets), 0, 0)
        torch.testing.assert_close(mixed, inputs)
        assert torch.equal(pairs.partners, targets)


def test_every_loader_and_cut_of_the_ranks_mixes_alike(tmp_path: Path) -> None:
    words = (*MIXED, *SMALL, "gradients.accumulate=4")
    kinds = [
        build_run(tmp_path / kind, *words, f"dataloader.kind={kind}", "dataloader.workers=2").train_loader
        for kind in ("plain", "memory", "workers")
    ]
    plain, memory, workers = (list(loader.steps(3, 9)) for loader in kinds)
    kinds[2].close()
    held_out = next(iter(build_run(tmp_path / "val", *words).eval_loaders["val"]))
    assert isinstance(held_out.data[1], Tensor)
    assert all(isinstance(part.data[1], Mixed) for step in plain for part in step.micro_batches)
    assert same_bits(plain, memory)
    assert same_bits(plain, workers)
    shares = torch.cat([part.data[1].shares for part in plain[0].micro_batches])
    assert len(shares.unique()) > 40


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_run_ends_with_the_same_bits(in_tmp: Path) -> None:
    words = (*MIXED, *SMALL, "callbacks=[{_target_: resuming.Armed, step: 10}]", "run.resume=auto")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=killed") == -signal.SIGKILL
    assert train(*words, "run.dir=killed") == 0
    assert_same_run(Path("whole"), Path("killed"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("task=ptfast.tasks.model_loss.ModelLossTask",), "ModelLossTask cannot train on pairs of targets"),
        (("data=text_file", "data.path=text.txt", "model=gpt"), "LanguageModelling cannot train on pairs"),
        (("data=text_tsv", "data.path=text.tsv", "model=text_encoder"), "text data cannot be mixed"),
    ],
)
def test_what_cannot_be_mixed_is_refused(words: tuple[str, ...], reason: str, in_tmp: Path) -> None:
    Path("text.txt").write_text("to be or not to be " * 60)
    Path("text.tsv").write_text("good\t1\nbad\t0\n" * 20)
    with pytest.raises(ConfigError, match=reason) as caught:
        build_run(in_tmp / "run", *words, "augment.mixup=0.2")
    assert caught.value.code == "C011"


def test_patches_need_images() -> None:
    from ptfast.data.transforms.mixup_cutmix import build_mix

    info = DataInfo("features", "classification", num_classes=2)
    task = Classification(info)
    assert build_mix(0.0, 0.0, 0, info=info, task=task) is None
    assert build_mix(0.2, 0.0, 0, info=info, task=task) == Mix(0.2, 0.0, 0)
    with pytest.raises(ConfigError, match=r"augment\.cutmix=1.*the data has none"):
        build_mix(0.0, 1.0, 0, info=info, task=task)
    with pytest.raises(ConfigError, match=r"inputs of type torch\.int64 cannot be mixed"):
        Mix(1.0, 0.0, 0)((torch.ones(2, 3, dtype=torch.long), torch.zeros(2)), 0, 0)


def test_the_panel_shows_it(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*SMALL, "steps=2", "augment=mixup") == 0
    assert "mixup 0.2" in capsys.readouterr().out
    assert train(*SMALL, "steps=2", "augment=cutmix", "augment.crop_padding=1") == 0
    assert "flip, cutmix 1" in capsys.readouterr().out
