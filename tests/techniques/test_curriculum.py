"""Images and sequences that grow: what each step trains on, and what stays as it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from resuming import Armed, arm, assert_same_run, train_in_child
from running import build_run, records, train
from torch import nn
from torch.nn import functional as F

from ptfast.core.errors import ConfigError
from ptfast.techniques.curriculum.growing_sizes import Resize, Stages, Truncation, grow

__all__ = ["Armed"]
NET = ("model=resnet_digits", "model.width=4", "batch_size=64", "log_every=1", "saving.every=1000steps")
IMAGES = ("curriculum=image_size", "curriculum.image_size_multiple=2")
MLP = ("model.hidden=[16]", "batch_size=128", "log_every=1", "saving.every=1000steps")


def text(folder: Path) -> tuple[str, ...]:
    """Arguments of a small language model on a text file."""
    file = folder / "text.txt"
    file.write_text("".join(chr(97 + n * n % 23) for n in range(4000)))
    small = ("model=gpt", "model.width=8", "model.depth=1", "model.heads=1", "data.context_length=16")
    return ("data=text_file", f"data.path={file}", *small, "batch_size=16", "log_every=1")


# Images


def test_stages_are_multiples_and_equally_long() -> None:
    assert grow(16, 32, 8, 100) == Stages((16, 24, 32), (0, 50, 100))
    assert grow(12, 32, 8, 90) == Stages((12, 16, 24, 32), (0, 30, 60, 90))
    assert grow(5, 8, 64, 7) == Stages((5, 8), (0, 7))
    stages = grow(16, 32, 8, 100)
    assert [stages.at(step) for step in (0, 49, 50, 99, 100, 10_000)] == [16, 16, 24, 24, 32, 32]


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


def test_a_model_of_one_size_fails_in_the_first_step(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("model=mlp", IMAGES[0], "steps=2", "run.dir=run") == 2
    assert "forward raises RuntimeError" in (said := capsys.readouterr().err)
    assert "given a Tensor of float32 (64, 1, 4, 4)" in said
    assert not Path("run/saved").exists()


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
    cut = Truncation(Stages((4, 9), (0, 5)))(batch, 0, 0)
    assert [tuple(value.shape) for value in cut.values()] == [(2, 4), (2, 4), (2,)]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("curriculum=image_size", "curriculum.over=11epochs"), "C011", "longer than the run of 10 epochs"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    words: tuple[str, ...], code: str, message: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*words) == 2
    error = capsys.readouterr().err
    assert f"error[{code}]" in error
    assert message in error


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    "words",
    [
        (*IMAGES, "augment.mixup=0.3", "dataloader.kind=memory"),
        (*IMAGES, "dataloader.kind=workers", "dataloader.workers=1", "augment.flip=true"),
    ],
    ids=["from memory", "by workers"],
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
    words = (*NET, "steps=10", *IMAGES)
    assert train(*words) == 0
    lines = " ".join(capsys.readouterr().out.split())
    assert "curriculum images from 4 to 8 pixels in 3 stages over 6 steps" in lines


def test_a_part_of_the_run_forbids_another_length(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*NET, *IMAGES, "schedule=constant", "run.dir=run", "run.resume=auto", "log_every=50")
    assert train(*words, "steps=6", "curriculum.over=50%") == 0
    assert train(*words, "steps=8", "curriculum.over=50%") == 6
    assert "schedule or curriculum depends on the length" in capsys.readouterr().err
