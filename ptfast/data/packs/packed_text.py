"""Text of a pack: token ids, memory-mapped, in place of a file that is tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo
from ptfast.data.decoding.encoded_text import Encoded
from ptfast.data.decoding.text_tokenizer import Tokenizer, read_tokenizer, tokenizer_of
from ptfast.data.packs.pack_reader import Manifest


class Tokenized(NamedTuple):
    """A text in tokens."""

    tokenizer: Tokenizer
    texts: Encoded
    text_bytes: int
    checksums: tuple[str, ...] | None
    """Of the pack that the tokens lie in; None where they do not."""


def read_packed_text(
    folder: Path, manifest: Manifest, *, tokenizer: str, documents: str, known: DataInfo | None
) -> Tokenized:
    """The tokens in `folder`, which is all that is left of the text.

    Args:
        tokenizer, documents: as the config has them; they must be those of the pack.
        known: of a model that has a vocabulary already.

    Raises:
        ConfigError: C011 where the pack was made otherwise.
        DataError: D001 for a pack of images, D004 for one whose vocabulary is not the model's.
    """
    text = manifest.text
    if text is None:
        hint = f"Use data=imagefolder data.root={folder}"
        raise DataError("D001", "is a pack of images", key="data.path", value=folder, suggestion=hint)
    for key, wanted, packed in (
        ("tokenizer", None if known else tokenizer, text.tokenizer),
        ("documents", documents, text.documents),
    ):
        if wanted not in (None, packed):
            what, hint = f"the pack was made with {key}={packed}", f"Use data.{key}={packed}, or pack anew"
            raise ConfigError("C011", what, key=f"data.{key}", value=wanted, suggestion=hint)
    if known is not None and tokenizer_of(known).describe() != text.description:
        hint = f"Use data.path={manifest.source.path}"
        what = "was packed with another vocabulary than the model has"
        raise DataError("D004", what, key="data.path", value=folder, suggestion=hint)
    # Writable to this process alone, since torch knows no other arrays.
    tokens = np.memmap(folder / "text.bin", np.dtype(text.dtype).newbyteorder("<"), "c").view(np.ndarray)
    lengths = np.fromfile(folder / "text.index", "<i8")
    if documents == "none":
        lengths = lengths.sum(keepdims=True)
    checksums = tuple(each.sha256 for each in manifest.splits["text"].parts)
    return Tokenized(read_tokenizer(text.description), Encoded(tokens, lengths), text.text_bytes, checksums)
