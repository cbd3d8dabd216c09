"""Images, sequences and batches that grow: what each step trains on, and what stays as it was."""

from __future__ import annotations

import signal
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resuming import Armed, arm, assert_same_run, train_in_child
from running import build_run, records, same_bits, summary, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from ptfast.core.batch_plan import BatchPlan, Stages, grow
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.techniques.curriculum.growing_sizes import Cut, Resize, build_batch_sizes

__all__ = ["Armed"]
NET = ("model=resnet_digits", "model.width=4", "batch_size=64", "log_every=1", "saving.every=1000steps")
IMAGES = ("curriculum=image_size", "curriculum.image_size_multiple=2")
MLP = ("model.hidden=[16]", "batch_size=128", "log_every=1", "saving.every=1000steps")
BATCHES = ("curriculum=batch_size", "curriculum.batch_size_from=32")


class Numbers(IterableDataset[Any]):
    """Samples that are their own numbers."""

    num_classes = 2

    def __iter__(self) -> Any:
        for index in range(400):
            yield torch.tensor([float(index)]), index % 2


def text(folder: Path) -> tuple[str, ...]:
    """Arguments of a small language model on a text file."""
    file = folder / "text.txt"
    file.write_text("".join(chr(97 + n * n % 23) for n in range(4000)))
    small = ("model=gpt", "model.width=8", "model.depth=1", "model.heads=1", "data.context_length=16")
    return ("data=text_file", f"data.path={file}", *small, "batch_size=16", "log_every=1")


# Images


def test_images_are_small_at_first_and_whole_at_the_end(tmp_path: Path) -> None:
    words = (*NET, "steps=20", "seed=3")
    plain = list(build_run(tmp_path / "plain", *words).train_loader.steps(0, 20))
    run = build_run(tmp_path / "small", *words, *IMAGES)
    steps = list(run.train_loader.steps(0, 20))
    sides = [step.micro_batches[0].data[0].shape[-1] for step in steps]
    assert sides == [4] * 6 + [6] * 6 + [8] * 8
    for small, whole, side in zip(steps, plain, sides, strict=True):
        (images, labels), (full, full_labels) = small.micro_batches[0].data, whole.micro_batches[0].data
        expected = full if side == 8 else F.interpolate(full, (side, side), mode="bilinear", antialias=True)
        torch.testing.assert_close(images, expected)
        assert torch.equal(labels, full_labels)
    assert run.choices.get("curriculum") == ["images from 4 to 8 pixels in 3 stages over 12 steps"]
    held_out = next(iter(run.eval_loaders["val"])).data[0]
    assert held_out.shape[-2:] == (8, 8)


def test_small_images_keep_proportions_and_memory_format() -> None:
    resize = Resize(grow(8, 16, 4, 10), (16, 31))
    assert [resize.size(side) for side in (8, 12, 16)] == [(8, 16), (12, 23), (16, 31)]
    images = torch.rand(2, 3, 16, 31)
    for layout in (torch.contiguous_format, torch.channels_last):
        small, _ = resize((images.contiguous(memory_format=layout), None), 0, 0)
        assert small.shape == (2, 3, 8, 16)
        assert small.is_contiguous(memory_format=layout)
        assert resize((images, None), 10, 0)[0] is images


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("model=mlp",), r"curriculum.image_size_from=4: the model does not take images of 4 x 4"),
        (("curriculum.image_size_from=8",), r"image_size_from=8: not smaller than the images, .* 8 pixels"),
        (("data=text_file", "data.path=text.txt", "model=gpt"), "tokens data has no images"),
        (("curriculum=sequence_length",), "image data has no sequences to cut"),
    ],
)
def test_what_cannot_grow_is_refused(words: tuple[str, ...], reason: str, in_tmp: Path) -> None:
    text(in_tmp)
    chosen = {word.partition("=")[0]: word for word in ("model=resnet_digits", IMAGES[0], *words)}
    with pytest.raises(ConfigError, match=reason) as caught:
        build_run(in_tmp / "run", *chosen.values())
    assert caught.value.code == "C011"


# Sequences


