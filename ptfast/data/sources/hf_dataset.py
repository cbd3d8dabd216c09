"""A Hugging Face dataset, by its name on the hub or from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, import_extra
from ptfast.core.sections.section import Count
from ptfast.data.dataset import ReadsAsKnown, Splits, image_info
from ptfast.data.decoding.image_decoding import Pixels, decode, fit, in_threads, read_file
from ptfast.data.decoding.text_tokenizer import learn_tokenizer
from ptfast.data.label_checks import check_labels
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sources.class_folders import splits_among
from ptfast.data.sources.ragged_text import labelled_texts

_GUESSES = {
    "text": ("text", "sentence"),
    "image": ("image", "img"),
    "label": ("label", "labels", "fine_label"),
}


class HfDataset(ReadsAsKnown):
    """Text or image classification from a dataset of the package `datasets`, held in memory.

    Args:
        path: name on the hub, or a folder: written by `save_to_disk`, or of data files.
        name: configuration of the dataset, where it has several.
        text, image, label: columns; found by their usual names if not given.
        tokenizer: of texts: `words`, `characters`, a `tokenizer.json`, or a name on the hub.
        max_length: tokens that are kept of a text.
        image_size: side that images are brought to; None where all have one size.

    Raises:
        MachineError: E004 by `load` if the package is not installed.
        DataError: D001 if there is no such dataset, D005 for one without the columns; by `load`.
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
    ) -> None:
        self.path, self.config = path, name
        self.columns = {"text": text, "image": image, "label": label}
        self.tokenizer, self.max_length, self.image_size = tokenizer, max_length, image_size

    def load(self, *, val: Duration, seed: int) -> Splits:
        splits = self._splits()
        train = splits["train"]
        columns: dict[str, str | None] = {}
        for role, guesses in _GUESSES.items():
            wanted = self.columns[role]
            if wanted is not None and wanted not in train.column_names:
                what = f"no such column; there are {', '.join(train.column_names)}"
                raise DataError("D005", what, key=f"data.{role}", value=wanted)
            columns[role] = wanted or next((name for name in guesses if name in train.column_names), None)
        label = columns["label"]
        if label is None or (columns["text"] is None and columns["image"] is None):
            what = f"has columns {', '.join(train.column_names)}; it is unclear which hold inputs and labels"
            hint = "Set data.label, and data.text or data.image"
            raise DataError("D005", what, key="data.path", value=self.path, suggestion=hint)
        names = getattr(train.features[label], "names", None)
        labels = {split: as_tensor(np.asarray(part[label], np.int64)) for split, part in splits.items()}
        if names is not None and bool((labels.get("test", labels["train"]) == -1).all()):
            # Benchmarks do not publish the labels of their test split.
            labels.pop("test", None)
            splits.pop("test", None)
        num_classes = len(names) if names is not None else int(labels["train"].max()) + 1
        for split, numbers in labels.items():
            check_labels(numbers, num_classes, split)
        names = tuple(names) if names is not None else None
        if columns["text"] is not None:
            texts = {split: list(part[columns["text"]]) for split, part in splits.items()}
            tokenizer = learn_tokenizer(self.tokenizer, texts["train"], known=self.known)
            info, sources = labelled_texts(
                texts, labels, tokenizer, self.max_length, num_classes=num_classes, class_names=names
            )
        else:
            shape, sources = self._images(splits, labels, str(columns["image"]))
            info = image_info(shape, class_names=names, num_classes=num_classes)
        return Splits.of(info, sources)

    def _splits(self) -> dict[str, Any]:
        datasets = import_extra("datasets", "hf", "data", "hf")
        try:
            local = Path(self.path).expanduser()
            if (local / "dataset_dict.json").is_file() or (local / "dataset_info.json").is_file():
                loaded = datasets.load_from_disk(str(local))
            else:
                loaded = datasets.load_dataset(self.path, self.config)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError("D001", f"cannot be loaded: {reason}", key="data.path", value=self.path) from None
        if not isinstance(loaded, dict):
            return {"train": loaded}
        found = {split: loaded[name] for split, name in splits_among(loaded).items()}
        if "train" not in found:
            what = f"has no train split, only {', '.join(loaded)}"
            raise DataError("D002", what, key="data.path", value=self.path)
        return found

    def _images(
        self, splits: dict[str, Any], labels: dict[str, Any], column: str
    ) -> tuple[tuple[int, ...], dict[str, MapSource]]:
        sources: dict[str, MapSource] = {}
        height = width = 0
        for split, part in splits.items():
            images = self._decoded(part, split, column)
            if len({image.shape for image in images}) > 1:
                what, hint = "its images differ in size", "Bring all to one size with data.image_size=32, say"
                raise DataError("D005", what, key="data.path", value=self.path, suggestion=hint)
            height, width = images[0].shape[:2]
            sources[split] = TensorSource(torch.from_numpy(np.stack(images)), labels[split], images=True)
        return (3, height, width), sources

    def _decoded(self, part: Any, split: str, column: str) -> list[Pixels]:
        """The images of a split, decoded from the bytes of their files as all other images are."""
        kind = import_extra("datasets", "hf", "data", "hf").Image
        if not isinstance(part.features[column], kind):
            what = f"holds {part.features[column]}, not images"
            raise DataError("D005", what, key="data.image", value=column)
        files = part.cast_column(column, kind(decode=False))[column]

        def decoded(row: int) -> Pixels:
            file, name = files[row] or {}, f"{self.path}, row {row:,} of {split}"
            content = read_file(file["path"]) if file.get("path") and not file["bytes"] else file.get("bytes")
            pixels = decode(content or b"", name).pixels
            return pixels if self.image_size is None else fit(pixels, self.image_size)

        return in_threads(len(files), decoded)
