"""Any torch dataset by import path, and the facts inferred from its first samples."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from ptfast.core.errors import DataError, described
from ptfast.core.protocols import IGNORE_INDEX, TASKS, DataInfo
from ptfast.core.tensors.trees import map_tensors, tensors_in
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
from ptfast.data.loaders.dataset_source import Collate, DatasetSource, collate_of, is_tokens
from ptfast.data.loaders.sample_form import (
    AS_GIVEN,
    InputOptions,
    SampleForm,
    as_inputs,
    check_labelled,
    converted_types,
    form_of,
    left_out,
    text_classes,
    text_of,
)
from ptfast.data.loaders.worker_processes import as_data_errors
from ptfast.data.map_source import TensorSource
from ptfast.data.sampling.counter_draws import DatasetState, generators_of
from ptfast.data.streams.iterable import IterableSource

_WITH_CLASSES = ("classification", "token_classification")
_WHOLE = (*_WITH_CLASSES, "language_modelling")
"""Tasks whose loss takes int64 labels."""
_SCAN_LIMIT = 2000
"""Samples read to find the classes if the dataset does not name them."""


def adapt(
    dataset: Any,
    *,
    seed: int,
    task: str,
    known: DataInfo | None = None,
    collate: Collate | None = None,
    options: InputOptions = AS_GIVEN,
) -> Splits:
    """Return the splits of a user's dataset: their samples and the facts about them.

    Its attributes `val` and `test` are the held-out splits. Class count and names come from its attributes
    `num_classes` and `classes`, else from `targets`, else from 2,000 of its labels; the input shape comes
    from its first sample. The vocabulary size comes from its attribute `vocab_size`, or from all samples if
    they are in memory or at most 2,000; sequence lengths come from `lengths`.

    Args:
        known: facts of a model's own data, used where this dataset states none.
        collate: makes batches of its samples; None for its own `collate_fn`, or torch's default.
        options: further options for reading samples.

    Raises:
        DataError: D002 if it is empty, D004 if it is iterable and names no classes, D008 if it is not a
            dataset or its first sample cannot be read.
    """
    with as_data_errors(dataset, seen=True):
        splits = _adapt(dataset, seed, task, known, collate, options)
        for name in ("val", "test"):
            held_out = getattr(dataset, name, None)
            if held_out is None:
                continue
            if not (_is_dataset(held_out) or isinstance(held_out, IterableDataset)):
                what = f"its attribute {name} is {described(held_out)}, which is no dataset"
                hint = f"Give it __len__ and __getitem__, or call the attribute something other than {name}"
                raise DataError("D008", what, key="data", suggestion=hint)
            train = _adapt(held_out, seed, task, known or splits.info, collate, options).train
            splits = replace(splits, **{name: train})
    return splits


def _is_dataset(value: Any) -> bool:
    taken = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return taken and not isinstance(value, (type, str, bytes, Mapping, Tensor, np.ndarray))


def _adapt(
    dataset: Any,
    seed: int,
    task: str,
    known: DataInfo | None,
    collate: Collate | None,
    options: InputOptions,
) -> Splits:
    collate, generators = collate_of(dataset, collate), [name for name, _ in generators_of(dataset)]
    notes = [f"batches by {collate.name}"] if collate.is_own else []
    notes += [f"its random generators ({', '.join(generators)}) are seeded by epoch and sample"] * bool(
        generators
    )
    names_given = any(_stated(dataset, name) is not None for name in ("classes", "num_classes"))
    stated = known is not None or names_given
    # Samples for a user's own collate function or task are not interpreted.
    understands = (task in TASKS or task == "auto") and task != "hf" and not collate.is_own
    if isinstance(dataset, IterableDataset):
        source: Any = IterableSource(dataset, seed, collate)
        notes += _understand(dataset, source, [source.first[0]], known, options) if understands else []
        info = _stream_info(dataset, source, task, known, stated)
        return Splits(info, source, note="; ".join(notes))
    if not _is_dataset(dataset):
        what = (
            f"{type(dataset).__name__} is not a torch dataset: it has no __getitem__ and __len__ for samples"
        )
        hint = "torch.utils.data.TensorDataset and StackDataset make one of arrays"
        raise DataError("D008", what, key="data", suggestion=hint)
    if len(dataset) == 0:
        raise DataError("D002", f"{type(dataset).__name__} has no samples", key="data")
    in_memory = getattr(type(dataset), "__getitem__", None) is TensorDataset.__getitem__
    count = len(dataset.tensors) if in_memory and not collate.is_own else 0
    if count == 2 or (count > 2 and understands):
        inputs, targets = dataset.tensors[0], signed(dataset.tensors[1])
        if understands:
            notes += left_out(count) + converted_types(inputs)
            inputs = as_inputs(inputs)
        images = _is_image(inputs[0])
        check_labelled(targets, range(len(targets)))
        info = _info(dataset, (inputs[0], targets[0]), targets, task, known, inputs)
        inputs = inputs.permute(0, 2, 3, 1).contiguous() if images else inputs
        targets = as_classes(targets) if _names_otherwise(targets, info.task) else targets
        source = TensorSource(inputs, targets, images=images)
    else:
        source = DatasetSource(dataset, seed, collate=collate)
        notes += _understand(dataset, source, source.read([0]), known, options) if understands else []
        info = _map_info(dataset, source, task, known)
    classes_from = None if stated else "an attribute num_classes"
    return Splits(info, source, note="; ".join(notes), classes_from=classes_from)


def _stream_info(
    dataset: Any, source: IterableSource, task: str, known: DataInfo | None, stated: bool
) -> DataInfo:
    """Return the facts shown by a stream's first sample; labels are checked as they are read."""
    collate = source.collate
    batch = collate(collate.pairs([source.first[0]], [0]))
    if (info := _opaque_info(dataset, batch, collate, task, known)) is not None:
        return info
    sample = map_tensors(lambda part: part[0], batch[0]), batch[1][0]
    source.images = _is_image(sample[0])
    info = _info(dataset, sample, None, task, known, names=_names(collate))
    if info.num_classes and info.task == "classification" and not stated:
        what, hint = "iterable data must say how many classes there are", "Give it an attribute num_classes"
        raise DataError("D004", what, key="data", suggestion=hint)
    if info.task in _WHOLE:
        translates = _names_otherwise(torch.as_tensor(sample[1])[None], info.task)
        classes = info.num_classes if info.task in _WITH_CLASSES else None
        source.label_check = LabelCheck(classes, as_classes=translates, as_long=True)
    return info


