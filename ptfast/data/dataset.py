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
    """The facts about images of one class each; classes without names are counted later."""
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
    """Remarks for the user on how it was read."""
    classes_from: str | None = None
    """Where the number of classes can be stated, if it was only seen in the labels."""
    warning: str | None = None
    """What looks odd about the labels."""
    contents: Callable[[], Contents] | None = None
    """Its fingerprint; None to ask the sources."""
    cache_key: Callable[[], str] | None = None
    """Identifies the inputs, to cache their statistics by; None for no cache."""
    groups: Sequence[Any] | None = None
    """Of the training samples: the column that `data.group` names; None without it."""

    @classmethod
    def of(cls, info: DataInfo, sources: Mapping[str, Source], note: str = "", **known: Any) -> Self:
        """The splits among `sources`: `train`, and perhaps `val` and `test`."""
        return cls(info, sources["train"], sources.get("val"), sources.get("test"), note, **known)

    @property
    def sources(self) -> dict[str, Source]:
        """The existing splits, by name."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {split: source for split, source in found.items() if source is not None}

    def fingerprint(self) -> Contents:
        """The contents of the splits, as far as they are known."""
        if self.contents is not None:
            return self.contents()
        found = {split: source.contents() for split, source in self.sources.items()}
        return {split: facts for split, facts in found.items() if facts is not None}


@runtime_checkable
class DataSet(Protocol):
    """A built-in dataset, or a user's of the same kind: what options of the group `data` construct."""

    name: str
    """Its name in the panel, e.g. `digits`."""

    def load(self, *, val: Duration, seed: int) -> Splits:
        """Read it. `val` and `seed` only matter to data not split by samples, such as running text."""
        ...


class ReadsAsKnown:
    """A dataset read by facts (vocabulary, classes) of its training split, or of a model's data."""

    known: DataInfo | None = None
    """The facts of the data that the model was trained on, where it is only evaluated."""
    splits_itself = False
    """`load` holds out the validation samples, not its caller."""
    task = "auto"
    """The task that the config names."""
    max_length = 0
    """Tokens that are kept of a text."""
    rules = NO_RULES
    """How the training samples are split."""

    def complete(self, found: dict[str, _Found]) -> dict[str, _Found]:
        """The splits that were found; evaluation needs no `train` and reads the first of the others."""
        if self.known is None or "train" in found or not found:
            return found
        return {"train": next(iter(found.values())), **found}


@dataclass(frozen=True)
class Data(Splits):
    """The splits of a run; their note is a line for the panel, e.g. `digits: 1,617 train, 180 val`."""

    choice: Any = None
    """How it is loaded, a `Choice` of `ptfast.data.loaders.loader_choice`; None if not chosen yet."""
    unreadable: Callable[[], list[str]] | None = None
    """Names the files that were left out so far; None if an unreadable file ends the run."""
    order: Callable[[int, int], Indices | None] = lambda seed, epoch: None
    """The order of the training samples in an epoch, by (seed, epoch); None to shuffle all."""
    weights: Callable[[], NDArray[np.float64] | None] = lambda: None
    """The relative frequency of each training sample, if the dataset gives one."""
    kept: Indices | None = None
    """The samples of the dataset that are trained on; None for all."""
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
    """The data's facts as they were saved; JSON's lists become tuples again."""
    return checked(DataInfo, json.dumps(facts))


def check_same_data(saved: DataInfo, found: DataInfo, *, trains: bool = True) -> str:
    """Reject resuming with other data than before, which the model would silently misread.

    Args:
        trains: whether the run trains, so that the training samples must be the same, too.

    Returns:
        Changes that alter no step of training, in words; empty if there are none.

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
    # Data for a model that is known are not compared.
    parts = differing(before, now) if now else {}
    of_training = [words for name, words in parts.items() if trains and name.partition("/")[0] == "train"]
    if changed or of_training:
        some = [*changed, *([name_some(of_training, 3)] if of_training else [])]
        what = f"the data has changed since the state was saved: {', '.join(some)}"
        hint = "Put it back as it was, or start afresh with run.resume=never"
        raise SavedStateError("S003", what, key="data", suggestion=hint)
    return name_some(list(parts.values()), 3) if parts else ""


def numbered_as(names: tuple[str, ...] | None, splits: Splits) -> Splits:
    """Splits whose classes have the numbers that they have in `names`, if it has them all, with a note."""
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
    """The facts by which a model trained on `known` data reads the data that was `found`.

    Raises:
        DataError: D003 to D005 if the model cannot read it.
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
