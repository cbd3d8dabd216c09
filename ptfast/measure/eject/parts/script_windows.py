"""The running text of a script: one file as tokens, of which windows are cut at random places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ptfast.data.sampling.counter_draws import WINDOW, integers
from ptfast.measure.eject.parts.script_order import SEED, VAL_SIZE

DATA_PATH = "text.txt"
DEVICE = "cpu"
TOKENIZER = "characters"
CONTEXT_LENGTH = 128


class Split:
    """Tokens of running text, of which windows of CONTEXT_LENGTH are samples."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT_LENGTH

    def cut(self, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs (batch, length) from `starts` on, and targets one token further on."""
        windows = torch.from_numpy(self.tokens[starts[:, None] + np.arange(CONTEXT_LENGTH + 1)])
        return windows[:, :-1].contiguous().to(DEVICE), windows[:, 1:].contiguous().to(DEVICE)


def load_data() -> dict[str, Split]:
    """The text to train on, and its end, VAL_SIZE windows, for validation."""
    text = Path(DATA_PATH).read_bytes().decode("utf-8-sig")
    if TOKENIZER == "words":
        parts = text.split()
    else:
        parts = list(text)
    ids = {token: index for index, token in enumerate(sorted(set(parts)))}
    tokens = np.array([ids[token] for token in parts])
    if not VAL_SIZE:
        return {"train": Split(tokens)}
    cut = len(tokens) - VAL_SIZE * CONTEXT_LENGTH
    return {"train": Split(tokens[:cut]), "val": Split(tokens[cut - 1 :])}


def training_batch(train: Split, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
    """Windows at places that are drawn anew in every epoch."""
    places = len(train.tokens) - CONTEXT_LENGTH
    return train.cut(integers(SEED, epoch, indices, WINDOW, places))


def evaluation_batch(split: Split, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Windows one after another."""
    return split.cut(np.arange(start, stop) * CONTEXT_LENGTH)
