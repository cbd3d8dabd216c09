"""Any torch dataset by import path, and the facts that its first samples show."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ptfast.core.errors import DataError, described
from ptfast.core.protocols import IGNORE_INDEX, TASKS, DataInfo
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.dataset import Splits
from ptfast.data.label_checks import (
    LabelCheck,
    as_classes,
    check_labels,
    count_classes,
    infer_task,
    kind_of_target,
    shape_of,
    signed,
)
from ptfast.data.loaders.collate import Collate, collate_of
from ptfast.data.loaders.worker_processes import as_data_errors
from ptfast.data.map_source import MapSource, TensorSource
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.counter_draws import seeded
from ptfast.data.sampling.sampler import Indices
from ptfast.data.streams.iterable import IterableSource

_WITH_CLASSES = ("classification", "token_classification")
_SCAN_LIMIT = 2000
"""Samples read to find the classes where the dataset does not name them."""


class DatasetSource(MapSource):
    """A map-style dataset, collated as torch's DataLoader does, or by a function of the user's.

    Sequences of tokens whose lengths the dataset states in `lengths` are padded with its `pad_id` (default
    0), and targets with one label per token with -100. Global generators (torch, numpy, random) are seeded by
    epoch and samples, so that resumed runs and any number of workers draw the same.
    """

    columns = ("_numbers", "lengths", "all_labels")
    cuts = False

    def __init__(
        self, dataset: Any, seed: int, *, images: bool = False, collate: Collate | None = None
    ) -> None:
        self.dataset, self.seed, self.images = dataset, seed, images
        self.collate = collate_of(dataset, collate)
        # Until every label has been seen.
        self.ignores_labels = True
        self.all_labels: Tensor | None = None
        stated = getattr(dataset, "lengths", None)
        self.lengths = None if stated is None else np.asarray(stated, np.int64)
        if self.lengths is not None and self.lengths.shape != (len(dataset),):
            what = f"its lengths are of {len(self.lengths):,} samples, and it has {len(dataset):,}"
            raise DataError("D008", what, key="data")
        self._longest = 0 if self.lengths is None else int(self.lengths.max(initial=0))
        self._numbers = np.arange(len(dataset))
        self.pad_id = int(getattr(dataset, "pad_id", None) or 0)

    def known_labels(self) -> Tensor | None:
        return self.all_labels

    def contents(self) -> list[Any]:
        labels = getattr(self.dataset, "targets", None)
        with contextlib.suppress(Exception):
            labels = np.asarray(labels)
        known = [array for array in (labels, self.lengths) if isinstance(array, np.ndarray)]
        return describe_part(len(self), "samples", getattr(self.dataset, "fingerprint", None), *known)

    def fetch(self, indices: Indices, epoch: int = 0) -> Any:
        wanted = self._numbers[indices].tolist()
        with seeded(counter_draws.key(self.seed, epoch, counter_draws.GLOBAL, *wanted[:1])):
            with as_data_errors(self.dataset):
                if hasattr(self.dataset, "__getitems__"):
                    samples = self.dataset.__getitems__(wanted)
                else:
                    samples = [self.dataset[i] for i in wanted]
                if self.lengths is not None and not self.collate.is_own:
                    samples = self._filled(samples)
            raw = self.collate(samples)
        raw = self.label_check(raw, wanted)
        if self.images:
            return (raw[0].permute(0, 2, 3, 1).contiguous(), *raw[1:])
        return raw

    def _filled(self, samples: list[Any]) -> list[Any]:
        """The samples at one length, where they are `(tokens, target)`."""
        first = samples[0]
        is_pair = isinstance(first, (tuple, list)) and len(first) == 2
        if not is_pair or not _is_tokens(torch.as_tensor(first[0])):
            return samples
        longest = max(len(tokens) for tokens, _ in samples)
        if longest > self._longest:
            what = f"a sample has {longest} tokens, where the longest of its lengths is {self._longest}"
            raise DataError("D008", what, key="data")
        width = self.padding.width(longest, self._longest)
        filled: list[Any] = []
        for tokens, target in samples:
            missing = (0, width - len(tokens))
            if np.shape(target) == np.shape(tokens):
                target = F.pad(torch.as_tensor(target), missing, value=IGNORE_INDEX)
            filled.append((F.pad(torch.as_tensor(tokens), missing, value=self.pad_id), target))
        return filled


def adapt(
    dataset: Any, *, seed: int, task: str, known: DataInfo | None = None, collate: Collate | None = None
) -> Splits:
    """The splits of a user's dataset: training samples and what they look like.

    Its attributes `val` and `test`, if they are datasets, are the held-out splits. Class count and names
    come from its attributes `num_classes` and `classes`, else from `targets`, else from 2,000 of its labels;
    the input shape from its first sample. The size of the vocabulary comes from its attribute `vocab_size`,
    or from all samples if they are in memory or at most 2,000; lengths of sequences come from `lengths`.

    Args:
        known: of a model's own data, for what this dataset does not say itself.
        collate: makes batches of its samples; None for its own `collate_fn`, or as torch does it.

    Raises:
        DataError: D002 if it is empty, D004 if it is iterable and names no classes, D008 if it is no dataset
            or its first sample cannot be read.
    """
    with as_data_errors(dataset):
        splits = _adapt(dataset, seed, task, known, collate)
        for name in ("val", "test"):
            held_out = getattr(dataset, name, None)
            if isinstance(held_out, Dataset):
                train = _adapt(held_out, seed, task, known or splits.info, collate).train
                splits = replace(splits, **{name: train})
    return splits


def _adapt(dataset: Any, seed: int, task: str, known: DataInfo | None, collate: Collate | None) -> Splits:
    collate = collate_of(dataset, collate)
    note = f"batches by {collate.name}" if collate.is_own else ""
    if isinstance(dataset, IterableDataset):
        source = IterableSource(dataset, seed, collate)
        sample = source.first[0]
        batch = collate([sample]) if collate.is_own else sample
        if (info := _opaque_info(dataset, batch, collate, task, known)) is not None:
            return Splits(info, source, note=note)
        sample = (batch[0][0], batch[1][0]) if collate.is_own else sample
        source.images = _is_image(sample[0])
        info = _info(dataset, sample, None, task, known)
        named = any(getattr(dataset, name, None) is not None for name in ("num_classes", "classes"))
        stated = named or (known is not None and known.num_classes is not None)
        if info.num_classes and info.task == "classification" and not stated:
            hint = "Give it an attribute num_classes"
            what = "iterable data must say how many classes there are"
            raise DataError("D004", what, key="data", suggestion=hint)
        if info.task in _WITH_CLASSES:
            translates = _names_otherwise(torch.as_tensor(sample[1])[None], info.task)
            source.label_check = LabelCheck(info.num_classes, as_classes=translates)
        return Splits(info, source, note=note)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        what = f"{type(dataset).__name__} is not a torch dataset: it has no __getitem__ and __len__"
        raise DataError("D008", what, key="data")
    if len(dataset) == 0:
        raise DataError("D002", f"{type(dataset).__name__} has no samples", key="data")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2 and not collate.is_own:
        inputs, targets = dataset.tensors[0], signed(dataset.tensors[1])
        images = _is_image(inputs[0])
        info = _info(dataset, dataset[0], targets, task, known, inputs)
        inputs = inputs.permute(0, 2, 3, 1).contiguous() if images else inputs
        if _names_otherwise(targets, info.task):
            targets = as_classes(targets)
        return Splits(info, TensorSource(inputs, targets, images=images))
    source = DatasetSource(dataset, seed, collate=collate)
    first = source.fetch(np.zeros(1, np.int64))
    if (info := _opaque_info(dataset, first, collate, task, known)) is not None:
        return Splits(info, source, note=note)
    sample = first[0][0], first[1][0]
    source.images = _is_image(sample[0])
    if isinstance(first[1], Tensor) and kind_of_target(first[1], sample[0].shape, task) in ("mask", "map"):
        # One mask shows their kind; 2,000 would fill memory.
        return Splits(_info(dataset, sample, first[1], task, known), source, note=note)
    labels = _labels(dataset, source)
    source.ignores_labels = len(labels) != len(dataset) or bool((labels == IGNORE_INDEX).any())
    few = len(dataset) <= _SCAN_LIMIT and _is_tokens(sample[0])
    info = _info(dataset, sample, labels, task, known, _scan(source)[0] if few else None)
    if info.task in _WITH_CLASSES and info.num_classes:
        translates = _names_otherwise(labels, info.task)
        source.label_check = LabelCheck(as_classes=translates)
        labels = as_classes(labels, "train sample") if translates else labels
        if bool((labels == IGNORE_INDEX).all()):
            labels = _scan(source)[1]
        check_labels(labels, max(1, info.num_classes), "train")
        source.label_check = LabelCheck(info.num_classes, as_classes=translates)
    source.all_labels = labels if len(labels) == len(dataset) else None
    return Splits(info, source, note=note)


def _opaque_info(
    dataset: Any, batch: Any, collate: Collate, task: str, known: DataInfo | None
) -> DataInfo | None:
    """The facts that a dataset states, if only the user's task knows what a batch is; else None."""
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[0], Tensor)
    if is_pair and isinstance(target := batch[1], (list, tuple)):
        # A collated target of several parts is a list of tensors.
        is_pair = bool(target) and not isinstance(target[0], (Tensor, list, tuple, Mapping))
    elif is_pair:
        is_pair = not isinstance(batch[1], Mapping)
    built_in = task in TASKS or task == "auto"
    if is_pair and (built_in or not collate.is_own):
        return None
    if not built_in or task == "hf":
        learnt_classes = known.num_classes if known is not None else None
        num_classes, names = _stated_classes(dataset) or learnt_classes, getattr(dataset, "classes", None)
        names = tuple(map(str, names)) if names is not None else None
        return DataInfo(kind="other", task=task, num_classes=num_classes, class_names=names)
    wanted = "batches of (inputs, targets)" if collate.is_own else "samples of (input, target)"
    if collate.is_own:
        found = f"{collate.name} gives {described(batch)}"
    elif isinstance(batch, Mapping):
        found = f"this data has mappings of {', '.join(map(str, batch))}"
    elif not isinstance(batch, (tuple, list)):
        found = f"this data has a {type(batch).__name__} each"
    elif len(batch) != 2:
        found = f"this data has {len(batch)} item{'s' * (len(batch) != 1)} each"
    else:
        name, part = ("targets", batch[1]) if isinstance(batch[0], Tensor) else ("inputs", batch[0])
        found = f"{name} of this data are not tensors or numbers: each is a {type(part).__name__}"
    hint = "Return those two, or set task to the import path of your own, such as task=mine.Task"
    raise DataError("D004", f"takes {wanted}, and {found}", key="task", value=task, suggestion=hint)


