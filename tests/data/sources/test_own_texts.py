"""A dataset of one's own whose samples are token sequences of unequal length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import build_run
from torch.utils.data import Dataset

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.protocols import IGNORE_INDEX
from ptfast.data.build_data import build_data


class Sentences(Dataset[Any]):
    """A user's own: tokens in sequences of unequal length, with a label each or, `tagged`, one per token."""

    pad_id, vocab_size = 9, 10

    def __init__(self, tagged: bool = False, wrong: int = 0) -> None:
        self.lengths = [3 + 7 * i % 11 for i in range(64 - wrong)]
        self.tagged, self.num_classes = tagged, 2

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        tokens = torch.arange(3 + 7 * index % 11) % 9
        return tokens, tokens % 2 if self.tagged else index % 2


def test_a_data_set_of_one_s_own_is_padded_and_batched_by_its_lengths(in_tmp: Path) -> None:
    words = ("data=custom", "data._target_=test_own_texts.Sentences", "batch_size=8", "data.val=8samples")
    small = ("model=text_encoder", "model.width=8")
    run = build_run(in_tmp / "run", *words, *small, "batching=buckets")
    widths = []
    for step in run.train_loader.steps(0, 7):
        tokens, labels = step.micro_batches[0].data
        lengths = (tokens != 9).sum(1)
        assert int(lengths.max()) == tokens.shape[1]
        assert labels.shape == lengths.shape
        widths.append(int(lengths.max() - lengths.min()))
    assert max(widths) <= 4
    assert (run.info.context_length, run.info.pad_id) == (13, 9)


def test_targets_of_a_token_each_are_filled_up_with_what_does_not_count() -> None:
    data = build_data(Sentences(tagged=True), val=Duration(0, "samples"), seed=0, task="token_classification")
    tokens, tags = data.train.fetch(np.array([0, 1]))
    assert tokens[0].tolist() == [0, 1, 2, *[9] * 7]
    assert tags[0].tolist() == [0, 1, 0, *[IGNORE_INDEX] * 7]
    assert tags[1].tolist() == [0, 1] * 4 + [0, 0]


def test_a_class_for_each_token_is_no_language_model() -> None:
    """Unless there are as many classes as tokens."""
    for num_classes, task in ((2, "token_classification"), (10, "language_modelling")):
        dataset = Sentences(tagged=True)
        dataset.num_classes = num_classes
        info = build_data(dataset, val=Duration(0, "samples"), seed=0, task="auto").info
        assert info.task == task
        assert info.ignores_labels
    assert info.num_classes is None


def test_lengths_that_are_not_those_of_the_samples_are_refused() -> None:
    with pytest.raises(DataError, match="its lengths are of 63 samples, and it has 64"):
        build_data(Sentences(wrong=1), val=Duration(0, "samples"), seed=0, task="auto")
    short = Sentences()
    short.lengths = [3] * 64
    with pytest.raises(DataError, match="a sample has 13 tokens, where the longest of its lengths is 3"):
        build_data(short, val=Duration(0, "samples"), seed=0, task="auto")