def test_sequences_are_cut_and_only_their_tokens_count(tmp_path: Path) -> None:
    words = (*text(tmp_path), "steps=10", "curriculum.length_multiple=4")
    plain = list(build_run(tmp_path / "plain", *words).train_loader.steps(0, 10))
    run = build_run(tmp_path / "short", *words, "curriculum=sequence_length")
    steps = list(run.train_loader.steps(0, 10))
    lengths = [step.micro_batches[0].data[0].shape[1] for step in steps]
    assert lengths == [4, 4, 8, 8, 12, 12, 16, 16, 16, 16]
    for short, whole, length in zip(steps, plain, lengths, strict=True):
        (data, num_samples), (full, _) = short.micro_batches[0], whole.micro_batches[0]
        assert torch.equal(data[0], full[0][:, :length])
        assert torch.equal(data[1], full[1][:, :length])
        loss, count = run.task.loss(run.model, data)
        assert count == run.task.count(data, num_samples) == len(data[0]) * length
        expected = nn.CrossEntropyLoss(reduction="sum")(run.model(data[0]).flatten(0, 1), data[1].flatten())
        torch.testing.assert_close(loss, expected)


def test_a_step_on_short_sequences_does_not_depend_on_how_it_is_cut(tmp_path: Path) -> None:
    losses = []
    for parts in (1, 4):
        folder = tmp_path / str(parts)
        words = (*text(tmp_path), "steps=6", "curriculum=sequence_length", f"gradients.accumulate={parts}")
        assert train(*words, f"run.dir={folder}") == 0
        losses.append([line["loss"] for line in records(folder) if line["split"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_batches_of_keywords_are_cut_too() -> None:
    batch = {"input_ids": torch.ones(2, 9), "labels": torch.ones(2, 9), "sizes": torch.ones(2)}
    cut = Cut(Stages((4, 9), (0, 5)))(batch, 0, 0)
    assert [tuple(value.shape) for value in cut.values()] == [(2, 4), (2, 4), (2,)]


# Batches


@pytest.mark.parametrize("drop_last", ["false", "true"])
@pytest.mark.parametrize("kind", ["plain", "memory", "workers"])
def test_every_sample_comes_once_an_epoch_whoever_loads(kind: str, drop_last: str, tmp_path: Path) -> None:
    words = (
        *MLP,
        *BATCHES,
        "epochs=3",
        f"dataloader.drop_last={drop_last}",
        "dataloader.workers=2",
        "augment.flip=true",
    )
    run = build_run(tmp_path, *words, "gradients.accumulate=2", f"dataloader.kind={kind}")
    plan, loader = run.train_loader.plan, run.train_loader
    ends = [0, *(plan.steps(Duration(n, "epochs"), None) for n in (1, 2, 3))]
    assert run.total_steps == ends[-1]
    sizes = [step.num_samples for step in loader.steps(0, run.total_steps)]
    loader.close()
    assert sizes[:2] == [32, 32]
    assert sizes[-2] == 128
    for first, end in pairwise(ends):
        assert (
            sum(sizes[first:end]) == 1617
            if drop_last == "false"
            else 1617 - 128 < sum(sizes[first:end]) <= 1617
        )
    reference = build_run(tmp_path / "plain", *words, "gradients.accumulate=2", "dataloader.kind=plain")
    expected = list(reference.train_loader.steps(5, 25))
    assert same_bits(list(loader.steps(5, 25)), expected)
    loader.close()
    seen = [share for step in range(ends[1]) for share in reference.train_loader.batches.indices_at(step)[0]]
    indices = np.concatenate([share.indices for share in seen])
    assert len(np.unique(indices)) == len(indices) == sum(sizes[: ends[1]])


def test_epochs_end_where_their_last_sample_was(in_tmp: Path) -> None:
    """Evaluation, saving and the schedule follow the run's real steps."""
    by_epoch = ("schedule=step", "schedule.every=1epochs")
    assert train(*MLP, *BATCHES, "epochs=3", "curriculum.over=30steps", *by_epoch, "run.dir=run") == 0
    lines = records(Path("run"))
    plan = BatchPlan(1617, grow(32, 128, 32, 30))
    ends = [plan.steps(Duration(n, "epochs"), None) for n in (1, 2, 3)]
    assert [line["step"] for line in lines if line["split"] == "val"] == ends
    assert [line["epoch"] for line in lines if line["split"] == "val"] == [1, 2, 3]
    assert summary(Path("run"))["samples"] == 3 * 1617
    rates = [line["lr"] for line in lines if line["split"] == "train"]
    assert rates == pytest.approx(
        [1e-3 * 0.1 ** sum(step > end for end in ends) for step in range(1, ends[-1] + 1)]
    )


@pytest.mark.parametrize(
    ("over", "length"),
    [
        ("30%", {"epochs": 20}),
        ("100%", {"epochs": 7}),
        ("60%", {"steps": 400}),
        ("5epochs", {"epochs": 20}),
        ("3000samples", {"epochs": 20}),
        ("77steps", {"epochs": 20}),
    ],
)
def test_batches_grow_over_the_part_of_the_run_that_is_asked_for(over: str, length: dict[str, int]) -> None:
    known = {"micro_batches": 1, "num_samples": 1000, "epochs": None, "steps": None, **length}
    sizes = build_batch_sizes(10, 50, Duration.parse(over), **known)
    plan = BatchPlan(1000, sizes)
    assert sizes.values == (10, 20, 30, 40, 50)
    total = length.get("steps") or plan.steps(Duration(length["epochs"], "epochs"), None)
    # A short last batch in each epoch takes a step more than the samples say.
    assert sizes.starts[-1] == pytest.approx(
        plan.steps(Duration.parse(over), total), abs=length.get("epochs", 1)
    )


def test_the_first_size_divides_into_the_micro_batches() -> None:
    known = {"num_samples": 1000, "epochs": 1, "steps": None}
    sizes = build_batch_sizes("auto", 96, Duration(60, "percent"), micro_batches=16, **known)
    assert sizes.values == (32, 64, 96)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("batch_size=128", "curriculum.batch_size_from=30", "gradients.accumulate=4"),
            "C010",
            "curriculum.batch_size_from=30 (command line): cannot be cut into 4 micro-batches evenly. "
            "The nearest that divide are 28 and 32",
        ),
        (("curriculum.batch_size_from=64",), "C011", "not below the full batch_size=64"),
        (("curriculum=batch_size", "curriculum.over=11epochs"), "C011", "longer than the run of 10 epochs"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    words: tuple[str, ...], code: str, message: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*words) == 2
    error = capsys.readouterr().err
    assert f"error[{code}]" in error
    assert message in error


def test_growing_batches_take_a_stream_in_order(tmp_path: Path) -> None:
    words = (
        "data=custom",
        "data._target_=test_curriculum.Numbers",
        "model.hidden=[4]",
        "data.normalize=false",
    )
    words = (*words, "steps=8", "batch_size=24", "curriculum=batch_size", "curriculum.batch_size_from=8")
    run = build_run(tmp_path, *words, "curriculum.over=4steps")
    steps = list(run.train_loader.steps(0, 8))
    assert [step.num_samples for step in steps] == [8, 8, 16, 16, 24, 24, 24, 24]
    numbers = [step.micro_batches[0].data[0].flatten().tolist() for step in steps]
    assert list(chain(*numbers)) == list(range(144))
    later = [step.micro_batches[0].data[0].flatten().tolist() for step in run.train_loader.steps(3, 6)]
    assert later == numbers[3:6]
    with pytest.raises(ConfigError, match="the data has no epochs"):
        build_run(tmp_path / "epochs", *words, "curriculum.over=1epochs")


# All of them


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    "words",
    [
        (*IMAGES, "curriculum.batch_size_from=32", "augment.mixup=0.3", "dataloader.kind=memory"),
        (*BATCHES, "dataloader.kind=workers", "dataloader.workers=1", "augment.flip=true"),
    ],
    ids=["images and batches", "batches by workers"],
)
def test_a_run_killed_amid_its_stages_ends_with_the_same_bits(in_tmp: Path, words: tuple[str, ...]) -> None:
    rhythm = ("steps=16", "saving.every=4steps", "eval.every=8steps", "log_every=2", "run.resume=auto")
    base = ("model=resnet_digits", "model.width=4", "batch_size=64", *rhythm)
    base = (*base, "callbacks=[{_target_: resuming.Armed, step: 6}]", *words)
    assert train(*base, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*base, "run.dir=killed") == -signal.SIGKILL
    assert train(*base, "run.dir=killed") == 0
    assert_same_run(Path("whole"), Path("killed"))


def test_the_panel_counts_the_stages(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*NET, "steps=10", *IMAGES, "curriculum.batch_size_from=16")
    assert train(*words) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert (
        "curriculum batches from 16 to 64 samples in 4 stages over 6 steps; "
        "images from 4 to 8 pixels in 3 stages over 6 steps" in lines
    )


def test_a_part_of_the_run_forbids_another_length(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*MLP, *BATCHES, "schedule=constant", "run.dir=run", "run.resume=auto", "log_every=50")
    assert train(*words, "steps=6", "curriculum.over=50%") == 0
    assert train(*words, "steps=8", "curriculum.over=50%") == 6
    assert "schedule or curriculum depends on the length" in capsys.readouterr().err
