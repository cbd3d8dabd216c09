"""Text: labeled lines for classification, and running text for language modelling."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Count
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.dataset import ReadsAsKnown, Splits
from ptfast.data.decoding.text_tokenizer import (
    Encoded,
    Tokenizer,
    encode,
    learn_tokenizer,
    read_tokenizer,
    token_type,
    tokenizer_of,
)
from ptfast.data.label_checks import describe_text_labels
from ptfast.data.map_source import MapSource
from ptfast.data.packs.pack_reader import Manifest, open_pack
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices
from ptfast.data.sampling.splits import held_out
from ptfast.data.sources.ragged_text import Documents, Numbers, labelled_texts
from ptfast.data.sources.text_files import SUFFIXES, Table, read_table
from ptfast.data.tables.columns import read_columns, read_text

_SPLITS = {"train": ("train",), "val": ("dev", "val", "valid", "validation"), "test": ("test",)}


class TextTsv(ReadsAsKnown):
    """Labeled texts: one `text<TAB>label` per line in `train.tsv`, `dev.tsv` (or `val.tsv`) and `test.tsv`.

    Files may also be `.csv`, and their first line may name the columns; see `read_table`.

    Args:
        root: folder of these files.
        path: one file instead, from which validation samples are held out.
        text, label: names of columns; several text columns are joined by a space; null to find them.
        tokenizer: `words` (at white space), `characters`, a `tokenizer.json`, or a name on the Hugging Face
            hub.
        max_length: longest text in tokens; longer ones are truncated.
        min_count: words with fewer occurrences in the training texts are unknown.

    Raises:
        DataError: D001, D002 or D005 by `load`, naming file and line.
    """

    name = "text_tsv"

    def __init__(
        self,
        root: str | None = None,
        path: str | None = None,
        text: str | list[str] | None = None,
        label: str | None = None,
        tokenizer: str = "words",
        max_length: Count = 128,
        min_count: int = 1,
    ) -> None:
        self.root, self.path = root, path
        self.text, self.label = [text] if isinstance(text, str) else text or [], label
        self.tokenizer, self.max_length, self.min_count = tokenizer, max_length, min_count

    def load(self, *, val: Duration, seed: int) -> Splits:
        rows, notes = self._rows()
        tokenizer = learn_tokenizer(self.tokenizer, rows["train"].texts, self.min_count, self.known)
        texts = {split: table.texts for split, table in rows.items()}
        labels = {split: table.labels or [] for split, table in rows.items()}
        facts, targets = describe_text_labels(labels, self.known)
        info, sources = labelled_texts(texts, targets, tokenizer, self.max_length, **facts)
        if num_long := sum(part.num_long for part in sources.values()):
            size = sum(map(len, sources.values()))
            notes.append(f"{num_long:,} of {size:,} texts are truncated to {self.max_length} tokens")
        info.extra["columns"] = rows["train"].text_names
        group, path = self.rules.group, self._files()["train"]
        groups = read_columns(path).columns.get(group) if group is not None else None
        return Splits.of(info, sources, "; ".join(notes), groups=groups)

    def _rows(self) -> tuple[dict[str, Table], list[str]]:
        """Return the texts and labels of each split, and a note on the columns they come from."""
        tables, files = dict[str, Table](), dict[str, list[str]]()
        for split, path in self._files().items():
            table = read_table(path, self.text, self.label)
            if table.labels is not None:
                tables[split] = table
            elif split != "test":
                name, hint = self.label or "label", "Set data.label to one of them"
                what = f"its first line names columns, and no {name} among them: {table.columns}"
                raise DataError("D005", what, key=f"{path}:1", suggestion=hint)
            # Benchmarks do not publish the labels of their test split.
            columns = table.columns if table.labels is not None else "no labels, so it is left out"
            files.setdefault(columns, []).append(path.name)
        return tables, [f"{', '.join(names)}: {columns}" for columns, names in files.items() if columns]

    def _files(self) -> dict[str, Path]:
        if (self.root is None) == (self.path is None):
            what = "no path is given" if self.root is None else "both data.root and data.path are given"
            hint = "Set data.root to a folder of train.tsv and dev.tsv, or data.path to one file"
            raise DataError("D001", what, key="data", suggestion=hint)
        if self.path is not None:
            return {"train": Path(self.path).expanduser()}
        root = Path(str(self.root)).expanduser()
        if not root.is_dir():
            what = "is a file, not a folder" if root.exists() else "no such folder"
            raise DataError("D001", what, key="data.root", value=root, suggestion="It must contain train.tsv")
        files = {
            split: [root / f"{stem}{suffix}" for stem in stems for suffix in SUFFIXES]
            for split, stems in _SPLITS.items()
        }
        firsts = {split: next(filter(Path.is_file, paths), None) for split, paths in files.items()}
        found = self.complete({split: path for split, path in firsts.items() if path is not None})
        if "train" not in found:
            raise DataError("D001", "contains no train.tsv or train.csv", key="data.root", value=root)
        return found


class TextFile(ReadsAsKnown):
    """Text for language modelling, from one file: running text, or documents.

    The last part of the text is held out for validation. Training windows of running text start at random
    places in the rest; each document is a sample.

    Args:
        path: a text file in UTF-8, or a pack of one, made by `ptfast pack`.
        tokenizer: `characters`, `words`, a `tokenizer.json`, or a name on the Hugging Face hub.
        context_length: tokens of a sample, at most.
        documents: `none` for running text, `lines`, or `paragraphs` separated by blank lines.

    Raises:
        DataError: D001, D002, D005 or D006 by `load`.
    """

    name = "text_file"
    splits_itself = True

    def __init__(
        self,
        path: str,
        tokenizer: str = "characters",
        context_length: Count = 128,
        documents: Literal["none", "lines", "paragraphs"] = "none",
    ) -> None:
        self.path, self.tokenizer, self.max_length = Path(path).expanduser(), tokenizer, context_length
        self.documents = documents

    def load(self, *, val: Duration, seed: int) -> Splits:
        self.rules.reject("a text has no samples to choose from", "test", "folds", "group", "fraction")
        manifest = open_pack(self.path, "data.path") if self.path.is_dir() else None
        if manifest is not None:
            tokenizer, encoded, text_bytes = self._read_packed(manifest)
        else:
            text = read_text(self.path)
            tokenizer = learn_tokenizer(self.tokenizer, [text], None, self.known)
            texts = split_documents(text, self.documents)
            # Blank lines between documents are not modeled, so they do not count.
            text_bytes = sum(len(part.encode()) for part in texts)
            encoded = encode(texts, tokenizer)
        info = DataInfo(
            kind="tokens",
            task="language_modelling",
            vocab_size=len(tokenizer),
            context_length=self.max_length,
            token_bytes=text_bytes / max(len(encoded.tokens), 1),
            extra={"tokenizer": tokenizer.describe(), "max_length": self.max_length},
        )
        if self.documents == "none":
            splits = Splits(info, *self._windows(encoded.tokens, val, seed))
        else:
            splits = self._documents(info, encoded, val)
        if manifest is not None:
            for source in splits.sources.values():
                source.storage = "pack"
            facts = describe_part(len(encoded.tokens), "tokens", manifest.files["text.bin"][1])
            splits = replace(splits, contents=lambda: {"train": facts})
        return splits

    def _read_packed(self, manifest: Manifest) -> tuple[Tokenizer, Encoded, int]:
        """Return the tokenizer, the tokens and the number of text bytes of a pack."""
        text, known = manifest.text, self.known
        if text is None:
            hint = f"Use data=imagefolder data.root={self.path}"
            raise DataError("D001", "is a pack of images", key="data.path", value=self.path, suggestion=hint)
        for key, wanted, packed in (
            ("tokenizer", None if known else self.tokenizer, text.tokenizer),
            ("documents", self.documents, text.documents),
        ):
            if wanted not in (None, packed):
                what = f"the pack was made with {key}={packed}"
                hint = f"Use data.{key}={packed}, or pack anew"
                raise ConfigError("C011", what, key=f"data.{key}", value=wanted, suggestion=hint)
        if known is not None and tokenizer_of(known).describe() != text.description:
            hint = f"Use data.path={manifest.source.path}"
            what = "was packed with another vocabulary than the model has"
            raise DataError("D004", what, key="data.path", value=self.path, suggestion=hint)
        # Copy on write, because torch has no read-only tensors.
        tokenizer = read_tokenizer(text.description)
        dtype = token_type(tokenizer).newbyteorder("<")
        tokens = np.memmap(self.path / "text.bin", dtype, "c").view(np.ndarray)
        lengths = np.fromfile(self.path / "text.index", "<i8")
        if self.documents == "none":
            lengths = lengths.sum(keepdims=True)
        return tokenizer, Encoded(tokens, lengths), text.text_bytes

    def _windows(self, tokens: Numbers, val: Duration, seed: int) -> tuple[MapSource, MapSource | None]:
        context = self.max_length
        num_windows = (len(tokens) - 1) // context
        if num_windows < 1:
            what = f"has {len(tokens):,} tokens, fewer than one sample of data.context_length={context} takes"
            hint = "Use a shorter context_length"
            raise DataError("D006", what, key="data.path", value=self.path, suggestion=hint)
        num_val = held_out(num_windows, val)
        end = len(tokens) - num_val * context
        if end <= context:
            raise DataError("D006", "leaves no training text", key="data.val", value=val)
        # Start one token early, as the first input: targets are shifted by one token.
        val_windows = Windows(tokens[end - 1 :], context) if num_val else None
        return Windows(tokens[:end], context, seed), val_windows

    def _documents(self, info: DataInfo, texts: Encoded, val: Duration) -> Splits:
        size = len(texts.lengths)
        first = size - held_out(size, val)
        end = int(texts.lengths[:first].sum())
        parts = [Documents(Encoded(texts.tokens[:end], texts.lengths[:first]), 0, self.max_length)]
        if first < size:
            parts.append(Documents(Encoded(texts.tokens[end:], texts.lengths[first:]), 0, self.max_length))
        for part, key in zip(parts, ("data.path", "data.val"), strict=False):
            if not len(part):
                what = (
                    "contains no document of two tokens or more" if key == "data.path" else "holds none out"
                )
                raise DataError("D006", what, key=key, value=self.path if key == "data.path" else val)
        note = ""
        if num_long := sum(part.num_long for part in parts):
            note = f"{num_long:,} of {size:,} documents are split into parts of {self.max_length} tokens"
        return Splits(info, *parts, note=note)


def split_documents(text: str, documents: str) -> list[str]:
    """Split a text into its non-empty documents; each keeps its final line end."""
    if documents == "none":
        return [text]
    boundary = r"(?<=\n)" if documents == "lines" else r"(?<=\n)(?:[ \t\r]*\n)+"
    return [document for document in re.split(boundary, text) if document.strip()]


class Windows(MapSource):
    """Windows of running text: `(inputs, targets)`, with targets shifted by one token.

    With `seed`, every epoch draws a new place for each window; without it, windows follow one another.
    """

    columns = ("_numbers",)
    storage = "memory"

    def __init__(self, tokens: Numbers, context_length: int, seed: int | None = None) -> None:
        self._tokens, self._context, self._seed = tokens, context_length, seed
        self._numbers = np.arange((len(tokens) - 1) // context_length)
        self._places = np.arange(context_length + 1)

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        numbers, context = self._numbers[indices], self._context
        if self._seed is None:
            starts = numbers * context
        else:
            places = len(self._tokens) - context
            starts = counter_draws.integers(self._seed, epoch, numbers, counter_draws.WINDOW, places)
        windows = self._tokens[starts[:, None] + self._places]
        windows = torch.from_numpy(windows.astype(np.int64, copy=False))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def in_order(self) -> Windows:
        return Windows(self._tokens, self._context)

    def contents(self) -> list[Any]:
        return describe_part(len(self._tokens), "tokens", self._tokens)
