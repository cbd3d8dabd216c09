"""Datasets: splits of samples, by index or in a stream, and the facts about them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, SavedStateError, name_some
from ptfast.core.protocols import DataInfo
from ptfast.core.run_records import checked
from ptfast.data.data_fingerprint import Contents, differing
from ptfast.data.label_checks import differing_names
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.sampler import Indices
from ptfast.data.sampling.splits import NO_RULES
from ptfast.data.streams.iterable import IterableSource

if TYPE_CHECKING:
    from typing_extensions import Self

Source = MapSource | IterableSource
_Found = TypeVar("_Found")


def image_info(
    input_shape: tuple[int, ...], *, class_names: tuple[str, ...] | None, **extra: Any
) -> DataInfo:
    """Return the facts about images with one class each; classes without names are counted later."""
    return DataInfo(
        kind="image",
        task="classification",
        num_classes=len(class_names) if class_names is not None else None,
        class_names=class_names,
        input_shape=input_shape,
        in_channels=input_shape[0],
        extra=extra,
    )


@dataclass(frozen=True)
class Splits:
    """The splits that a dataset loads."""

    info: DataInfo
    train: Source
    val: Source | None = None
    test: Source | None = None
    note: str = ""
    """Remarks for the user on how the data was read."""
    classes_from: str | None = None
    """Where the user can state the number of classes, if it was inferred from the labels."""
    warning: str | None = None
    """A warning about suspicious labels."""
    contents: Callable[[], Contents] | None = None
    """Returns the fingerprint; None to ask the sources."""
    cache_key: Callable[[], str] | None = None
    """Returns the key under which statistics of the inputs are cached; None for no cache."""
    groups: Sequence[Any] | None = None
    """The training samples' values in the column `data.group`; None without such a column."""

    @classmethod
    def of(cls, info: DataInfo, sources: Mapping[str, Source], note: str = "", **known: Any) -> Self:
        """Create the splits from `sources`: `train`, and optionally `val` and `test`."""
        return cls(info, sources["train"], sources.get("val"), sources.get("test"), note, **known)

    @property
    def sources(self) -> dict[str, Source]:
        """The existing splits, by name."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {split: source for split, source in found.items() if source is not None}

    def fingerprint(self) -> Contents:
        """Return the fingerprints of the splits, where known."""
        if self.contents is not None:
            return self.contents()
        found = {split: source.contents() for split, source in self.sources.items()}
        return {split: facts for split, facts in found.items() if facts is not None}


@runtime_checkable
class DataSet(Protocol):
    """A built-in dataset, or a user's with the same interface, as built by options of the group `data`."""

    name: str
    """Its name in the panel, e.g. `digits`."""

    def load(self, *, val: Duration, seed: int) -> Splits:
        """Read the data. `val` and `seed` matter only for data that is not split by samples (text)."""
        ...


class ReadsAsKnown:
    """A dataset whose vocabulary or classes come from its training split, or from a trained model's data."""

    known: DataInfo | None = None
    """The facts of the data that the model was trained on, for evaluation only."""
    splits_itself = False
    """Whether `load` holds out the validation samples instead of its caller."""
    task = "auto"
    """The task in the config."""
    max_length = 0
    """Maximum number of tokens kept of a text."""
    rules = NO_RULES
    """How the training samples are split."""

    def complete(self, found: dict[str, _Found]) -> dict[str, _Found]:
        """Return the splits `found`; evaluation may lack `train` and uses the first split in its place."""
        if self.known is None or "train" in found or not found:
            return found
        return {"train": next(iter(found.values())), **found}


@dataclass(frozen=True)
class Data(Splits):
    """The splits of a run; `note` is a line for the panel, e.g. `digits: 1,617 train, 180 val`."""

    choice: Any = None
    """The loader, a `Choice` of `ptfast.data.loaders.loader_choice`; None if not chosen yet."""
    unreadable: Callable[[], list[str]] | None = None
    """Returns the files left out so far; None if an unreadable file ends the run."""
    order: Callable[[int, int], Indices | None] = lambda seed, epoch: None
    """Returns the order of the training samples, given seed and epoch; None to shuffle all."""
    weights: Callable[[], NDArray[np.float64] | None] = lambda: None
    """Returns the relative frequency of each training sample, if the dataset has weights."""
    kept: Indices | None = None
    """The indices of the training samples in the dataset; None for all."""
    arrays: SharedArrays | None = None
    evals: Mapping[str, Data] = field(default_factory=dict)
    """Evaluation sets by name, each in its `val`."""


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
    """Restore the data's facts from JSON; lists become tuples again."""
    return checked(DataInfo, json.dumps(facts))


