"""Data sets: splits of samples, by index or in a stream, and the facts about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, SavedStateError, name_some
from ptfast.core.protocols import DataInfo
from ptfast.data.data_fingerprint import Contents, differing
from ptfast.data.label_checks import differing_names
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.sampler import Indices
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


_MUST_AGREE = {
    "kind": "the kind of data",
    "task": "what the labels are for",
    "num_classes": "the number of classes",
    "class_names": "the classes",
    "input_shape": "the shape of the inputs",
    "vocab_size": "the size of the vocabulary",
    "context_length": "the length of sequences",
    "num_train": "the number of training samples",
}


def read_info(facts: dict[str, Any]) -> DataInfo:
    """The data's facts as they were saved; JSON's lists become tuples again."""
    names = {field.name for field in fields(DataInfo)}
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in facts.items()
        if name in names
    }
    return DataInfo(**known)


def check_same_data(saved: DataInfo, found: DataInfo, *, trains: bool = True) -> str:
    """Refuse to resume with other data than before: the model would read it wrongly, in silence.

    Args:
        trains: whether it is trained on, so that samples have to be the same ones, too.

    Returns:
        What has changed and alters no step of training, in words; empty if nothing has.

    Raises:
        SavedStateError: S003, naming what has changed.
    """
    changed = [
        f"{what}{_shown(before, now)}"
        for name, what in _MUST_AGREE.items()
        if (before := getattr(saved, name)) != (now := getattr(found, name)) and before is not None
    ]
    if saved.extra.get("tokenizer") != found.extra.get("tokenizer"):
        changed.append("the vocabulary")
    before, now = (info.extra.get("contents", {}) for info in (saved, found))
    # States of before there were contents do not say what they were trained on.
    parts = differing(before, now) if before and now else {}
    of_training = [words for name, words in parts.items() if trains and name.partition("/")[0] == "train"]
    if changed or of_training:
        some = [*changed, *([name_some(of_training, 3)] if of_training else [])]
        what = f"the data has changed since the state was saved: {', '.join(some)}"
        hint = "Put it back as it was, or start afresh with run.resume=never"
        raise SavedStateError("S003", what, key="data", suggestion=hint)
    return name_some(list(parts.values()), 3) if parts else ""


def as_known(known: DataInfo, found: DataInfo) -> DataInfo:
    """The facts to read other data by: those that the model knows, if it can read the data at all.

    Args:
        known: the data that the model was trained on.
        found: the other data.
    """
    if (known.kind, known.task) != (found.kind, found.task):
        raise _misfit("D004", f"is {found.kind} data for {found.task}", f"{known.kind} data for {known.task}")
    if known.class_names and found.class_names and known.class_names != found.class_names:
        raise _differing_classes(known.class_names, found.class_names)
    for name, what in (("num_classes", "classes"), ("vocab_size", "tokens")):
        before, now = getattr(known, name), getattr(found, name)
        if before is not None and now is not None and now > before:
            raise _misfit("D004", f"has {now:,} {what}", f"{before:,}")
    if known.kind in ("image", "features") and known.input_shape != found.input_shape:
        raise _misfit("D005", f"has inputs of shape {_list(found.input_shape)}", _list(known.input_shape))
    return replace(
        known,
        ignores_labels=known.ignores_labels or found.ignores_labels,
        token_bytes=found.token_bytes,
        num_train=found.num_train,
    )


def _misfit(code: str, what: str, known: str) -> DataError:
    return DataError(code, f"{what}; the model was trained on {known}", key="data")


def _differing_classes(known: tuple[str, ...], found: tuple[str, ...]) -> DataError:
    differ = differing_names(found, known, "which the model does not know") or "they are in another order"
    what = f"its classes differ from those of training: {differ}"
    return DataError("D003", what, key="data", suggestion="Give it the class folders of the training data")


def _shown(before: Any, now: Any) -> str:
    if isinstance(before, int) and isinstance(now, int):
        return f" ({before:,}, now {now:,})"
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) <= 4 >= len(now):
        return f" ({_list(before)}, now {_list(now)})"
    return ""


def _list(items: tuple[Any, ...] | None) -> str:
    return (
        "x".join(map(str, items)) if items and isinstance(items[0], int) else ", ".join(map(str, items or ()))
    )
