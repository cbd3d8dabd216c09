"""A Hugging Face dataset, by its name on the hub or from a local folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError, described, import_extra
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Count
from ptfast.data.dataset import ReadsAsKnown, Splits, image_info
from ptfast.data.decoding.image_decoding import Pixels, decode, fit, in_threads, read_file
from ptfast.data.decoding.text_tokenizer import BUILT_IN, Encoded, learn_tokenizer
from ptfast.data.label_checks import as_classes, check_labels, describe_text_labels, infer_task
from ptfast.data.map_source import TensorSource
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.sources.class_folders import splits_among
from ptfast.data.sources.ragged_text import TextSource, labelled_texts
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.row_windows import augmented

_GUESSES = {
    "text": ("text", "sentence"),
    "image": ("image", "img"),
    "label": ("label", "labels", "fine_label"),
}


class HfDataset(ReadsAsKnown):
    """Text or image classification from a dataset of the package `datasets`, kept in memory or streamed.

    Args:
        path: name on the hub, or a folder: written by `save_to_disk`, or of data files.
        name: configuration of the dataset, if it has several.
        text, image, label: name of the column; null to find it by its usual names.
        tokenizer: for texts: `words`, `characters`, a `tokenizer.json`, or a name on the hub.
        max_length: longest text in tokens; longer texts are truncated.
        image_size: side that images are brought to; null if all have one size.
        streaming: read rows in order during training.
        classes: for a stream: names or number of the classes, unless the label column has them.

    Raises:
        MachineError: E004 by `load` if the package is not installed.
        DataError: D001 if there is no such dataset, D005 if columns are missing; by `load`.
    """

    name = "hf"

    def __init__(
        self,
        path: str,
        name: str | None = None,
        text: str | None = None,
        image: str | None = None,
        label: str | None = None,
        tokenizer: str = "words",
        max_length: Count = 128,
        image_size: Count | None = None,
        streaming: bool = False,
        classes: int | list[str] | None = None,
    ) -> None:
        self.path, self.config = path, name
        self.columns = {"text": text, "image": image, "label": label}
        self.tokenizer, self.max_length, self.image_size = tokenizer, max_length, image_size
        self.streaming, self.classes = streaming, classes

    def load(self, *, val: Duration, seed: int) -> Splits:
        splits = self._splits()
        columns = self._columns(splits["train"])
        label = columns["label"]
        if self.streaming:
            return self._streams(splits, columns, seed)
        labels, note = dict[str, list[Any]](), ""
        for split, part in splits.items():
            labels[split] = list(part[label]) if label in part.column_names else [None]
        if all(each is None or each == -1 for each in labels.get("test", [0])):
            # Benchmarks do not publish the labels of their test split.
            del labels["test"], splits["test"]
            note = "test has no labels, so it is left out"
        names = {split: getattr(part.features.get(label), "names", None) for split, part in splits.items()}
        facts, targets = describe_labels(labels, names, self.known, f"data.label={label}")
        column = str(columns["text"] or columns["image"])
        if split := next((split for split, part in splits.items() if column not in part.column_names), None):
            what = f"has no column {column} in its {split} split"
            raise DataError("D005", what, key="data.path", value=self.path)
        if columns["text"] is not None:
            texts = {split: _texts(part[column], column, split) for split, part in splits.items()}
            tokenizer = learn_tokenizer(self.tokenizer, texts["train"], known=self.known)
            info, sources = labelled_texts(texts, targets, tokenizer, self.max_length, **facts)
        else:
            found = {s: self._decoded(self._files(part, column)[column], s) for s, part in splits.items()}
            sources = {split: TensorSource(own, targets[split], images=True) for split, own in found.items()}
            info = DataInfo("image", input_shape=(3, *found["train"].shape[1:3]), in_channels=3, **facts)
        group = self.rules.group
        groups = splits["train"][group] if group in splits["train"].column_names else None
        return Splits.of(info, sources, note, classes_from="a column of ClassLabel", groups=groups)

    def _streams(self, parts: dict[str, Any], columns: dict[str, str | None], seed: int) -> Splits:
        """Return splits whose rows are read and decoded on demand."""
        label, column = str(columns["label"]), str(columns["text"] or columns["image"])
        stated = getattr(parts["train"].features[label], "names", None) or self.classes
        if stated is None:
            what, hint = "is needed, because labels of a stream are not read beforehand", "Set data.classes=2"
            raise ConfigError("C016", what, key="data.classes", suggestion=f"{hint}, or the list of names")
        if columns["text"] and self.tokenizer in BUILT_IN and self.known is None:
            what, hint = "needs all texts, and a stream is not read beforehand", "Name a tokenizer.json"
            raise ConfigError("C011", what, key="data.tokenizer", value=self.tokenizer, suggestion=hint)
        classes = tuple(map(str, range(stated) if isinstance(stated, int) else stated))
        tokenizer = learn_tokenizer(self.tokenizer, (), known=self.known) if columns["text"] else None
        decode = partial(self._batch, column, label, classes, tokenizer)
        parts = parts if tokenizer else {split: self._files(part, column) for split, part in parts.items()}
        sources = {split: HfStream(part, seed) for split, part in parts.items()}
        for source in sources.values():
            source.dataset.shared_by, source.decode, source.images = "none", decode, tokenizer is None
        if tokenizer is None:
            info = image_info((3, *decode([sources["train"].first[0]])[0].shape[1:3]), class_names=classes)
        else:
            facts = {"task": "classification", "num_classes": len(classes), "class_names": classes}
            info, _ = labelled_texts({}, {}, tokenizer, self.max_length, **facts)
        return Splits.of(info, sources, "its rows are read as training asks for them")

    def _batch(self, column: str, label: str, classes: Sequence[Any], tokenizer: Any, rows: list[Any]) -> Any:
        """Return the inputs and targets of a stream's rows."""
        where, inputs, labels = "a batch,", [row[column] for row in rows], [row[label] for row in rows]
        labels = [classes.index(each) if each in classes else each for each in labels]
        targets = _numbers(labels, where, f"data.label={label}")
        check_labels(targets, len(classes), where)
        if tokenizer is None:
            return self._decoded(inputs, where), targets
        # Encode in one thread: the threads of `tokenizers` do not survive a fork.
        ids = [np.array(tokenizer.encode(text), np.uint32) for text in _texts(inputs, column, where)]
        texts = Encoded(np.concatenate(ids), np.array([*map(len, ids)]))
        return TextSource(texts, targets, tokenizer.pad_id, self.max_length).fetch(np.arange(len(rows)))

    def _columns(self, train: Any) -> dict[str, str | None]:
        """Return the text, image and label columns; text or image may be None."""
        columns: dict[str, str | None] = {}
        for role, guesses in _GUESSES.items():
            wanted = self.columns[role]
            if wanted is not None and wanted not in train.column_names:
                what = f"no such column; there are {', '.join(train.column_names)}"
                raise DataError("D005", what, key=f"data.{role}", value=wanted)
            columns[role] = wanted or next((name for name in guesses if name in train.column_names), None)
        if columns["label"] is None or (columns["text"] is None and columns["image"] is None):
            what = (
                f"has columns {', '.join(train.column_names)}; it is unclear which contain inputs and labels"
            )
            hint = "Set data.label, and data.text or data.image"
            raise DataError("D005", what, key="data.path", value=self.path, suggestion=hint)
        return columns

    def _splits(self) -> dict[str, Any]:
        datasets = import_extra("datasets", "hf", "data", "hf")
        try:
            local = Path(self.path).expanduser()
            if (local / "dataset_dict.json").is_file() or (local / "dataset_info.json").is_file():
                loaded = datasets.load_from_disk(str(local))
            else:
                loaded = datasets.load_dataset(self.path, self.config, streaming=self.streaming)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError("D001", f"cannot be loaded: {reason}", key="data.path", value=self.path) from None
        if not isinstance(loaded, dict):
            loaded = {"train": loaded}
        found = self.complete({split: loaded[name] for split, name in splits_among(loaded).items()})
        if "train" not in found:
            what = f"has no train split, only {', '.join(loaded)}"
            raise DataError("D002", what, key="data.path", value=self.path)
        for split, part in found.items():
            if not self.streaming and not len(part):
                raise DataError("D002", f"its {split} split has no rows", key="data.path", value=self.path)
        return found

    def _files(self, part: Any, column: str) -> Any:
        """Return a split whose images are left encoded."""
        kind = import_extra("datasets", "hf", "data", "hf").Image
        if not isinstance(part.features[column], kind):
            what = f"contains {part.features[column]}, not images"
            raise DataError("D005", what, key="data.image", value=column)
        return part.cast_column(column, kind(decode=False))

    def _decoded(self, files: Sequence[Any], split: str) -> Tensor:
        """Decode image files with ptfast's decoder, not with `datasets`: (rows, height, width, 3)."""

        def decoded(row: int) -> Pixels:
            file, name = files[row] or {}, f"{self.path}, row {row:,} of {split}"
            content = read_file(file["path"]) if file.get("path") and not file["bytes"] else file.get("bytes")
            pixels = decode(content or b"", name).pixels
            return pixels if self.image_size is None else fit(pixels, self.image_size)

        images = in_threads(len(files), decoded)
        if len({image.shape for image in images}) > 1:
            what, hint = "its images differ in size", "Bring all to one size with data.image_size=32, say"
            raise DataError("D005", what, key="data.path", value=self.path, suggestion=hint)
        return torch.from_numpy(np.stack(images))


