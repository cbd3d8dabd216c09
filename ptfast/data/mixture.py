"""Mixes several datasets, drawing from each in proportion to its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, PtfastError
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Positive
from ptfast.data.dataset import DataSet, ReadsAsKnown, Splits, as_known, numbered_as
from ptfast.data.map_source import JoinedSource, MapSource
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, permutation
from ptfast.data.sources.custom_dataset import adapt


class Mixture(ReadsAsKnown):
    """Datasets of one kind: images, tables of the same columns, texts, or a user's of one shape.

    An epoch has as many samples as all parts together, drawn from each part in proportion to its weight.

    Args:
        parts: datasets by name, each with its `weight`. The first one defines the classes, the preparation of
            table columns and the tokenizer; others may lack classes, which are matched by name.
        weights: weights of the parts, by name.
    """

    name = "mix"

    def __init__(self, parts: Mapping[str, Any], weights: Mapping[str, Positive]) -> None:
        total = sum(weights.values())
        self.parts, self.shares = parts, {name: weight / total for name, weight in weights.items()}

    def load(self, *, val: Duration, seed: int) -> Splits:
        found: dict[str, Splits] = {}
        for name, part in self.parts.items():
            first = next(iter(found.values())).info if found else None
            try:
                found[name] = self._read(part, self.known or first, val, seed)
            except PtfastError as error:
                raise error.moved("data", f"data.parts.{name}") from error
        sources: dict[str, Any] = {}
        parts: list[Any] = [*found.values()]
        for split in ("train", "val", "test"):
            if own := [part.sources[split] for part in parts if split in part.sources]:
                sources[split] = _joined(own)
        self._part_of = np.repeat(np.arange(len(parts)), [len(part.sources["train"]) for part in parts])
        notes = [", ".join(f"{share:.1%} {name}" for name, share in self.shares.items())]
        notes += [f"{name}: {part.note}" for name, part in found.items() if part.note]
        items = [(name, item) for name, part in found.items() for item in part.fingerprint().items()]
        contents = {f"{key}/{name}": facts for name, (key, facts) in items}
        info = replace(parts[0].info, token_bytes=None)  # which is another in each text
        return Splits.of(info, sources, "; ".join(notes), contents=lambda: contents)

    def _read(self, part: Any, known: DataInfo | None, val: Duration, seed: int) -> Splits:
        """Return the splits of a part, read like the `known` data."""
        if isinstance(part, ReadsAsKnown):
            part.task, part.known = self.task, known
            part.max_length = (known and known.context_length) or part.max_length
        if isinstance(part, DataSet):
            splits = part.load(val=val, seed=seed)
        else:
            splits = adapt(part, seed=seed, task=self.task, known=known)
        if known is not None:
            splits = numbered_as(known.class_names, splits)
            as_known(known, splits.info)
        return splits

    def order(self, kept: Indices | None) -> partial[Indices]:
        """Return the order, a function of (seed, epoch), of the training samples `kept`; None for all."""
        part_of = self._part_of if kept is None else self._part_of[kept]
        ends = np.rint(np.cumsum([*self.shares.values()]) * len(part_of))
        counts = np.diff(ends.astype(np.int64), prepend=0).tolist()
        places = [np.flatnonzero(part_of == number) for number in range(len(counts))]
        for name, place, count in zip(self.parts, places, counts, strict=True):
            if not len(place) or not count:
                what = f"none of the {len(part_of):,} samples of an epoch is its own"
                raise DataError("D002", what, key=f"data.parts.{name}", suggestion="Raise its weight")
        return partial(mixed_order, places, counts)


def _joined(sources: Sequence[Any]) -> MapSource:
    """Join the samples of several sources; raise D008 for a stream."""
    first, *others = sources
    if stream := next((each for each in sources if not isinstance(each, MapSource)), None):
        what, hint = f"a part is read as a stream, {type(stream).__name__}", "Mix data that has a length"
        raise DataError("D008", what, key="data.parts", suggestion=hint)
    if len({each.images for each in sources}) > 1:
        what, hint = "some parts are images and others are not", "Mix data of one kind"
        raise DataError("D008", what, key="data.parts", suggestion=hint)
    if first.joins and all(each.joins and each.columns == first.columns for each in others):
        return first.joined(others)
    if any(getattr(each, "skips", False) for each in sources):
        what = "files are skipped in images alone, and these parts are of several kinds"
        hint = "Leave out on_corrupt=skip"
        raise DataError("D008", what, key="data.parts", suggestion=hint)
    return JoinedSource([*sources])


def mixed_order(places: Sequence[Indices], counts: Sequence[int], seed: int, epoch: int) -> Indices:
    """Draw `counts` samples of the parts at `places`, in a random order; a function of (seed, epoch).

    Each part is read in passes that contain every sample once and continue from epoch to epoch.
    """
    drawn: list[Indices] = []
    for part, (own, count) in enumerate(zip(places, counts, strict=True)):
        first, size, key = epoch * count, len(own), counter_draws.key(seed, counter_draws.PARTS, part)
        passes = range(first // size, (first + count - 1) // size + 1)
        order = np.concatenate([permutation(key, number, size) for number in passes])
        drawn.append(own[order[first % size : first % size + count]])
    return np.concatenate(drawn)[permutation(seed, epoch, sum(counts))]
