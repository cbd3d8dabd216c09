"""Images named in a CSV or Parquet file, with their labels in other columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError, name_some
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Count
from ptfast.data.data_fingerprint import describe_part, size_and_time
from ptfast.data.dataset import ReadsAsKnown, Splits
from ptfast.data.decoding.image_decoding import SUFFIXES
from ptfast.data.sources.image_files import ImageFiles, OnCorrupt, set_shapes
from ptfast.data.sources.text_files import LABELS
from ptfast.data.tables.columns import Rows, read_splits
from ptfast.data.tables.preparation import Facts, read_targets

_IMAGES = (
    "image",
    "image_path",
    "image_id",
    "img",
    "path",
    "file",
    "filename",
    "file_name",
    "filepath",
    "id",
)


class ListedFiles(ImageFiles):
    """Images named in a list file."""

    def contents(self) -> list[Any]:
        sizes = np.array([size_and_time(path)[0] for path in self.paths], np.int64)
        return describe_part(
            len(self), "images", *(Path(p).name for p in self.paths), sizes, self.targets.numpy()
        )


class ImageList(ReadsAsKnown):
    """Images named in a file as on Kaggle: one row per image, with columns for the image and its label.

    Args:
        path: `.csv` or `.tsv` whose first line names the columns, or `.parquet`.
        root: the folder that the names are relative to; null for the folder of `path`.
        image: the column of the image's name; null to find it.
        label: column of the label, or several columns: of 0 and 1 for multi-label, or of numbers to predict
            together; null to find it.
        extension: appended to names that have none, such as `.jpg`.
        image_size: side in pixels that images are brought to: shorter side resized, center cropped. None if
            all have one size.
        val_path, test_path: files of the same columns; without the first, `data.val` of the rows is held out.
        on_corrupt: `error` stops at the first file that cannot be decoded; `skip` leaves such files out.

    Raises:
        ConfigError: C011 for `on_corrupt=skip` unless targets are classes: others have no ignored label.
        DataError: D001 to D005 by `load`, naming the file and the row.
    """

    name = "image_list"

    def __init__(
        self,
        path: str,
        root: str | None = None,
        image: str | None = None,
        label: str | Sequence[str] | None = None,
        extension: str = "",
        image_size: Count | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        on_corrupt: OnCorrupt = "error",
    ) -> None:
        self.paths = {"train": path, "val": val_path, "test": test_path}
        self.root = Path(path).expanduser().parent if root is None else Path(root).expanduser()
        self.image, self.labels = image, [label] if isinstance(label, str) else label
        self.extension, self.image_size = extension, image_size
        self.on_corrupt: OnCorrupt = on_corrupt

    def load(self, *, val: Duration, seed: int) -> Splits:
        rows = read_splits(self.paths)
        image, labels = self._columns(rows["train"])
        notes, paths = [f"image from {image}, label from {' and '.join(labels)}"], dict[str, list[str]]()
        for split, each in rows.items():
            each.check("data.image", image)
            each.check("data.label", *labels)
            rows[split], note = _without_repeats(each, image, labels)
            notes += [note] * bool(note)
            paths[split] = self._paths(rows[split], image)
        facts, targets = self._targets(rows, labels)
        groups = rows["train"].columns.get(self.rules.group or "")
        if self.on_corrupt == "skip" and facts["task"] != "classification":
            what, hint = "needs classes: other labels have no ignored value", "Use data.on_corrupt=error"
            raise ConfigError("C011", what, key="data.on_corrupt", value="skip", suggestion=hint)
        sources = {
            split: ListedFiles(paths[split], targets[split], self.image_size, self.on_corrupt)
            for split in rows
        }
        shape = set_shapes(sources)
        info = DataInfo(kind="image", input_shape=shape, in_channels=shape[0], **facts)
        return Splits.of(info, sources, "; ".join(notes), groups=groups)

    def _columns(self, rows: Rows) -> tuple[str, Sequence[str]]:
        """Return the image and label columns: as configured, or found by name or position."""
        names = [*rows.columns]
        lower = {name.lower(): name for name in reversed(names)}
        image = self.image or next((lower[name] for name in _IMAGES if name in lower), None)
        labels = self.labels or [name for name in names if name.lower() in LABELS][:1]
        if len(names) == 2:
            image = image or next((name for name in names if name not in labels), None)
            labels = labels or [name for name in names if name != image]
        if image is None or not labels:
            what = f"which of its columns contain the image and the label is unclear: {name_some(names, 10)}"
            hint = "Set data.image and data.label to two of them"
            raise DataError("D005", what, key="data.path", value=rows.file, suggestion=hint)
        return image, labels

    def _paths(self, rows: Rows, image: str) -> list[str]:
        """Return the file of each row; raise D005 for missing files unless they are skipped."""
        paths, missing = list[str](), list[int]()
        for row, value in zip(rows.numbers, rows.columns[image], strict=True):
            name = str(value or "").strip()
            if self.extension and not name.lower().endswith(SUFFIXES):
                name += self.extension
            paths.append(str(self.root / name))
            if not name or not Path(paths[-1]).exists():
                missing.append(row)
        if missing and (self.on_corrupt == "error" or len(missing) == len(paths)):
            first = paths[[*rows.numbers].index(missing[0])]
            what = f"{len(missing):,} of {len(paths):,} images are not there, the first is {first}"
            hint = "Set data.root to their folder" + ("" if self.extension else ", or data.extension=.jpg")
            raise DataError("D005", what, key=f"{rows.file}:{missing[0]}", suggestion=hint)
        return paths

    def _targets(self, rows: Mapping[str, Rows], labels: Sequence[str]) -> tuple[Facts, dict[str, Tensor]]:
        if len(labels) == 1:
            return read_targets(rows, labels[0], key="data.label", task=self.task, known=self.known)
        columns = [read_targets(rows, name, key="data.label", task="regression") for name in labels]
        for name, (facts, _) in zip(labels, columns, strict=True):
            if facts["task"] != "regression":
                what = "several columns of labels contain numbers, and this one contains names"
                raise DataError("D004", what, key="data.label", value=name)
        targets = {split: torch.stack([found[split] for _, found in columns], 1) for split in rows}
        ones = all(bool(((each == 0) | (each == 1)).all()) for each in targets.values())
        facts: Facts = {
            "task": "regression",
            "task_reason": "several columns of numbers",
            "num_classes": len(labels),
        }
        if ones and self.task != "regression":
            facts |= {"task": "multilabel", "task_reason": "several columns of 0 and 1"}
            facts["class_names"] = tuple(labels)
        return facts, targets


def _without_repeats(rows: Rows, image: str, labels: Sequence[str]) -> tuple[Rows, str]:
    """Return the rows without duplicates, and a note on them.

    Raises:
        DataError: D004 for an image with two labels.
    """
    seen, kept = dict[str, tuple[int, tuple[Any, ...]]](), list[int]()
    for place, (row, name) in enumerate(zip(rows.numbers, rows.columns[image], strict=True)):
        given = tuple(rows.columns[label][place] for label in labels)
        first = seen.setdefault(str(name), (row, given))
        if first[1] != given:
            what = f"{name} has another label in row {first[0]}"
            raise DataError("D004", what, key=f"{rows.file}:{row}", suggestion="Keep one of the two rows")
        if first[0] == row:
            kept.append(place)
    if len(kept) == len(rows.numbers):
        return rows, ""
    return rows.take(kept), f"{len(rows.numbers) - len(kept):,} repeated rows are left out"
