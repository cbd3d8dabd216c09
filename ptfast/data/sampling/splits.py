"""Divides samples into splits, as a function of only the seed and the samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices


@dataclass(frozen=True)
class SplitRules:
    """Rules for splitting the samples of `train`; fields correspond to keys of the config section `data`."""

    split: Literal["auto", "stratified", "random", "grouped"] = "auto"
    group: str | None = None
    folds: int | None = None
    fold: int | None = None
    fraction: Duration | None = None
    test: Duration | None = None
    overfit: int | None = None
    """In samples."""
    key: str = "data.val"
    """The key named in errors about the number of held-out samples."""

    def reject(self, what: str, *names: str) -> None:
        """Raise ConfigError C011 with the reason `what` if one of the keys `names` is set."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                hint = f"Leave out data.{name}"
                raise ConfigError("C011", what, key=f"data.{name}", value=value, suggestion=hint)

    def apply(
        self, size: int, val: Duration | None, seed: int, classes: Any = None, groups: Any = None
    ) -> dict[str, Indices]:
        """Return the samples of `train`, and of `val` and `test` if they are held out, in ascending order.

        `val` is None if the data has such a split; `classes` and `groups` are per sample, if known.
        Raises C011 for keys that do not apply, D005 for a missing group, D006 for an empty split or class.
        """
        if self.test is not None:
            return self._with_test(size, self.test, val, seed, classes, groups)
        if val is None:
            self.reject("this data has a val split of its own, so none is taken from train", "folds", "group")
        if self.split == "stratified" and classes is None:
            self.reject("this data has no classes that are known beforehand", "split")
        train, held = np.arange(size), np.arange(0)
        if val is not None and (self.folds or val.value):
            order = np.argsort(counter_draws.bits(seed, 0, train, counter_draws.SPLIT), kind="stable")
            held = np.sort(self._held(order, val, classes, groups))
        train = self._fraction(np.delete(train, held), seed, classes)
        return {"train": train, "val": held} if len(held) else {"train": train}

    def _with_test(
        self, size: int, test: Duration, val: Duration | None, seed: int, classes: Any, groups: Any
    ) -> dict[str, Indices]:
        """Hold out `test` first and split the remaining samples, so that all folds share one test split."""
        for_test = replace(self, test=None, folds=None, fraction=None, key="data.test")
        rest, tested = for_test.apply(size, test, seed, classes, groups).values()
        if val is not None and val.unit == "percent":
            # The percentage refers to all samples, as for the test split.
            val = Duration(held_out(size, val), "samples")
        left = (None if each is None else np.asarray(each)[rest] for each in (classes, groups))
        rules = replace(self, test=None, group=None if val is None else self.group)
        parts = rules.apply(len(rest), val, seed, *left)
        return {**{split: rest[places] for split, places in parts.items()}, "test": tested}

    def _held(self, order: Indices, val: Duration, classes: Any, groups: Any) -> Indices:
        """Return the held-out samples, given all samples in a random `order`."""
        size, units = len(order), "samples"
        if groups is not None:
            names = [str(group) for group in np.asarray(groups, object).tolist()]
            if len(names) != size or {"", "None", "nan"} & {*names}:
                what = f"does not name a group for each of the {size:,} samples"
                raise DataError("D005", what, key="data.group", value=self.group)
            # Groups are numbered in random order: that of their first samples.
            numbers = {name: number for number, name in enumerate(dict.fromkeys(names[i] for i in order))}
            groups = np.array([numbers[name] for name in names])
            size, units = len(numbers), "groups"
        strata = None if self.split == "random" else classes
        if self.folds is None:
            count = held_out(len(order), val, self.key)
            if groups is not None:
                return _some_groups(count, groups, val, self.key)
            if strata is not None:
                return _in_proportion(order, count, strata, keep=1)
            if classes is not None:
                # If possible, the last sample of each class is not held out; this rarely changes anything.
                last = len(order) - 1 - np.unique(classes[order[::-1]], return_index=True)[1]
                order = np.concatenate([np.delete(order, last), order[np.sort(last)]])
            return order[:count]
        if self.folds > size:
            what, hint = f"cannot be made of {size:,} {units}", f"Use data.folds={size} or fewer"
            raise DataError("D006", what, key="data.folds", value=self.folds, suggestion=hint)
        if groups is not None:
            return np.flatnonzero(_group_folds(self.folds, groups) == (self.fold or 0))
        if strata is not None:
            codes, sizes = np.unique(strata, return_inverse=True, return_counts=True)[1:]
            order = order[np.argsort(codes[order], kind="stable")]
            # The only sample of a class always stays in training.
            order = order[sizes[codes[order]] > 1]
        return order[self.fold or 0 :: self.folds]

    def _fraction(self, train: Indices, seed: int, classes: Any) -> Indices:
        """Return the samples of `train` that `data.fraction` keeps, some of every class."""
        if (amount := self.fraction) is None:
            return train
        labels = np.zeros(len(train), int) if classes is None else classes[train]
        size, least = len(train), len(np.unique(labels))
        count = round(size * amount.value / 100) if amount.unit == "percent" else int(amount.value)
        if not least <= count <= size:
            what = f"keeps {count:,} of {size:,} training samples of {least:,} class{'es' * (least > 1)}"
            hint = f"Keep {least:,} to {size:,} samples"
            raise DataError("D006", what, key="data.fraction", value=amount, suggestion=hint)
        order = np.argsort(counter_draws.bits(seed, 1, train, counter_draws.SPLIT), kind="stable")
        return train[np.sort(_in_proportion(order, count, labels, keep=0))]