class HfStream(IterableSource):
    """A stream of rows of `datasets`; the process that makes a batch decodes its rows."""

    shares_batches = True

    dataset: Any
    decode: Callable[[list[Any]], Any]

    def batch(self, samples: list[Any], micro_batch: MicroBatchIndices, augment: Augment) -> Any:
        raw = self.decode(samples)
        return augmented(augment, raw, micro_batch) if augment else raw


def describe_labels(
    labels: Mapping[str, list[Any]],
    names: Mapping[str, Sequence[str] | None],
    known: DataInfo | None,
    key: str,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `DataInfo` facts shown by the labels, and the targets of each split.

    Args:
        names: class names of splits whose labels are numbers; each split may number them differently.
        known: the data of a trained model, whose classes are used.
        key: name of the labels in error messages.
    """
    for split, own in labels.items():
        row = next((row for row, each in enumerate(own) if each is None or each != each), None)
        if row is not None:
            hint = "Leave out samples without a label"
            raise DataError("D004", f"{split} row {row:,} has no label", key=key, suggestion=hint)
    if names["train"] or isinstance(labels["train"][0], str):
        if known is None and names["train"]:
            known = DataInfo("text", "classification", class_names=tuple(names["train"]))
        texts: dict[str, list[str]] = {}
        for split, own in labels.items():
            numbered = names[split] or names["train"]
            if numbered and not isinstance(own[0], str):
                check_labels(_numbers(own, split, key), len(numbered), split)
                own = [numbered[label] for label in own]
            texts[split] = [str(label) for label in own]
        return describe_text_labels(texts, known)
    targets = {split: _numbers(own, split, key) for split, own in labels.items()}
    train = targets["train"]
    task, reason = infer_task(train, "whole")
    for split, own in targets.items():
        if own.shape[1:] != train.shape[1:]:
            raise DataError("D004", f"{split} has labels of another shape than train", key=key)
        if own.dtype != train.dtype:
            targets[split] = own.float() if train.is_floating_point() else as_classes(own, f"{split} row")
    outputs = train.shape[1] if train.dim() > 1 else 1
    num_classes = None if task == "classification" else outputs
    return {"task": task, "task_reason": reason, "num_classes": num_classes}, targets


def _numbers(labels: list[Any], split: str, key: str) -> Tensor:
    """Return labels as int64 or float32: one number or a row of numbers each."""
    try:
        array = np.asarray(labels)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf" or array.ndim > 2:
        odd = next((each for each in labels if not isinstance(each, (bool, int, float))), labels[0])
        what = f"{split} labels are no numbers or rows of equally many (such as {described(odd)})"
        hint = "Name another column with data.label, or bring a dataset of your own with data=custom"
        raise DataError("D004", what, key=key, suggestion=hint)
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _texts(column: Any, name: str, split: str) -> list[str]:
    """Return the texts of a column; words in a list are joined by spaces."""
    texts: list[str] = []
    for row, text in enumerate(column):
        if isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text):
            text = " ".join(text)
        if not isinstance(text, str):
            what = f"{split} row {row:,} contains {described(text)}, not a text"
            hint = "Leave out such rows, or name another column with data.text"
            raise DataError("D005", what, key="data.text", value=name, suggestion=hint)
        texts.append(text)
    return texts
