"""Data sets: splits of samples, by index or in a stream, and the facts about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ptfast.core.durations import Duration
from ptfast.core.protocols import DataInfo
from ptfast.data.data_fingerprint import Contents
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.order import Indices
from ptfast.data.streams.iterable import IterableSource

Source = MapSource | IterableSource


def image_info(
    input_shape: tuple[int, ...], *, class_names: tuple[str, ...] | None, num_classes: int = 0, **extra: Any
) -> DataInfo:
    """The facts about images of one class each.

    Args:
        input_shape: (channels, height, width).
        num_classes: where the classes have no names.
        extra: as `DataInfo.extra`.
    """
    return DataInfo(
        kind="image",
        task="classification",
        num_classes=len(class_names) if class_names is not None else num_classes,
        class_names=class_names,
        input_shape=input_shape,
        in_channels=input_shape[0],
        extra=extra,
    )


class Splits(NamedTuple):
    """The splits that a data set loads."""

    info: DataInfo
    train: Source
    val: Source | None = None
    test: Source | None = None
    note: str = ""
    """Remarks for the user on how it was read."""
    contents: Callable[[], Contents] | None = None
    """Its fingerprint; None where the sources say it."""
    cache_key: Callable[[], str] | None = None
    """Identifies what decides its statistics, to cache them by; None to compute them each time."""

    @classmethod
    def of(cls, info: DataInfo, sources: Mapping[str, Source], note: str = "", **known: Any) -> Splits:
        """The splits `train` and, where there are any, `val` and `test` among `sources`."""
        return cls(info, sources["train"], sources.get("val"), sources.get("test"), note, **known)

    @property
    def sources(self) -> dict[str, Source]:
        """The splits that there are, by name."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {split: source for split, source in found.items() if source is not None}


@runtime_checkable
class DataSet(Protocol):
    """A data set that ptfast knows: what the options of the group `data` construct."""

    name: str
    """Its name in the panel, e.g. `digits`."""

    def load(self, *, val: Duration, seed: int) -> Splits:
        """Read it. `val` and `seed` matter only to data that is not cut by samples, such as running text."""
        ...


@runtime_checkable
class ReadsAsKnown(Protocol):
    """A data set whose reading depends on what its training split holds: a vocabulary, the classes."""

    def read_as(self, known: DataInfo) -> None:
        """Take vocabulary and classes from `known` instead; to be called before `load`."""
        ...


@dataclass(frozen=True)
class Data:
    """The splits of a run and the facts about them."""

    info: DataInfo
    train: Source
    val: Source | None
    test: Source | None
    note: str
    """One line for the panel, e.g. `digits: 1,617 train, 180 val`."""
    choice: Any = None
    """How it is loaded, a `Choice` of `ptfast.data.loaders.loader_choice`; None where nobody has chosen."""
    unreadable: Callable[[], list[str]] | None = None
    """Names the files that were left out so far; None where one that cannot be read ends the run."""
    order: Callable[[int, int], Indices | None] = lambda seed, epoch: None
    """`order` of the training data, wherever it is held."""
    weights: Callable[[], NDArray[np.float64] | None] = lambda: None
    """How often each training sample is to be drawn beside the others, where the data set says it."""
    kept: Indices | None = None
    """Which samples of the data set train, where others of them are held out."""
    holder: Holder | None = None
    """Where what is decoded is held; None for this process."""