def _names_otherwise(labels: Tensor, task: str) -> bool:
    """Return True if labels name classes in another way than by whole numbers."""
    return task == "classification" and (labels.is_floating_point() or labels.dim() > 1)


def _is_image(sample: Any) -> bool:
    return isinstance(sample, Tensor) and sample.dtype == torch.uint8 and sample.dim() == 3


def _labels(dataset: Any, source: DatasetSource) -> Tensor:
    targets = getattr(dataset, "targets", None)
    # A transform may make something else of them.
    if targets is not None and getattr(dataset, "target_transform", None) is None:
        with contextlib.suppress(Exception):
            return torch.as_tensor(targets)
    if getattr(dataset, "classes", None) is not None or getattr(dataset, "num_classes", None) is not None:
        first = source.fetch(np.zeros(1, np.int64))[1]
        # Only all labels show whether floats are classes or figures.
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return first
    return _scan(source)[1]


def _scan(source: DatasetSource) -> Any:
    """Up to 2,000 samples, spread over the whole."""
    return source.fetch(source.spread(_SCAN_LIMIT))


def _is_tokens(sample: Tensor) -> bool:
    return sample.dim() == 1 and not sample.is_floating_point()


def _stated_classes(dataset: Any) -> int | None:
    """The attribute `num_classes` of a user's dataset, if it has one."""
    stated = getattr(dataset, "num_classes", None)
    if stated is None:
        return None
    try:
        count = operator.index(stated)
    except TypeError:
        count = 0
    if count < 1:
        what = f"{type(dataset).__name__}.num_classes is not a whole number of at least 1"
        raise DataError("D004", what, key="data", value=stated)
    return count


