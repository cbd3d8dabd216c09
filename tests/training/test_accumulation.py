"""Accumulation: a batch in one piece, in several, or on several ranks is the same step."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rank_cases import BATCH, LAYOUTS, RAGGED
from running import build_run, same_bits
from torch import Tensor
from toys import (
    tagged_tokens,
)

from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.core.tensors.torch_internals import DispatchMode
from ptfast.training.fit import fit
from ptfast.training.loop import accumulation


def train_parameters(folder: Path, *words: str) -> dict[str, Tensor]:
    run = build_run(folder, *words)
    assert fit(run) == "finished"
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Weights after batches of 8 in one piece, by kind of data."""
    folder = tmp_path_factory.mktemp("whole")
    return {kind: train_parameters(folder / kind, *words, *BATCH) for kind, words in RAGGED.items()}


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_accumulation_changes_nothing(
    whole: dict[str, dict[str, Tensor]], tmp_path: Path, kind: str, micro_batches: int
) -> None:
    """8 x 1 = 4 x 2 = 2 x 4 = 1 x 8. The last batch is one sample: most parts of it are empty."""
    parts = train_parameters(tmp_path, *RAGGED[kind], *BATCH, f"micro_batches={micro_batches}")
    for name, value in whole[kind].items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("strategy", "micro_batches"), LAYOUTS)
@pytest.mark.parametrize("kind", ["samples", "tokens"])
def test_ranks_change_nothing(
    whole: dict[str, dict[str, Tensor]],
    two_ranks: dict[str, Any],
    kind: str,
    strategy: str,
    micro_batches: int,
) -> None:
    """Nor do two ranks, of which one has an empty share of the last batch."""
    parts = two_ranks[f"{kind} {strategy} {micro_batches}"]
    assert parts.keys() == whole[kind].keys()
    for name, value in whole[kind].items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-9)


class Conversions(DispatchMode):
    """Counts conversions to bfloat16 of tensors with one of these shapes."""

    supports_higher_order_operators = True

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.count = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs["dtype"] is torch.bfloat16:
            self.count += tuple(args[0].shape) in self.shapes
        return func(*args, **kwargs)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_step_converts_its_weights_once(
    tmp_path: Path, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its micro-batches, to the bits of converting them for each."""
    (tmp_path / "text").write_text("to be or not to be, that is the question. " * 40)
    words = ("data=text_file", f"data.path={tmp_path / 'text'}", "data.context_length=16", "model=gpt")
    words += ("model.width=16", "model.depth=2", "batch_size=8", "micro_batches=4", "steps=3", "ema=ema")
    words += ("precision=bf16", f"checkpointing={checkpointing}")
    weights, counts = [], []
    for kept in (accumulation.kept_conversions, nullcontext):
        monkeypatch.setattr(accumulation, "kept_conversions", kept)
        run = build_run(tmp_path / str(len(counts)), *words)
        shapes = {tuple(p.shape) for p in run.model.parameters() if p.dim() > 1}
        with Conversions(shapes) as conversions:
            assert fit(run) == "finished"
        counts.append(conversions.count / 3)
        assert run.ema is not None
        weights.append([run.model.state_dict(), run.ema.state_dict()])
    assert same_bits(*weights)
    layers = 2 * 4 + 1
    recomputed = 0 if checkpointing == "none" else 2 * 4 * 4
    assert counts == [layers, 4 * layers + recomputed]


def test_tokens_weigh_the_same_wherever_they_stand(tmp_path: Path) -> None:
    """The gradient is that of the mean over all tokens of the step, not of the mean of means."""
    run = build_run(
        tmp_path,
        *("data=custom", "data._target_=toys.tagged_tokens", "data.val=0", "task=token_classification"),
        *("model=custom", "model._target_=toys.Tagger", "batch_size=22", "micro_batches=11", "steps=1"),
        *("optimizer=sgd", "optimizer.lr=1", "optimizer.momentum=0", "schedule=constant"),
    )
    before = run.model.state_dict()["embed.weight"].clone().requires_grad_()
    tokens, labels = tagged_tokens().tensors
    F.cross_entropy(before[tokens].flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    fit(run)
    assert before.grad is not None
    torch.testing.assert_close(run.model.state_dict()["embed.weight"], before.detach() - before.grad)


def test_a_stand_in_counts_for_nothing(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=toys.blobs", "data.val=0", "steps=1", "optimizer=sgd")
    run = build_run(tmp_path, *words, "batch_size=50", "micro_batches=2", "schedule=constant")
    other = build_run(tmp_path / "other", *words, "batch_size=50", "micro_batches=2", "schedule=constant")
    (step,) = run.train_loader.steps(0, 1)
    full, (data, _) = step.micro_batches
    stand_in = MicroBatch((data[0] * 1000, data[1]), 0)
    batches = {
        id(run): StepBatch((full, stand_in), full.num_samples),
        id(other): StepBatch((full,), full.num_samples),
    }
    for each in (run, other):
        each.train_loader.steps = lambda first, last, each=each: iter([batches[id(each)]])  # type: ignore[method-assign]
        fit(each)
    assert same_bits(run.model.state_dict(), other.model.state_dict())
    assert run.metrics["train"]["loss"] == other.metrics["train"]["loss"]
