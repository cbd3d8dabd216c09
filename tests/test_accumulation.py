"""Accumulation: a batch in one piece, in several, or on several ranks is the same step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from running import build_run, same_bits
from torch import Tensor
from toys import (
    tagged_tokens,
)

from ptfast.loop import fit
from ptfast.run import MicroBatch, StepBatch


def train_parameters(folder: Path, *words: str) -> dict[str, Tensor]:
    run = build_run(folder, *words)
    assert fit(run) == "finished"
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize(
    "data",
    [
        # 50 samples of 16 leave a last batch of 2: with 4 micro-batches two shares are empty.
        ("data=custom", "data._target_=toys.blobs", "data.val=0", "model._target_=toys.DoubleMlp"),
        (
            *("data=custom", "data._target_=toys.tagged_tokens", "data.val=0"),
            *("model._target_=toys.Tagger", "task=token_classification"),
        ),
    ],
    ids=["samples", "tokens"],
)
def test_accumulation_changes_nothing(tmp_path: Path, data: tuple[str, ...], micro_batches: int) -> None:
    words = (*data, "model=custom", "batch_size=16", "epochs=3", "optimizer=sgd", "schedule=constant")
    words = (*words, "optimizer.lr=0.5", "eval.every=2steps", "log_every=3")
    whole = train_parameters(tmp_path / "1", *words)
    parts = train_parameters(tmp_path / "n", *words, f"micro_batches={micro_batches}")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-9)


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
    assert run.figures["train"]["loss"] == other.figures["train"]["loss"]
