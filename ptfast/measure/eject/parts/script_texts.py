"""The labelled texts of a script: read from tables, tokenised, padded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ptfast.measure.eject.parts.script_order import VAL_SIZE, split_indices

FILES = {"train": "train.tsv"}
DEVICE = "cpu"
TOKENIZER = "words"
MIN_COUNT = 1
MAX_LENGTH = 128
PADDED = False
CLASSES = ("0", "1")
PAD_ID, UNKNOWN_ID = 0, 1


@dataclass
class Split:
    """Token ids of each text, and their classes."""

    texts: list[Tensor]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def load_data() -> dict[str, Split]:
    """The splits, tokenised by the vocabulary of the training texts."""
    tables = {name: read_table(Path(file)) for name, file in FILES.items()}
    ids = vocabulary([text for text, _ in tables["train"]])
    splits = {name: tokenized(table, ids) for name, table in tables.items()}
    if VAL_SIZE:
        train, (kept, held_out) = splits["train"], split_indices(len(splits["train"]))
        splits["train"] = Split([train.texts[index] for index in kept], train.targets[kept])
        splits["val"] = Split([train.texts[index] for index in held_out], train.targets[held_out])
    return splits


def read_table(file: Path) -> list[tuple[str, str]]:
    """Text and label of each line `text<TAB>label`."""
    lines = file.read_bytes().decode("utf-8-sig").split("\n")
    cut = [line.rstrip("\r").rpartition("\t") for line in lines if line.strip()]
    return [(text, label.strip()) for text, _, label in cut]


def vocabulary(texts: list[str]) -> dict[str, int]:
    """Ids of the tokens that occur often enough, most frequent first, after padding and unknown."""
    counts = Counter(token for text in texts for token in tokens_of(text))
    frequent = [token for token, count in counts.items() if count >= MIN_COUNT]
    frequent.sort(key=lambda token: (-counts[token], token))
    return {token: index for index, token in enumerate(frequent, UNKNOWN_ID + 1)}


def tokens_of(text: str) -> list[str]:
    """The tokens of a text."""
    if TOKENIZER == "words":
        return text.split()
    return list(text)


def tokenized(table: list[tuple[str, str]], ids: dict[str, int]) -> Split:
    """Texts as token ids, of which MAX_LENGTH at most are kept."""
    texts = [
        torch.tensor([ids.get(token, UNKNOWN_ID) for token in tokens_of(text)][:MAX_LENGTH] or [PAD_ID])
        for text, _ in table
    ]
    return Split(texts, torch.tensor([CLASSES.index(label) for _, label in table]))


def training_batch(train: Split, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
    """The texts `indices`."""
    return padded([train.texts[index] for index in indices]), train.targets[indices].to(DEVICE)


def evaluation_batch(split: Split, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Some texts of a split."""
    return padded(split.texts[start:stop]), split.targets[start:stop].to(DEVICE)


def padded(texts: list[Tensor]) -> Tensor:
    """Texts side by side, filled up to one length."""
    tokens = pad_sequence(texts, batch_first=True, padding_value=PAD_ID)
    if PADDED:
        tokens = F.pad(tokens, (0, MAX_LENGTH - tokens.shape[1]), value=PAD_ID)
    return tokens.to(DEVICE)