def _map_info(dataset: Any, source: DatasetSource, task: str, known: DataInfo | None) -> DataInfo:
    """Check the labels of a map-style dataset; return the facts shown by them and the first sample."""
    first = source.fetch(np.zeros(1, np.int64))
    if (info := _opaque_info(dataset, first, source.collate, task, known)) is not None:
        return info
    sample = map_tensors(lambda part: part[0], first[0]), first[1][0]
    source.images = _is_image(sample[0])
    shape = getattr(sample[0], "shape", ())
    if isinstance(first[1], Tensor) and kind_of_target(first[1], shape, task) in ("mask", "map"):
        # One mask shows their kind; 2,000 would fill memory.
        return _info(dataset, sample, first[1], task, known)
    labels = _labels(dataset, source)
    check_labelled(labels, source.spread(len(labels)))
    source.ignores_labels = len(labels) != len(dataset) or bool((labels == IGNORE_INDEX).any())
    few = len(dataset) <= _SCAN_LIMIT and is_tokens(sample[0])
    every = _scan(source)[0] if few else None
    info = _info(dataset, sample, labels, task, known, every, _names(source.collate))
    if info.task in _WITH_CLASSES and info.num_classes:
        translates = _names_otherwise(labels, info.task)
        source.label_check = LabelCheck(as_classes=translates)
        labels = as_classes(labels, "train sample") if translates else labels
        if bool((labels == IGNORE_INDEX).all()):
            labels = _scan(source)[1]
        check_labels(labels, max(1, info.num_classes), "train")
        source.label_check = LabelCheck(info.num_classes, as_classes=translates, as_long=True)
    elif info.task in _WHOLE:
        source.label_check = LabelCheck(as_long=True)
    source.all_labels = labels if len(labels) == len(dataset) else None
    # From now on, also seed generators that the first samples created.
    source.seen_labels, source.state = labels, DatasetState(dataset)
    return info