def _info(
    dataset: Any,
    sample: Any,
    labels: Tensor | None,
    task: str,
    trained_on: DataInfo | None,
    all_inputs: Tensor | None = None,
) -> DataInfo:
    """The facts shown by one sample `(input, target)`, the labels, and all inputs if they are in memory."""
    learnt_classes = trained_on.num_classes if trained_on is not None else None
    if isinstance(sample[1], str):
        what = f"labels are numbers, and the first one is the text {sample[1]!r}"
        raise DataError("D004", what, key="data", suggestion="Number the classes from 0")
    inputs, target = sample[0], signed(torch.as_tensor(sample[1]))
    known = target.reshape(1, *target.shape) if labels is None else labels
    shape = tuple(inputs.shape)
    facts: dict[str, Any] = {"input_shape": shape}
    if inputs.dim() == 3:
        kind, facts["in_channels"] = "image", shape[0]
    elif inputs.is_floating_point():
        kind = "features" if inputs.dim() == 1 else "other"
    else:
        kind, facts["context_length"] = ("tokens" if target.shape == inputs.shape else "text"), shape[0]
        facts["vocab_size"] = getattr(dataset, "vocab_size", None)
        if (lengths := getattr(dataset, "lengths", None)) is not None:
            facts |= {"context_length": int(max(lengths)), "input_shape": None}
            facts["pad_id"] = int(getattr(dataset, "pad_id", None) or 0)
    target_kind = kind_of_target(known, shape, task)
    _check_task(task, target_kind, known)
    names = getattr(dataset, "classes", None)
    names = tuple(map(str, names)) if names is not None else None
    stated = _stated_classes(dataset) or (len(names) if names else learnt_classes)
    if task == "auto" and kind == "tokens":
        # As many classes as tokens are the next tokens.
        of_classes = bool(stated) and stated != facts["vocab_size"]
        task = "token_classification" if of_classes else "language_modelling"
        facts["task_reason"] = f"a {'class' if of_classes else 'token'} for each token"
    elif task == "auto":
        task, facts["task_reason"] = infer_task(known, target_kind)
    if facts.get("vocab_size", 0) is None:
        if trained_on is not None:
            facts["vocab_size"] = trained_on.vocab_size
        elif all_inputs is not None:
            # One sample shows only some tokens; predicted targets are tokens, too.
            seen = [all_inputs, known] if task == "language_modelling" else [all_inputs]
            facts["vocab_size"] = max(int(tokens.max()) for tokens in seen) + 1
    if target_kind == "map":
        facts["num_classes"] = 1
    elif task in ("regression", "multilabel"):
        facts["num_classes"] = known.shape[1] if known.dim() > 1 else 1
    elif kind != "tokens" or task == "token_classification":
        if not stated and task == "classification" and known.dim() == 2 and known.shape[1] > 1:
            stated = known.shape[1]
        elif not stated and target_kind != "mask":
            classes = as_classes(known) if _names_otherwise(known, task) else known
            # Labels may be those of some samples.
            stated = count_classes(classes, operator.length_hint(dataset, len(classes)))
        facts["num_classes"] = stated
    return DataInfo(kind=kind, task=task, class_names=names, target_kind=target_kind, **facts)


def _check_task(task: str, target_kind: str, labels: Tensor) -> None:
    """Raise DataError D004 if the config names a task that such labels are not for."""
    what = None
    if task == "semantic_segmentation" and target_kind != "mask":
        what = f"takes a whole number for each pixel of an image, and labels are of {shape_of(labels)}"
    elif task == "multilabel" and (labels.dim() != 2 or target_kind == "mask"):
        what = f"takes a row of zeros and ones for each sample, and labels are of {shape_of(labels)}"
    elif task == "classification" and target_kind in ("mask", "map"):
        what = f"takes one class for each sample, and labels are of {shape_of(labels)}, one for each pixel"
    if what is not None:
        raise DataError("D004", what, key="task", value=task, suggestion="Use task=auto")
