"""Documents packed into windows: each is predicted as if it were alone, and comes once an epoch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import varlen_on_cpu
from resuming import arm, assert_same_run, train_in_child
from running import build_run, same_bits, summary, train
from test_batching import Armed, text, texts_of
from torch.nn import functional as F
from trials import merged

from ptfast.cli import command_line
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import IGNORE_INDEX, PackedTokens
from ptfast.data.sources.ragged_text import Documents, PackedSequences, pack_lengths
from ptfast.data.sources.text_dataset import TextFile
from ptfast.models import layers
from ptfast.models.gpt import Gpt
from ptfast.models.layers import attention, within_sequences

__all__ = ["Armed"]
DRAWN = np.clip(np.random.default_rng(0).lognormal(2, 0.8, 60), 2, 32).astype(np.int64)


def documents(lengths: np.ndarray = DRAWN, context: int = 32) -> Documents:
    texts = texts_of(lengths)
    return Documents(texts._replace(tokens=(texts.tokens % 97).astype(np.uint16)), 0, context)


def everything(source: Any, epoch: int = 0) -> tuple[Any, torch.Tensor]:
    return source.fetch(np.arange(len(source)), epoch)


def found_in(inputs: PackedTokens, targets: torch.Tensor) -> list[tuple[int, ...]]:
    """The documents of a batch, each as its inputs and its last target."""
    found = []
    for tokens, positions, row in zip(*inputs[:2], targets, strict=True):
        begins = [*(positions == 0).nonzero()[:, 0].tolist(), len(tokens)]
        for first, last in pairwise(begins):
            kept = row[first:last] != IGNORE_INDEX
            if kept.any():
                assert kept.all()
                assert positions[first:last].tolist() == [*range(last - first)]
                assert tokens[first + 1 : last].tolist() == row[first : last - 1].tolist()
                found.append((*tokens[first:last].tolist(), int(row[last - 1])))
    return sorted(found)


# Bins


@pytest.mark.parametrize(("count", "capacity"), [(1, 8), (50, 100), (2000, 64), (3000, 1000)])
def test_windows_are_full_and_no_document_is_lost(count: int, capacity: int) -> None:
    lengths = np.clip(np.random.default_rng(count).lognormal(3, 1, count), 1, capacity).astype(np.int64)
    slots, counts = pack_lengths(lengths, capacity)
    assert sorted(slots) == sorted(lengths)
    filled = np.add.reduceat(slots, np.cumsum(counts) - counts)
    assert filled.max() <= capacity
    assert len(counts) <= 1.02 * lengths.sum() / capacity + 1


def test_documents_that_share_no_window_have_one_each() -> None:
    slots, counts = pack_lengths(np.array([6, 7, 8, 5]), 9)
    assert sorted(slots) == [5, 6, 7, 8]
    assert counts.tolist() == [1, 1, 1, 1]


# Windows


def test_every_document_comes_once_and_whole_in_every_epoch() -> None:
    source = PackedSequences(documents(), 32, seed=3)
    inputs, targets = documents().fetch(np.arange(len(documents())))
    lengths = (targets != IGNORE_INDEX).sum(1).tolist()
    rows = zip(inputs.tolist(), targets.tolist(), lengths, strict=True)
    expected = sorted((*tokens[:length], row[length - 1]) for tokens, row, length in rows)
    first, second = (everything(source, epoch) for epoch in (0, 1))
    assert found_in(*first) == found_in(*second) == expected
    assert not torch.equal(first[1], second[1])
    assert torch.equal(everything(PackedSequences(documents(), 32, seed=3), 1)[1], second[1])
    padding = 1 - sum(lengths) / first[1].numel()
    assert source.padding_share == pytest.approx(padding)
    assert padding < 0.1


def test_a_part_of_the_windows_is_what_it_is_among_all() -> None:
    source = PackedSequences(documents(), 32, seed=3)
    (tokens, positions, _), targets = everything(source)
    some = np.array([4, 0, 2])
    (few, places, _), row = source.fetch(some)
    for part, whole in ((few, tokens), (places, positions), (row, targets)):
        assert torch.equal(part, whole[some])


def test_a_packed_document_has_the_loss_and_gradient_it_has_alone() -> None:
    """To 1e-5 per token, against the documents one by one."""
    torch.manual_seed(0)
    model = Gpt(97, 32, width=32, depth=2, heads=4)
    alone = torch.zeros(())
    count = 0
    for index in range(len(documents())):
        inputs, targets = documents().fetch(np.array([index]))
        alone = alone + F.cross_entropy(model(inputs)[0], targets[0], reduction="sum")
        count += targets.numel()
    (alone / count).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    inputs, targets = everything(PackedSequences(documents(), 32, seed=0))
    packed = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    packed.backward()
    assert float(packed.detach()) == pytest.approx(float(alone.detach()) / count, abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3)])
@pytest.mark.parametrize("length", [32, 20])
def test_a_kernel_for_unequal_lengths_gives_the_figures_of_the_mask(
    rows: slice, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows cut short or parted among micro-batches as well."""
    torch.manual_seed(0)
    model = Gpt(97, 32, width=32, depth=2, heads=4)
    whole, targets = everything(PackedSequences(documents(), 32, seed=0))
    tokens, positions, targets = (each[rows, :length] for each in (*whole[:2], targets))
    count = int((whole.positions == 0).sum())
    assert count <= whole.num_sequences < 2 * count
    inputs, found = PackedTokens(tokens, positions, whole.num_sequences), []
    for kernel in (False, True):
        if kernel:
            monkeypatch.setattr(layers, "MIN_MEAN_LENGTH", 0)
            monkeypatch.setattr(layers, "varlen_attn", varlen_on_cpu.varlen_attn)
            monkeypatch.setattr(layers, "_has_varlen_kernel", lambda device, block: True)
            monkeypatch.setattr(layers, "within_sequences", None)
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        found.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def test_no_token_sees_another_document_in_half_precision_either() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    mask = within_sequences(positions)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    query, key, value = (torch.randn(2, 3, 6, 8) for _ in range(3))
    exact = attention(query, key, value, mask=mask)
    half = attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), mask=mask)
    torch.testing.assert_close(half.float(), exact, rtol=0.03, atol=0.03)
    alone = attention(query[:1, :, 3:5], key[:1, :, 3:5], value[:1, :, 3:5], causal=True)
    torch.testing.assert_close(exact[:1, :, 3:5], alone)