def _understand(
    dataset: Any,
    source: DatasetSource | IterableSource,
    first: list[Any],
    known: DataInfo | None,
    options: InputOptions,
) -> list[str]:
    """Decide from the first sample how samples are read; return notes on it."""
    collate, form = source.collate, form_of(first[0], options)
    pair = first[0] if form is None else form(first[0], 0)
    notes = [] if form is None else [*form.notes]
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and text_of(pair[1]) is not None:
        form = form or SampleForm()
        names = _stated(dataset, "classes") or (known.class_names if known is not None else None)
        if names is None and isinstance(source, DatasetSource):
            targets, places = _listed_targets(dataset), source.spread(_SCAN_LIMIT).tolist()
            numbered = enumerate(targets or ())
            if targets is None or text_of(next(iter(targets), None)) is None:
                samples = source.read(places)
                numbered = [(n, form(each, n)[1]) for n, each in zip(places, samples, strict=True)]
            names = text_classes(numbered)
            notes.append("text labels are numbered in sorted order (an attribute `classes` states another)")
        if names is None:
            what = "iterable data with text labels must say which classes there are"
            raise DataError("D004", what, key="data", suggestion="Give it an attribute classes")
        form = replace(form, classes=tuple(map(str, names)))
    collate.form = form
    batch: Any = None
    with contextlib.suppress(DataError):  # fetching raises it with the number of the sample
        batch = collate(collate.pairs(first, [0]))
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    changed = converted_types(batch[0]) if is_pair else []
    attached = is_pair and any(part.requires_grad for part in tensors_in(batch[0]))
    collate.casts = bool(changed) or attached
    return notes + changed


def _stated(dataset: Any, name: str) -> Any:
    """Return an attribute of a dataset, or of the dataset behind a `Subset`; None if absent."""
    found = getattr(dataset, name, None)
    return _stated(dataset.dataset, name) if found is None and isinstance(dataset, Subset) else found


def _listed_targets(dataset: Any) -> Any:
    """Return a dataset's attribute `targets`, all labels; None if a target transform changes them."""
    return getattr(dataset, "targets", None) if getattr(dataset, "target_transform", None) is None else None


def _names(collate: Collate) -> tuple[str, ...] | None:
    """Return the class names of text labels, if any."""
    return None if collate.form is None else collate.form.classes


def _opaque_info(
    dataset: Any, batch: Any, collate: Collate, task: str, known: DataInfo | None
) -> DataInfo | None:
    """Return the facts a dataset states, if only the user's task can interpret a batch; else None."""
    inputs = batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    is_pair = next(tensors_in(inputs), None) is not None
    if is_pair and isinstance(target := batch[1], (list, tuple)):
        # Collating a target of several parts gives a list of tensors.
        is_pair = bool(target) and not isinstance(target[0], (Tensor, list, tuple, Mapping, str))
    elif is_pair:
        is_pair = not isinstance(batch[1], Mapping)
    built_in = task in TASKS or task == "auto"
    if is_pair and (built_in or not collate.is_own):
        return None
    if not built_in or task == "hf":
        learnt_classes = known.num_classes if known is not None else None
        num_classes, names = _stated_classes(dataset) or learnt_classes, _stated(dataset, "classes")
        names = tuple(map(str, names)) if names is not None else None
        return DataInfo(kind="other", task=task, num_classes=num_classes, class_names=names)
    wanted = "batches of (inputs, targets)" if collate.is_own else "samples of (input, target)"
    found = f"{collate.name} gives" if collate.is_own else "this data has batches of"
    parts = batch if isinstance(batch, (tuple, list)) and not collate.is_own else [batch]
    what = f"takes {wanted}, and {found} {' and '.join(map(described, parts))}"
    hint = "Return those two, or set task to the import path of your own, such as task=mine.Task"
    raise DataError("D004", what, key="task", value=task, suggestion=hint)


def _names_otherwise(labels: Tensor, task: str) -> bool:
    """Return True if class labels are floats or rows, not whole numbers."""
    return task == "classification" and (labels.is_floating_point() or labels.dim() > 1)


def _is_image(sample: Any) -> bool:
    return isinstance(sample, Tensor) and sample.dtype == torch.uint8 and sample.dim() == 3


