"""Data, from files to batches on the device."""

from __future__ import annotations

from typing import Annotated, Literal

from ptfast.core.durations import Duration
from ptfast.core.sections.coerce import POSITIVE, InUnit, Range
from ptfast.core.sections.section import Count, Natural, TargetSection
from ptfast.core.sections.targets import Target

MIXTURE = "ptfast.data.mixture.Mixture"
Amount = Annotated[Duration, InUnit("samples", ("percent", "samples"))]
SPLIT_KEYS = ("test", "split", "group", "folds", "fold", "fraction", "overfit")
"""Keys that are passed to a user's dataset if it has such parameters, like torchvision's `split`."""


class DataSection(TargetSection):
    """The dataset, and the part of it that is held out."""

    val: Amount = Duration(10, "percent")
    """The share held out for validation if the data has no such split: `10%`, `500samples` or 0."""
    test: Amount | None = None
    """The share held out for a test at the end of the run: `10%` or `500samples`. Folds leave it out."""
    split: Literal["auto", "stratified", "random", "grouped"] = "auto"
    """Hold out a share of each class, random samples or whole groups; `auto` goes by the data."""
    group: str | None = None
    """Keep groups in one split: by a column, an attribute of the dataset, or a pattern in file paths."""
    folds: Annotated[int, Range(2)] | None = None
    """Parts for cross-validation, of which `fold` is held out in place of `val`."""
    fold: Natural | None = None
    """The part that is held out, counted from 0."""
    fraction: Annotated[Amount, POSITIVE] | None = None
    """Training samples to use, the same share of each class: `10%` or `500samples`."""
    overfit: Count | None = None
    """Train and evaluate on only this many batches, not shuffled or augmented, to see the loss fall."""
    normalize: bool = True
    """Normalize inputs with the training data's mean and standard deviation."""
    collate: Target | None = None
    """Import path of a function that turns a list of samples into a batch; null for the dataset's own."""
    shuffle_buffer: Count | None = None
    """Shuffle buffer of a stream: the next sample is drawn from this many; null keeps the stream's order."""


def panel(data: DataSection) -> dict[str, object]:
    """Describe the shuffle buffer for the panel."""
    size = data.shuffle_buffer
    return {"shuffling": f"each sample is drawn out of {size:,} that lie together" if size else None}
