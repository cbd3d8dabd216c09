"""Builds the data of a run: reads a dataset, splits it, and chooses its loader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError, name_some
from ptfast.core.protocols import IGNORE_INDEX, DataInfo
from ptfast.data.data_fingerprint import same_training_data
from ptfast.data.dataset import Data, DataSet, ReadsAsKnown, Source, Splits, as_known, numbered_as
from ptfast.data.label_checks import (
    LabelCheck,
    as_classes,
    can_hold,
    check_labels,
    count_classes,
    is_ignored,
    not_finite,
    odd_classes,
    unfit_samples,
)
from ptfast.data.loaders.dataset_source import Collate
from ptfast.data.loaders.loader_choice import DECODED_ONCE, Choice
from ptfast.data.loaders.sample_form import AS_GIVEN, InputOptions
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.mixture import Mixture
from ptfast.data.sampling.cut_splits import cut_splits
from ptfast.data.sampling.sample_orders import checked_weights
from ptfast.data.sampling.sampler import Indices
from ptfast.data.sampling.splits import NO_RULES, SplitRules
from ptfast.data.sources.image_files import ImageFiles, ImagesInMemory, ImageSource
from ptfast.data.sources.ragged_text import TextSource
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.transforms.normalize import Statistics, statistics

_LABELS_OF = {
    "classification": ("classification", "regression", "multilabel"),
    "multilabel": ("multilabel",),
    "regression": ("regression", "multilabel", "semantic_segmentation"),
    "semantic_segmentation": ("semantic_segmentation",),
    "token_classification": ("token_classification",),
    "language_modelling": ("language_modelling",),
}
"""For each task, the tasks whose labels it can train on."""
_WHOLE = ("classification", "token_classification", "language_modelling")
"""The tasks whose loss takes labels as int64."""
_SCANNED = 2000
"""Maximum number of masks to read to find the classes, if the dataset does not state their number."""
_AT_ONCE = 32
_VOID = 255
"""The value of ignored pixels in many masks, or of everything but the background."""


@dataclass(frozen=True)
class DataOptions:
    """Options for reading, splitting and loading the data of a run."""

    val: Duration
    """Training samples to hold out if the source has no validation split."""
    seed: int
    """Determines which samples are held out."""
    task: str
    """`auto`, or the task to train for."""
    normalize: bool = True
    """Compute the statistics for normalization, unless `trained` contains them."""
    shuffle_buffer: int | None = None
    """Size of the shuffle buffer, for data that is read in its own order."""
    known: DataInfo | None = None
    """Facts of a trained model's data (vocabulary, statistics, classes); this data is read the same way."""
    trained: DataInfo | None = None
    """Facts of this data as saved by a run."""
    choose: Callable[..., Choice] | None = None
    """Chooses the loader, given the training split and the others; None chooses none and decodes nothing."""
    crops: bool = False
    """Keep training images in memory at their original size, for random crops."""
    once: Callable[[Callable[[], Any]], Any] = lambda compute: compute()
    """Calls a function on one rank and returns its result on all ranks."""
    arrays: SharedArrays | None = None
    """Allocates the arrays of decoded data, which ranks may share; None for arrays of this process."""
    ignore_index: int = IGNORE_INDEX
    """The label of ignored pixels."""
    collate: Collate | None = None
    """A user's collate function; None for the dataset's own, or torch's."""
    whole: bool = False
    """Evaluate all samples of data without held-out splits, unless it is the training data."""
    options: InputOptions = AS_GIVEN
    """Further options for reading the samples of a user's dataset."""
    rules: SplitRules = NO_RULES
    """How the training samples are split."""