# A run


def test_packed_and_unpacked_runs_evaluate_alike(in_tmp: Path) -> None:
    losses = []
    for batching in ("none", "pack"):
        words = (
            *text(in_tmp),
            "steps=1",
            "optimizer.lr=1e-30",
            f"batching={batching}",
            f"run.dir={batching}",
        )
        assert train(*words) == 0
        losses.append(summary(Path(batching))["val"]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_run_ends_with_the_same_bits(in_tmp: Path) -> None:
    rhythm = ("steps=22", "saving.every=8steps", "eval.every=11steps", "batch_size=8", "micro_batches=2")
    armed = ("callbacks=[{_target_: test_sequence_packing.Armed, step: 18}]", "run.resume=auto")
    words = (*text(in_tmp), *rhythm, *armed, "batching=pack")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=killed") < 0
    assert train(*words, "run.dir=killed") == 0
    assert_same_run(Path("whole"), Path("killed"))
    assert summary(Path("whole"))["padding_share"] < 0.1


def test_packed_windows_can_be_short_at_first(in_tmp: Path) -> None:
    words = (*text(in_tmp), "batching=pack", "batch_size=8", "steps=8", "curriculum=sequence_length")
    run = build_run(in_tmp / "run", *merged(*words, "curriculum.length_multiple=8"))
    widths = []
    for step in run.train_loader.steps(0, 8):
        (inputs, targets), _ = step.micro_batches[0]
        assert inputs.tokens.shape == inputs.positions.shape == targets.shape
        assert torch.isfinite(run.task.loss(run.model, (inputs, targets))[0])
        widths.append(targets.shape[1])
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (8, 32)


def test_documents_of_a_pack_on_disk_are_packed_alike(in_tmp: Path) -> None:
    words = text(in_tmp)
    assert command_line.run(["pack", "text.txt", "there", "--documents", "lines"]) == 0
    places = (("data.path=text.txt", "dataloader=plain"), ("data.path=there", "dataloader=packed"))
    batches = []
    for number, place in enumerate(places):
        run = build_run(in_tmp / str(number), *merged(*words, *place, "batching=pack", "steps=3"))
        batches.append([step.micro_batches for step in run.train_loader.steps(0, 3)])
    assert same_bits(*batches)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("data.documents=none",), "the data has no documents to pack"),
        (("batching.buckets=true",), "packed windows are all of one length"),
    ],
)
def test_what_cannot_be_packed_is_refused(words: tuple[str, ...], reason: str, in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        build_run(in_tmp / "run", *merged(*text(in_tmp), "batching=pack", *words))
    assert caught.value.code == "C011"


def test_a_model_that_looks_across_documents_is_refused(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpt, "takes_packed", False)
    with pytest.raises(ConfigError, match="Gpt would attend across documents"):
        build_run(in_tmp / "run", *text(in_tmp), "batching=pack")


@pytest.mark.gpu
@pytest.mark.parametrize("batching", ["buckets", "pack"])
def test_a_gpu_finds_the_same_losses(batching: str, in_tmp: Path) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        words = (*text(in_tmp), "steps=6", "model.dropout=0", f"batching={batching}", f"device={device}")
        assert train(*words, f"run.dir={device}") == 0
        losses.append(summary(Path(device))["val"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_bytes_between_documents_are_not_modelled(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("some words\n\n\n\nmore of them\n\nand more of these\n" * 20)
    data = TextFile(str(tmp_path / "text"), documents="paragraphs", context_length=32)
    info = data.load(val=Duration(10, "percent"), seed=0).info
    assert info.token_bytes == 1.0