NO_RULES = SplitRules()


def held_out(size: int, val: Duration, key: str = "data.val") -> int:
    """Return how many of `size` samples to hold out for the value `val` of `key`."""
    if val.value == 0:
        return 0
    count = max(1, round(size * val.value / 100)) if val.unit == "percent" else int(val.value)
    if count >= size:
        what = f"holds out {count:,} of {size:,} training samples, which leaves none to train on"
        hint = f"Hold out less, or use {key}=0 for none"
        raise DataError("D006", what, key=key, value=val, suggestion=hint)
    return count


def _group_folds(folds: int, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the fold of each sample: from the largest group on, each goes to the smallest fold so far."""
    sizes = np.bincount(groups)
    of_group, loads = np.zeros_like(sizes), np.zeros(folds, np.int64)
    for group in np.argsort(-sizes, kind="stable"):
        of_group[group] = loads.argmin()
        loads[of_group[group]] += sizes[group]
    return of_group[groups]


def _some_groups(count: int, groups: NDArray[np.int64], val: Duration, key: str) -> Indices:
    """Hold out the first groups with a total close to `count`; groups larger than it are a last resort."""
    sizes = np.bincount(groups)
    order = np.argsort(sizes > count, kind="stable")
    number = 1 + np.abs(np.cumsum(sizes[order]) - count).argmin()
    held = np.flatnonzero(np.isin(groups, order[:number]))
    if number == len(order) or len(held) > 2 * count:
        what = f"holds out {count:,} samples, and the smallest of {len(order):,} groups has {sizes.min():,}"
        raise DataError("D006", what, key=key, value=val, suggestion="Hold out more, in smaller groups")
    return held


def _in_proportion(order: Indices, count: int, classes: Any, keep: int) -> Indices:
    """Take `count` samples in proportion to class sizes: if possible, 1 to all but `keep` of each class."""
    codes, sizes = np.unique(classes, return_inverse=True, return_counts=True)[1:]
    most = sizes - keep if (sizes - keep).sum() >= count else sizes
    shares = sizes * (count / len(order))
    taken = np.clip(np.floor(shares).astype(np.int64), np.minimum(most, 1), most)
    while missing := count - int(taken.sum()):
        # Correct by one sample at a time, in the class that is furthest from its share.
        change = 1 if missing > 0 else -1
        may = taken < most if missing > 0 else taken > int((taken > 1).any())
        taken[np.argmax(np.where(may, change * (shares - taken), -np.inf))] += change
    by_class = order[np.argsort(codes[order], kind="stable")]
    ranks = np.arange(len(order)) - (np.cumsum(sizes) - sizes)[codes[by_class]]
    return by_class[ranks < taken[codes[by_class]]]
