"""Targets of every pixel of an image: recognised, counted, checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from torch import Tensor

from ptfast.core.errors import DataError
from ptfast.data.dataset import Source, Splits
from ptfast.data.label_checks import check_labels, holds, is_ignored
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.streams.iterable import IterableSource

SCANNED = 2000
"""Masks that are read to find the classes, where the data set does not say how many there are."""
_AT_ONCE = 32
_VOID = 255
"""The byte that masks often have for pixels that do not count, and for all that is no background."""

TargetKind = Literal["whole", "mask", "map", "unknown"]


def kind_of_target(labels: Tensor, input_shape: Sequence[int], task: str) -> TargetKind:
    """The kind of a target, as `DataInfo.target_kind`.

    Args:
        labels: of some samples or of all, first dimension samples.
        input_shape: of one input; (channels, height, width) of an image.
        task: that the labels are known to be for, or `auto`.
    """
    shape = tuple(labels.shape[1:])
    pixels = tuple(input_shape[1:])
    if len(input_shape) == 3 and shape in (pixels, (1, *pixels)):
        return "map" if labels.is_floating_point() or task == "regression" else "mask"
    if math.prod(shape) == 1 or task in ("classification", "multilabel"):
        return "whole"
    ones = len(shape) == 1 and not labels.is_floating_point() and bool(((labels == 0) | (labels == 1)).all())
    return "whole" if ones or len(input_shape) != 3 else "unknown"


def with_masks(splits: Splits, ignore_index: int) -> Splits:
    """Splits of masks with their classes counted and checked.

    Args:
        ignore_index: the label of pixels that do not count.
    """
    info = replace(splits.info, ignore_index=ignore_index)
    if info.num_classes is None:
        info = replace(info, num_classes=_count(splits.train, ignore_index))
    for split, source in splits.sources.items():
        if isinstance(source, TensorSource):
            if info.task == "semantic_segmentation":
                check_labels(source.targets, info.num_classes or 1, split, ignore_index)
        elif info.task == "semantic_segmentation":
            # Nobody has seen them all: they are checked as they are read.
            source.num_classes, source.ignore_index = info.num_classes, ignore_index
    return splits._replace(info=info)


def _count(source: Source, ignore_index: int) -> int:
    """One more than the highest label of up to 2,000 masks that are spread over the whole."""
    if isinstance(source, IterableSource):
        what, hint = "iterable data must say how many classes there are", "Give it an attribute num_classes"
        raise DataError("D004", what, key="data", suggestion=hint)
    highest = below = 0
    for masks in _some(source):
        counted = masks.masked_fill(is_ignored(masks, ignore_index), 0)
        highest = max(highest, int(counted.max()))
        if holds(masks.dtype, _VOID):
            below = max(below, int(counted.masked_fill(counted == _VOID, 0).max()))
    if highest == _VOID and below < _VOID - 1:
        what = f"labels of pixels go up to {below}, except for {_VOID}"
        hint = f"Set task.ignore_index={_VOID} if such pixels do not count, or number the classes from 0"
        raise DataError("D004", what, key="data", suggestion=hint)
    return highest + 1


def _some(source: MapSource) -> Iterator[Tensor]:
    places = np.unique(np.linspace(0, len(source) - 1, min(len(source), SCANNED)).astype(np.int64))
    for chunk in np.array_split(places, -(-len(places) // _AT_ONCE)):
        if isinstance(source, TensorSource):
            yield source.targets.index_select(0, as_tensor(chunk))
        else:
            yield source.fetch(chunk)[1]