def _labels(dataset: Any, source: DatasetSource) -> Tensor:
    targets = _listed_targets(dataset)
    if targets is not None:
        form = source.collate.form
        with contextlib.suppress(Exception):
            if form is not None and form.classes:
                targets = [form.numbers[str(text_of(target))] for target in targets]
            return signed(torch.as_tensor(targets))
    if _stated(dataset, "classes") is not None or _stated(dataset, "num_classes") is not None:
        first = source.fetch(np.zeros(1, np.int64))[1]
        # Whether floats are classes or regression targets shows only in all labels.
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return first
    return _scan(source)[1]


def _scan(source: DatasetSource) -> Any:
    """Fetch up to 2,000 samples, spread over the whole dataset."""
    return source.fetch(source.spread(_SCAN_LIMIT))


def _stated_classes(dataset: Any) -> int | None:
    """Return the attribute `num_classes` of a user's dataset, if it has one."""
    stated = _stated(dataset, "num_classes")
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
    names: tuple[str, ...] | None = None,
) -> DataInfo:
    """Return the facts shown by a sample, the labels, all inputs if in memory, and text label `names`."""
    learnt_classes = trained_on.num_classes if trained_on is not None else None
    inputs, target = sample[0], signed(torch.as_tensor(sample[1]))
    known = target.reshape(1, *target.shape) if labels is None else labels
    shape: Any = tuple(getattr(inputs, "shape", ()))
    facts: dict[str, Any] = {"input_shape": shape}
    if not isinstance(inputs, Tensor):
        kind, facts["input_shape"] = "other", None
    elif inputs.dim() == 3:
        kind, facts["in_channels"] = "image", shape[0]
    elif inputs.is_floating_point():
        kind = "features" if inputs.dim() == 1 else "other"
    else:
        kind, facts["context_length"] = ("tokens" if target.shape == inputs.shape else "text"), shape[0]
        facts["vocab_size"] = _stated(dataset, "vocab_size")
        if (lengths := getattr(dataset, "lengths", None)) is not None:
            facts |= {"context_length": int(max(lengths)), "input_shape": None}
            facts["pad_id"] = int(getattr(dataset, "pad_id", None) or 0)
    target_kind = kind_of_target(known, shape, task)
    _check_task(task, target_kind, known)
    names = names or _stated(dataset, "classes")
    names = tuple(map(str, names)) if names is not None else None
    stated = _stated_classes(dataset) or (len(names) if names else learnt_classes)
    if task == "auto" and kind == "tokens":
        # If there are as many classes as tokens, the targets are next tokens.
        of_classes = bool(stated) and stated != facts["vocab_size"]
        task = "token_classification" if of_classes else "language_modelling"
        facts["task_reason"] = f"a {'class' if of_classes else 'token'} for each token"
    elif task == "auto":
        task, facts["task_reason"] = infer_task(known, target_kind)
    if facts.get("vocab_size", 0) is None and trained_on is not None:
        facts["vocab_size"] = trained_on.vocab_size
    elif facts.get("vocab_size", 0) is None and all_inputs is not None:
        # One sample shows only some tokens; in language modelling, targets are tokens, too.
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
            # Labels may cover only some samples.
            stated = count_classes(classes, operator.length_hint(dataset, len(classes)))
        facts["num_classes"] = stated
    return DataInfo(kind=kind, task=task, class_names=names, target_kind=target_kind, **facts)


def _check_task(task: str, target_kind: str, labels: Tensor) -> None:
    """Raise DataError D004 if the labels do not suit the task in the config."""
    what = None
    if task == "semantic_segmentation" and target_kind != "mask":
        what = f"takes a whole number for each pixel of an image, and labels are of {shape_of(labels)}"
    elif task == "multilabel" and (labels.dim() != 2 or target_kind == "mask"):
        what = f"takes a row of zeros and ones for each sample, and labels are of {shape_of(labels)}"
    elif task == "classification" and target_kind in ("mask", "map"):
        what = f"takes one class for each sample, and labels are of {shape_of(labels)}, one for each pixel"
    if what is not None:
        raise DataError("D004", what, key="task", value=task, suggestion="Use task=auto")
