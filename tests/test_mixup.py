"""Mixup and CutMix: against samples mixed one by one, and the same whoever loads them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, same_bits, train
from test_resume import Armed, arm, assert_same_run, train_in_child
from torch import Tensor, nn
from torch.nn import functional as F

from ptfast.data.mix import Mix
from ptfast.errors import ConfigError
from ptfast.run import DataInfo, Mixed
from ptfast.tasks.classification import Classification
from ptfast.tasks.multilabel import MultiLabel

__all__ = ["Armed"]
MIXED = ("augment.mixup=0.4", "augment.cutmix=1", "augment.flip=true", "augment.crop_padding=1")
SMALL = ("model.hidden=[16]", "batch_size=128", "steps=12", "log_every=5", "saving.every=4steps")


def batch(size: int = 6, height: int = 5, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, height, width, generator=generator), torch.arange(size) % 4


def mixed_one_by_one(inputs: Tensor, targets: Tensor, draw: Any) -> tuple[Tensor, Tensor]:
    """Inputs, and soft targets over 4 classes."""
    images, labels = [], []
    for index in range(len(inputs)):
        partner = (index - draw.shift) % len(inputs)
        image = inputs[index].clone()
        if draw.box is None:
            image = draw.share * image + (1 - draw.share) * inputs[partner]
            own = draw.share
        else:
            top, bottom, left, right = draw.box
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
        loss, count = task.loss(model, data)
        reference = nn.CrossEntropyLoss(reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(loss, reference(model(expected), soft))
        assert count == task.count(data, 6) == 6


def test_labels_that_do_not_count_weigh_nothing_in_a_mixture() -> None:
    inputs, targets = batch()
    targets[[1, 2]] = -100
    task = Classification(DataInfo("image", "classification", num_classes=4, ignores_labels=True))
    model = nn.Sequential(nn.Flatten(), nn.Linear(120, 4))
    data = Mix(1.0, 0.0, seed=0)((inputs, targets), 0, 0)
    partners, share = data[1].partners, data[1].share
    outputs = model(data[0]).log_softmax(1)
    expected = sum(
        -part * outputs[index, label]
        for part, labels in ((share, targets), (1 - share, partners))
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
    soft = pairs.share * pairs.targets + (1 - pairs.share) * pairs.partners
    reference = F.binary_cross_entropy_with_logits(model(mixed), soft, reduction="none")
    loss, count = task.loss(model, (mixed, pairs))
    torch.testing.assert_close(loss / count, reference.mean(1).sum() / 5)


def test_draws_are_of_the_step_and_the_micro_batch_and_follow_beta() -> None:
    shape = torch.Size([8, 3, 16, 16])
    draws = [Mix(0.5, 0.0, seed=0).draw(step, part, shape) for step in range(400) for part in (0, 1)]
    assert len({draw.share for draw in draws}) == 800
    assert {draw.shift for draw in draws} == set(range(1, 8))
    shares = torch.tensor([draw.share for draw in draws])
    # Beta(1/2, 1/2) has mean 1/2 and variance 1/8.
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(shares.var()) == pytest.approx(1 / 8, abs=0.02)
    both = [Mix(0.5, 1.0, seed=0).draw(step, 0, shape).box is None for step in range(400)]
    assert 150 < sum(both) < 250


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
    parts = [part.data[1].share for part in plain[0].micro_batches]
    assert len(set(parts)) == 4


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_run_ends_with_the_same_bits(in_tmp: Path) -> None:
    words = (*MIXED, *SMALL, "callbacks=[{_target_: test_resume.Armed, step: 10}]", "run.resume=auto")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=killed") == -signal.SIGKILL
    assert train(*words, "run.dir=killed") == 0
    assert_same_run(Path("whole"), Path("killed"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("task=ptfast.tasks.hf.OwnLoss",), "OwnLoss takes no pairs of targets"),
        (("data=text_file", "data.path=text.txt", "model=gpt"), "LanguageModelling takes no pairs"),
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
    from ptfast.data.mix import build_mix

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
