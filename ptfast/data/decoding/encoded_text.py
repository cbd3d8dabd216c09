"""Texts as token ids in one flat array, made once and cached on disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptfast.core.distributed import once_per_machine
from ptfast.core.machine import cache_folder
from ptfast.data.data_fingerprint import load_arrays, save_arrays
from ptfast.data.decoding.text_tokenizer import Tokenizer

CACHE_FROM_CHARACTERS = 2**20
"""Shorter texts are tokenised anew each time, which takes less than a second."""
_FORMAT = "1"


class Encoded(NamedTuple):
    """Token ids of some texts, one after another."""

    tokens: NDArray[np.integer]
    """uint16, or uint32 where the vocabulary is larger."""
    lengths: NDArray[np.int64]
    """Tokens of each text."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each text begins."""
        return np.cumsum(self.lengths) - self.lengths

    def split(self, first: int) -> list[Encoded]:
        """The texts before `first`, and those from there on where there are any."""
        cut = int(self.lengths[:first].sum())
        parts = [Encoded(self.tokens[:cut], self.lengths[:first])]
        if first < len(self.lengths):
            parts.append(Encoded(self.tokens[cut:], self.lengths[first:]))
        return parts


def encode(texts: list[str], tokenizer: Tokenizer) -> Encoded:
    """The token ids of `texts`.

    A tokenizer needs microseconds for a word, and a text is read at the start of every run on it. So what
    it makes of more than a million characters is stored in the cache folder, under the hash of texts and
    tokenizer: another text, or another vocabulary, is another entry. A damaged entry is made anew. Of several
    ranks the first of each machine hashes and tokenises; the others read what it has stored.

    Raises:
        DataError: D005 for a token that is not in the vocabulary, where none stands for the unknown.
    """
    if sum(map(len, texts)) < CACHE_FROM_CHARACTERS:
        return encode_anew(texts, tokenizer)
    encoded: Encoded | None = None

    def store() -> Path:
        nonlocal encoded
        path = cache_folder() / "tokens" / f"{_key(texts, tokenizer)}.npz"
        encoded = _stored(path)
        if encoded is None:
            encoded = encode_anew(texts, tokenizer)
            save_arrays(path, tokens=encoded.tokens, lengths=encoded.lengths)
        return path

    path = once_per_machine(store)
    # A cache folder that cannot be written holds nothing.
    return encoded or _stored(path) or encode_anew(texts, tokenizer)


def _stored(path: Path) -> Encoded | None:
    arrays = load_arrays(path)
    return Encoded(**arrays) if arrays.keys() == {"tokens", "lengths"} else None


def encode_anew(texts: list[str], tokenizer: Tokenizer) -> Encoded:
    """The token ids of `texts`, without the cache."""
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    tokens, lengths = tokenizer.encode_all(texts) if texts else np.zeros((2, 0), np.int64)
    return Encoded(tokens.astype(dtype, copy=False), lengths)


def _key(texts: list[str], tokenizer: Tokenizer) -> str:
    sha = hashlib.sha256(json.dumps([_FORMAT, tokenizer.describe()]).encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        sha.update(b"%d:" % len(data))
        sha.update(data)
    return sha.hexdigest()[:32]