def build_data(source: Any, **options: Any) -> Data:
    """Read a dataset, divide it into splits, choose its loader, and collect the facts about it.

    Args:
        source: an object built by an option of the group `data`, or any torch dataset.
        options: the fields of `DataOptions`.

    Raises:
        ConfigError: C011 for a task that does not match the labels, a shuffle buffer for data that is
            shuffled as a whole, or a collate function for built-in data.
        DataError: D002 to D006 for data that is empty, unreadable or does not match the task.
    """
    wanted = DataOptions(**options)
    if wanted.rules.split == "auto" and (before := wanted.known or wanted.trained) is not None:
        # Runs that did not record the kind of split were split at random.
        rules = replace(wanted.rules, split=before.extra.get("split", "random"))
        wanted = replace(wanted, rules=rules)
    read = _read(source, wanted)
    contents = wanted.once(read.fingerprint) if wanted.known is None else None
    splits, kept = _hold_out(read, source, wanted)
    loaded, choice = _load(splits, wanted)
    skipping = [each for each in splits.sources.values() if isinstance(each, ImageFiles) and each.skips]
    info = _describe(loaded, kept, wanted, skips=bool(skipping))
    if statistics := _statistics(loaded, splits.train, kept, info, wanted):
        info.extra["normalize"] = statistics
    if contents is not None:
        info.extra["contents"] = contents
    order = source.order(kept) if isinstance(source, Mixture) else splits.train.order
    if wanted.rules.overfit is not None:
        order = partial(_in_order, info.num_train or 0)
    return Data.of(
        info,
        loaded.sources,
        _note(source, loaded, kept, wanted),
        warning=loaded.warning,
        choice=choice,
        unreadable=(lambda: [file for each in skipping for file in each.unreadable()]) if skipping else None,
        order=order,
        weights=(lambda: None) if isinstance(source, DataSet) else partial(checked_weights, source, kept),
        kept=kept,
        arrays=wanted.arrays,
    )


def _read(source: Any, wanted: DataOptions) -> Splits:
    """Read the splits of the dataset, check their labels and convert them to the task's type."""
    known, task = wanted.known, wanted.task
    if isinstance(source, DataSet):
        if (collate := wanted.collate) is not None:
            what = f"batches of {source.name} are made without {collate.name}"
            hint = "Leave it out, or bring a dataset of your own: data=custom data._target_=mine.Data"
            raise ConfigError("C011", what, key=collate.key, suggestion=hint)
        if isinstance(source, ReadsAsKnown):
            source.task, source.rules = task, wanted.rules
            if known is not None:
                source.known, source.max_length = known, known.context_length or source.max_length
        splits = source.load(val=wanted.val, seed=wanted.seed)
    else:
        from ptfast.data.sources.custom_dataset import adapt

        how = {"collate": wanted.collate, "options": wanted.options}
        splits = adapt(source, seed=wanted.seed, task=task, known=known, **how)
    splits = _for_task(numbered_as(known.class_names if known is not None else None, splits), task)
    if splits.info.target_kind == "mask":
        splits = _with_masks(splits, wanted.ignore_index)
    return _with_warning(_with_classes(splits), task)


def _hold_out(splits: Splits, source: Any, wanted: DataOptions) -> tuple[Splits, Indices | None]:
    """Return the splits for the run, and the indices of the training samples kept; None for all."""
    known, seed = wanted.known, wanted.seed
    contents = {} if known is None else known.extra.get("contents", {})
    if not wanted.whole or known is None or same_training_data(contents, splits.fingerprint()):
        return cut_splits(splits, source, wanted.val, seed, wanted.rules)
    if getattr(source, "splits_itself", False):
        source.rules = NO_RULES
        whole = source.load(val=Duration(0, "percent"), seed=seed)
        splits = _with_classes(_for_task(whole, wanted.task))
    if splits.val is None and splits.test is None:
        splits = replace(splits, val=splits.train.in_order())
    return splits, None


def _load(splits: Splits, wanted: DataOptions) -> tuple[Splits, Choice | None]:
    """Choose the loader, and decode the splits into memory if it needs that."""
    if wanted.shuffle_buffer is not None:
        warning = _draw_among(splits.train, wanted.shuffle_buffer) or splits.warning
        splits = replace(splits, warning=warning)
    if (choose := wanted.choose) is None:
        return splits, None
    others = [source for split, source in splits.sources.items() if split != "train"]
    choice = wanted.once(lambda: choose(splits.train, others))
    if choice.kind in DECODED_ONCE:
        splits = _decode(splits, wanted.crops, wanted.arrays or SharedArrays())
    return splits, choice


def _describe(splits: Splits, kept: Indices | None, wanted: DataOptions, *, skips: bool) -> DataInfo:
    """Return the facts about the splits; `skips` if unreadable files are left out."""
    # Labels in memory may show that none is ignored, but the result must not depend on the loader.
    ignores_labels = skips or any(map(_ignores_labels, splits.sources.values()))
    num_train = len(splits.train) if isinstance(splits.train, MapSource) else None
    info = replace(splits.info, ignores_labels=ignores_labels, num_train=num_train)
    if wanted.known is not None:
        info = as_known(wanted.known, info)
    extra = {**info.extra, "split": wanted.rules.split}
    if info.input_shape is not None:
        extra["input_shape"] = list(info.input_shape)
    return replace(info, extra=extra)


