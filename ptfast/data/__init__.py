"""Data, from files to batches on the device."""

from __future__ import annotations

from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.sections.coerce import InUnit
from ptfast.core.sections.section import Count, TargetSection
from ptfast.core.sections.targets import Target


class DataSection(TargetSection):
    """The dataset, and the share of it that is held out."""

    val: Annotated[Duration, InUnit("samples", ("percent", "samples"))] = Duration(10, "percent")
    """The share held out for validation where the data has no such split: `10%`, `500samples` or 0."""
    normalize: bool = True
    """Bring inputs to mean 0 and standard deviation 1 of the training data."""
    collate: Target | None = None
    """Import path of a function of a list of samples that makes a batch; null for the dataset's own."""
    shuffle_buffer: Count | None = None
    """Samples among which the next one of a stream is drawn; null to keep their order."""


def panel(data: DataSection) -> dict[str, object]:
    """The shuffle buffer, for the panel."""
    size = data.shuffle_buffer
    return {"shuffling": f"each sample is drawn out of {size:,} that lie together" if size else None}