def check_same_data(saved: DataInfo, found: DataInfo, *, trains: bool = True) -> str:
    """Reject resuming with changed data, which the model would silently misread.

    Args:
        trains: whether the run trains, so that the training samples must be the same, too.

    Returns:
        Changes that do not affect training, in words; empty if there are none.

    Raises:
        SavedStateError: S003, naming the changes.
    """
    changed: list[str] = []
    for name, what in _MUST_AGREE.items():
        before, now = getattr(saved, name), getattr(found, name)
        if before is None or before == now:
            continue
        if isinstance(before, int) and isinstance(now, int):
            what += f" ({before:,}, now {now:,})"
        elif isinstance(before, tuple) and isinstance(now, tuple) and len(before) <= 4 >= len(now):
            what += f" ({_list(before)}, now {_list(now)})"
        changed.append(what)
    if saved.extra.get("tokenizer") != found.extra.get("tokenizer"):
        changed.append("the vocabulary")
    before, now = (info.extra.get("contents", {}) for info in (saved, found))
    # Data that is read as a trained model's data has no fingerprint to compare.
    parts = differing(before, now) if now else {}
    of_training = [words for name, words in parts.items() if trains and name.partition("/")[0] == "train"]
    if changed or of_training:
        some = [*changed, *([name_some(of_training, 3)] if of_training else [])]
        what = f"the data has changed since the state was saved: {', '.join(some)}"
        hint = "Put it back as it was, or start afresh with run.resume=never"
        raise SavedStateError("S003", what, key="data", suggestion=hint)
    return name_some(list(parts.values()), 3) if parts else ""


def numbered_as(names: tuple[str, ...] | None, splits: Splits) -> Splits:
    """Renumber the classes as in `names`, if it contains all of them, and add a note."""
    own, names, sources = splits.info.class_names or (), names or (), splits.sources.values()
    known = splits.info.task == "classification" and own and own != names and {*own} <= {*names}
    if not known or not all(isinstance(getattr(source, "targets", None), Tensor) for source in sources):
        return splits
    numbers = torch.tensor([names.index(name) for name in own])
    for source in sources:
        targets: Tensor = vars(source)["targets"]
        vars(source)["targets"] = torch.where(targets < 0, targets, numbers[targets.clamp(min=0)])
    info = replace(splits.info, class_names=names, num_classes=len(names))
    return replace(splits, info=info, note=f"{splits.note}; classes are matched by name".removeprefix("; "))


def as_known(known: DataInfo, found: DataInfo) -> DataInfo:
    """Return the facts with which a model trained on `known` data reads the data `found`.

    Raises:
        DataError: D003 to D005 if the data does not match the model.
    """

    def misfit(code: str, what: str, trained_on: str) -> DataError:
        return DataError(code, f"{what}; the model was trained on {trained_on}", key="data")

    if (known.kind, known.task) != (found.kind, found.task):
        what = f"is {found.kind} data for {found.task}"
        raise misfit("D004", what, f"{known.kind} data for {known.task}")
    if known.class_names and found.class_names and known.class_names != found.class_names:
        names = differing_names(found.class_names, known.class_names, "which the model does not know")
        what = f"its classes differ from those of training: {names or 'they are in another order'}"
        raise DataError("D003", what, key="data", suggestion="Give it the class folders of the training data")
    for name, what in (("num_classes", "classes"), ("vocab_size", "tokens")):
        before, now = getattr(known, name), getattr(found, name)
        if before is not None and now is not None and now > before:
            raise misfit("D004", f"has {now:,} {what}", f"{before:,}")
    if known.kind in ("image", "features") and known.input_shape != found.input_shape:
        raise misfit("D005", f"has inputs of shape {_list(found.input_shape)}", _list(known.input_shape))
    return replace(
        known,
        ignores_labels=known.ignores_labels or found.ignores_labels,
        token_bytes=found.token_bytes,
        num_train=found.num_train,
    )


def _list(items: tuple[Any, ...] | None) -> str:
    return (
        "x".join(map(str, items)) if items and isinstance(items[0], int) else ", ".join(map(str, items or ()))
    )