def _statistics(
    splits: Splits, files: Source, kept: Indices | None, info: DataInfo, wanted: DataOptions
) -> Statistics | None:
    """Return the statistics for normalization, from the training `files`; None if there are none."""
    train = splits.train
    # Streams are not read for statistics: their images are scaled to 0 to 1.
    if not isinstance(files, MapSource) or not isinstance(train, MapSource):
        return None
    has_statistics = train.images or (isinstance(train, TensorSource) and info.kind == "features")
    if not has_statistics or not wanted.normalize or wanted.known is not None or "normalize" in info.extra:
        return None
    if isinstance(train, TensorSource):
        numbers = np.arange(len(train)) if kept is None else kept
        if unfit := not_finite(train.inputs, numbers):
            raise unfit_samples(unfit)
    if wanted.trained is not None and (found := wanted.trained.extra.get("normalize")):
        return found
    key_of = splits.cache_key
    # Statistics depend on which samples are held out.
    key = (lambda: f"{key_of()} {wanted.val} {wanted.seed} {wanted.rules}") if key_of is not None else None
    return wanted.once(lambda: statistics(files, key, train))


def _note(source: Any, splits: Splits, kept: Indices | None, wanted: DataOptions) -> str:
    """Return the data's name and the sizes of its splits, for the panel."""
    name = source.name if isinstance(source, DataSet) else type(source).__name__
    counts = [
        f"{len(each):,} {split}" if isinstance(each, MapSource) else f"{split} of unknown length"
        for split, each in splits.sources.items()
        if wanted.known is None or split != "train" or len(splits.sources) == 1
    ]
    held_out = (splits.val, splits.test if wanted.rules.test else None)
    sizes = [len(each) for each in held_out if isinstance(each, MapSource)]
    if wanted.known is not None and kept is not None and sizes:
        counts.append(f"held out of {len(kept) + sum(sizes):,}")
    return "; ".join(filter(None, [f"{name}: {', '.join(counts)}", splits.note]))


def _in_order(num_samples: int, seed: int, epoch: int) -> Indices:
    return np.arange(num_samples)


def _for_task(splits: Splits, task: str) -> Splits:
    """Convert labels to the task's type: floats for regression and multilabel, class numbers otherwise."""
    info = splits.info
    if task == "regression" and info.task in ("classification", "semantic_segmentation"):
        # Integers are read as classes unless the user asks for regression.
        if info.class_names is not None:
            _replace_classes_by_values(splits, info.class_names)
        kind = "map" if info.target_kind == "mask" else info.target_kind
        info = replace(info, task=task, num_classes=1, class_names=None, target_kind=kind)
    if info.task not in _LABELS_OF.get(task, (info.task,)):
        what = f"this data's labels are for task={info.task}"
        raise ConfigError("C011", what, key="task", value=task, suggestion="Use task=auto")
    if task == "classification" and info.task in ("regression", "multilabel"):
        # Labels give classes as floats or one-hot rows.
        for split, source in splits.sources.items():
            if isinstance(source, (TensorSource, TextSource)):
                source.targets = as_classes(source.targets, f"{split} sample")
        num_classes = info.num_classes if info.task == "multilabel" else None
        info = replace(info, task="classification", num_classes=num_classes, target_kind="whole")
        return replace(splits, info=info)
    task = info.task if task == "auto" else task
    for source in splits.sources.values():
        if isinstance(source, (TensorSource, TextSource)):
            if task in ("regression", "multilabel"):
                source.targets = source.targets.float()
            elif task in _WHOLE and not source.targets.is_floating_point():
                source.targets = source.targets.long()
    return replace(splits, info=info)


def _replace_classes_by_values(splits: Splits, names: tuple[str, ...]) -> None:
    """Replace class numbers by the numbers in the class names; raise C011 for a name that is no number."""
    try:
        values = torch.tensor([float(name) for name in names])
    except ValueError:
        what = f"the classes are names, not numbers to predict ({name_some(names, 3)})"
        raise ConfigError("C011", what, key="task", value="regression", suggestion="Use task=auto") from None
    for source in splits.sources.values():
        if isinstance(targets := getattr(source, "targets", None), Tensor):
            source.targets = values[targets]  # pyright: ignore[reportAttributeAccessIssue]


