"""Tokenizers with vocabularies of plain data, and token ids of texts, cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptfast.core.distributed import once_per_machine
from ptfast.core.errors import DataError, import_extra
from ptfast.core.machine import cache_folder
from ptfast.core.protocols import DataInfo
from ptfast.data.data_fingerprint import load_arrays, save_arrays

BUILT_IN = ("words", "characters")
PAD_ID, UNKNOWN_ID = 0, 1
_SPECIAL = ["<pad>", "<unk>"]


class Vocabulary:
    """A vocabulary of `words` (split at white space) or `characters`.

    `unknown_id` stands for tokens outside the vocabulary; if it is None, they are an error.
    """

    pad_id = PAD_ID

    def __init__(self, kind: str, entries: list[str], unknown_id: int | None) -> None:
        self.kind, self.entries, self.unknown_id = kind, entries, unknown_id
        self._ids = {token: i for i, token in enumerate(entries)}

    def __len__(self) -> int:
        return len(self.entries)

    @classmethod
    def of(cls, kind: str, texts: Iterable[str], min_count: int | None) -> Vocabulary:
        """Build a vocabulary: pad, unknown, then tokens seen `min_count` times or more, most frequent first.

        If `min_count` is None, it has all tokens, sorted, without pad and unknown.
        """
        tokens = chain.from_iterable(_cut(kind, text) for text in texts)
        if min_count is None:
            return cls(kind, sorted(set(tokens)), None)
        counts = Counter(tokens)
        frequent = [token for token, count in counts.items() if count >= min_count]
        return cls(kind, _SPECIAL + sorted(frequent, key=lambda token: (-counts[token], token)), UNKNOWN_ID)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; raise D005 for an unknown token, unless `unknown_id` is set."""
        if self.unknown_id is not None:
            ids, unknown = self._ids, self.unknown_id
            return [ids.get(token, unknown) for token in _cut(self.kind, text)]
        try:
            return [self._ids[token] for token in _cut(self.kind, text)]
        except KeyError as error:
            what = f"{error.args[0]!r} does not occur in the training text"
            raise DataError("D005", what, key="data") from None

    def decode(self, ids: list[int]) -> str:
        return ("" if self.kind == "characters" else " ").join(self.entries[i] for i in ids)

    def encode_all(self, texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the token ids of `texts`, concatenated, and the number of tokens of each."""
        if self.kind != "characters":
            return _joined([self.encode(text) for text in texts])
        # A table lookup by code point is 20 times as fast as a dictionary lookup by character.
        joined = "".join(texts)
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        none = -1 if self.unknown_id is None else self.unknown_id
        table = np.full(sys.maxunicode + 1, none, np.int64)
        known = {ord(entry): i for i, entry in enumerate(self.entries) if len(entry) == 1}
        table[list(known)] = list(known.values())
        ids = table[codes]
        if (ids < 0).any():
            self.encode(joined[int(np.argmin(ids))])
        return ids, np.fromiter(map(len, texts), np.int64, len(texts))

    def describe(self) -> dict[str, Any]:
        """Return a JSON-serializable description, from which `read_tokenizer` rebuilds the vocabulary."""
        return {"kind": self.kind, "entries": self.entries, "unknown_id": self.unknown_id}


class HubTokenizer:
    """A tokenizer of the package `tokenizers`: from a `tokenizer.json`, its `content`, or the hub."""

    def __init__(self, source: str, content: str | None = None) -> None:
        tokenizers = import_extra("tokenizers", "hf", "data.tokenizer", source)
        self.source = source
        try:
            if content is None and (source.endswith(".json") or Path(source).is_file()):
                # A file, not a name on the hub: do not query the hub.
                content = Path(source).read_text(encoding="utf-8")
            kind = tokenizers.Tokenizer
            self._tokenizer = kind.from_pretrained(source) if content is None else kind.from_str(content)
        except Exception as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            hint = "Use words, characters, a tokenizer.json, or a name on the Hugging Face hub"
            what = f"no tokenizer: {reason}"
            raise DataError("D005", what, key="data.tokenizer", value=source, suggestion=hint) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = (self._tokenizer.token_to_id(name) for name in ("[PAD]", "<pad>", "<|endoftext|>"))
        self.pad_id = next((each for each in ids if each is not None), 0)

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, including special tokens."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def encode_all(self, texts: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the token ids of `texts`, concatenated, and the tokens of each; uses all cores."""
        # Without this, the package warns about its threads when a process is forked later.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        return _joined([encoding.ids for encoding in self._tokenizer.encode_batch(texts)])

    def describe(self) -> dict[str, Any]:
        return {"kind": "hub", "source": self.source, "content": self._tokenizer.to_str()}


Tokenizer = Vocabulary | HubTokenizer


def read_tokenizer(description: dict[str, Any]) -> Tokenizer:
    """Rebuild a tokenizer from the result of its `describe`."""
    if description["kind"] != "hub":
        return Vocabulary(**description)
    return HubTokenizer(description["source"], description["content"])


def learn_tokenizer(
    name: str, texts: Iterable[str], min_count: int | None = 1, known: DataInfo | None = None
) -> Tokenizer:
    """Return the built-in tokenizer `name` with the vocabulary of `texts`, or the one `name` refers to.

    Args:
        texts: read for a built-in tokenizer only.
        min_count: as for `Vocabulary.of`.
        known: the data of a trained model, whose tokenizer is used instead.
    """
    if known is not None:
        return tokenizer_of(known)
    return Vocabulary.of(name, texts, min_count) if name in BUILT_IN else HubTokenizer(name)


def tokenizer_of(info: DataInfo) -> Tokenizer:
    """Return the tokenizer that read the data of `info`; raise D004 if it was not text."""
    if "tokenizer" not in info.extra:
        raise DataError("D004", f"is text; the model was trained on {info.kind} data", key="data")
    return read_tokenizer(info.extra["tokenizer"])


def _joined(ids: list[list[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum())), lengths


def _cut(kind: str, text: str) -> Iterable[str]:
    return text.split() if kind == "words" else text


CACHE_FROM_CHARACTERS = 2**20
"""Shorter texts are tokenized every time, which takes less than a second."""
_FORMAT = "1"


class Encoded(NamedTuple):
    """Token ids of some texts, concatenated."""

    tokens: NDArray[np.integer]
    """uint16, or uint32 if the vocabulary is larger."""
    lengths: NDArray[np.int64]
    """Tokens of each text."""

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each text begins."""
        return np.cumsum(self.lengths) - self.lengths


def encode(texts: list[str], tokenizer: Tokenizer) -> Encoded:
    """Return the token ids of `texts`.

    Ids of more than a million characters are cached on disk, under the hash of texts and tokenizer. The first
    rank of each machine hashes and tokenizes; the others read the cached ids.

    Raises:
        DataError: D005 for a token outside a vocabulary that has no unknown token.
    """
    if sum(map(len, texts)) < CACHE_FROM_CHARACTERS:
        return encode_anew(texts, tokenizer)

    def store() -> Path:
        sha = hashlib.sha256(json.dumps([_FORMAT, tokenizer.describe()]).encode())
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            sha.update(b"%d:" % len(data))
            sha.update(data)
        path = cache_folder() / "tokens" / f"{sha.hexdigest()[:32]}.npz"
        if not load_arrays(path):
            save_arrays(path, **encode_anew(texts, tokenizer)._asdict())
        return path

    arrays = load_arrays(once_per_machine(store))
    # Nothing was stored if the cache folder cannot be written.
    return Encoded(**arrays) if arrays else encode_anew(texts, tokenizer)


def encode_anew(texts: list[str], tokenizer: Tokenizer) -> Encoded:
    """Return the token ids of `texts`, without the cache."""
    tokens, lengths = tokenizer.encode_all(texts) if texts else np.zeros((2, 0), np.int64)
    return Encoded(tokens.astype(token_type(tokenizer), copy=False), lengths)


def token_type(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
