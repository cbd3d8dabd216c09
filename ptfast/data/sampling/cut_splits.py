"""Derives a run's splits from a dataset's: holds out samples, takes a fraction or only a few batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.dataset import Splits
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.sampler import Indices, permutation
from ptfast.data.sampling.splits import SplitRules
from ptfast.data.streams.iterable import IterableSource


def cut_splits(
    splits: Splits, source: Any, val: Duration, seed: int, rules: SplitRules
) -> tuple[Splits, Indices | None]:
    """Split the dataset `source` by the rules; return also the training samples kept, or None for all."""
    train, kept, notes = splits.train, None, [splits.note]
    if isinstance(train, IterableSource):
        rules.reject("iterable data cannot be divided", "test", "folds", "group", "fraction", "overfit")
        if splits.val is not None or val.value == 0:
            return splits, None
        if val.unit != "percent":
            # The default is a percentage, so the user requested this number of samples.
            what, hint = "iterable data cannot be split", "Use data.val=0, or a map-style dataset"
            raise ConfigError("C011", what, key="data.val", value=val, suggestion=hint)
        notes.append("nothing is held out of iterable data")
    elif not getattr(source, "splits_itself", False):
        if splits.test is not None:
            rules.reject("this data has a test split of its own", "test")
        labels = train.known_labels() if splits.info.task == "classification" else None
        classes = labels.numpy() if labels is not None and labels.dim() == 1 else None
        wanted = val if splits.val is None else None
        groups = (
            _groups(splits, source, rules.group)
            if rules.group is not None and (wanted or rules.test)
            else None
        )
        parts = rules.apply(len(train), wanted, seed, classes, groups)
        if len(parts) > 1 or len(parts["train"]) < len(train):
            splits = replace(splits, **{split: train.take(places) for split, places in parts.items()})
            kept = parts["train"]
    notes += [f"val is fold {rules.fold or 0} of {rules.folds}"] * (rules.folds is not None)
    notes += [f"train is {rules.fraction} of what is not held out"] * (rules.fraction is not None)
    if rules.overfit is not None and isinstance(splits.train, MapSource):
        places = permutation(seed, 0, len(splits.train))[: rules.overfit]
        few, kept = splits.train.in_order().take(places), places if kept is None else kept[places]
        splits = replace(splits, train=few, val=few, test=None)
        notes.append("overfit: train and val are the same few batches, not shuffled or augmented")
    return replace(splits, note="; ".join(filter(None, notes))), kept


def _groups(splits: Splits, source: Any, name: str) -> Sequence[Any]:
    """Return the group of each training sample, by a column, an attribute of the dataset, or the paths."""
    found = splits.groups if splits.groups is not None else getattr(source, name, None)
    if found is not None:
        return found
    paths = getattr(splits.train, "paths", [])
    try:
        matches = [re.search(name, path) for path in paths]
    except re.error:
        matches = [None]
    if None in matches or not matches:
        what = "is no column, no attribute of the dataset, and no pattern that is found in every path"
        hint = f"Paths are such as {paths[matches.index(None)]}" if len(paths) else "Leave out data.group"
        raise DataError("D005", what, key="data.group", value=name, suggestion=hint)
    return [match[match.re.groups and 1] for match in matches if match is not None]