def _with_warning(splits: Splits, task: str) -> Splits:
    """Add a warning if labels do not look like classes, unless the number of classes is stated."""
    info, labels = splits.info, getattr(splits.train, "seen_labels", None)
    labels = splits.train.known_labels() if labels is None and isinstance(splits.train, MapSource) else labels
    if info.task != "classification" or info.class_names or splits.classes_from is None or labels is None:
        return splits
    is_stated = task == info.task
    warning = odd_classes(labels, info.num_classes or 0, splits.classes_from, is_stated=is_stated)
    return replace(splits, warning=warning)


def _with_masks(splits: Splits, ignore_index: int) -> Splits:
    """Count and check the classes of masks."""
    info = replace(splits.info, ignore_index=ignore_index)
    if info.num_classes is None:
        info = replace(info, num_classes=_count_classes(splits.train, ignore_index))
    for split, source in splits.sources.items():
        if isinstance(source, TensorSource):
            if info.task == "semantic_segmentation":
                check_labels(source.targets, info.num_classes or 1, split, ignore_index)
        elif info.task == "semantic_segmentation":
            # Masks in files are checked as they are read.
            source.label_check = LabelCheck(info.num_classes, ignore_index)
    return replace(splits, info=info)


def _count_classes(source: Source, ignore_index: int) -> int:
    """Return the highest label plus one, of up to 2,000 masks spread over the split."""
    if isinstance(source, IterableSource):
        what, hint = "iterable data must say how many classes there are", "Give it an attribute num_classes"
        raise DataError("D004", what, key="data", suggestion=hint)
    highest = below = 0
    places = source.spread(_SCANNED)
    for chunk in np.array_split(places, -(-len(places) // _AT_ONCE)):
        if isinstance(source, TensorSource):
            masks = source.targets.index_select(0, as_tensor(chunk))
        else:
            masks = source.fetch(chunk)[1]
        counted = masks.masked_fill(is_ignored(masks, ignore_index), 0)
        highest = max(highest, int(counted.max()))
        if can_hold(masks.dtype, _VOID):
            below = max(below, int(counted.masked_fill(counted == _VOID, 0).max()))
    if highest == _VOID and below < _VOID - 1:
        what = f"pixel labels go up to {below}, except for {_VOID}"
        hint = f"Set task.ignore_index={_VOID} if such pixels do not count, or number the classes from 0"
        raise DataError("D004", what, key="data", suggestion=hint)
    return highest + 1


def _with_classes(splits: Splits) -> Splits:
    """Count the classes of labels in memory; raise D004 for a label that is not a class."""
    info = splits.info
    labels = {split: getattr(each, "targets", None) for split, each in splits.sources.items()}
    if info.task != "classification" or not isinstance(labels["train"], Tensor):
        return splits
    num_classes = info.num_classes or count_classes(labels["train"])
    for split, own in labels.items():
        if own is not None:
            check_labels(own, num_classes, split)
    return replace(splits, info=replace(info, num_classes=num_classes))


def _draw_among(source: Source, size: int) -> str | None:
    """Set the shuffle buffer, and return a warning or None; raise C011 for data that is shuffled whole."""
    from ptfast.data.sources.webdataset_shards import ShardedImages, ShardStream

    if not isinstance(source, (IterableSource, ShardedImages)):
        what, hint = "this data is shuffled as a whole", "Set data.shuffle_buffer=null"
        raise ConfigError("C011", what, key="data.shuffle_buffer", value=size, suggestion=hint)
    source.shuffle_buffer = size
    return source.too_wide() if isinstance(source, ShardStream) else None


def _ignores_labels(source: Source) -> bool:
    targets = getattr(source, "targets", None)
    return source.ignores_labels or (targets is not None and bool((targets == IGNORE_INDEX).any()))


def _decode(splits: Splits, crops: bool, arrays: SharedArrays) -> Splits:
    """Decode the splits into memory."""
    files, sources = splits.train, splits.sources.values()
    if crops and isinstance(files, ImageSource) and files.crops_originals and files.storage != "memory":
        splits = replace(splits, train=ImagesInMemory(files))
    decoded = {
        split: source.to_memory(arrays)
        for split, source in splits.sources.items()
        if isinstance(source, MapSource) and source.storage != "memory"
    }
    converted = sum(source.num_converted for source in sources if isinstance(source, ImageFiles))
    note = f"{converted:,} images that are not 8-bit RGB were converted" if converted else ""
    note = "; ".join(filter(None, [splits.note, note, arrays.note if decoded else ""]))
    return replace(splits, **decoded, note=note)
