"""Iterable data of unknown length: read in order, resumed by skipping."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from ptfast.data import draws
from ptfast.data.generators import OwnGenerators, seed_all
from ptfast.data.labels import check_range
from ptfast.data.prepare import Prepare
from ptfast.data.sampler import Indices, micro_batch_bounds
from ptfast.data.source import Source
from ptfast.data.workers import failed
from ptfast.errors import DataError, PtfastError
from ptfast.plan import BatchPlan
from ptfast.run import MicroBatch, StepBatch


class IterableSource(Source):
    """A torch `IterableDataset`: samples one after another, again from the start when it ends.

    What it draws from the global generators (torch, numpy, random) is seeded by the pass.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.num_classes: int | None = None
        """Labels are checked against it as they are read."""

    def __len__(self) -> int:
        raise TypeError("iterable data has no length")

    def fetch(self, indices: Indices, epoch: int = 0) -> Any:
        raise TypeError("iterable data is not fetched by index")

    def ignores_labels(self) -> bool:
        # Nobody has seen the labels yet.
        return True

    def first(self) -> Any:
        """The first sample, for a look at it."""
        with OwnGenerators().in_place():
            return next(self.samples())

    def samples(self) -> Iterator[Any]:
        """Samples without end, pass after pass.

        A data set with a method `set_epoch` is told the number of the pass, so that it can shuffle. Seeds the
        global generators: to be advanced inside `OwnGenerators.in_place`.
        """
        epoch = 0
        while True:
            seed_all(draws.key(self.seed, epoch, draws.GLOBAL))
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
            count = 0
            try:
                for sample in self.dataset:
                    count += 1
                    yield sample
            except PtfastError:
                raise
            except Exception as error:
                raise failed(error) from error
            if count == 0:
                if epoch == 0:
                    raise DataError("D002", "the iterable data set yields no samples", key="data")
                return
            epoch += 1


class StreamLoader:
    """Batches of iterable data, one after another as the stream has them.

    Every rank reads the stream and keeps its own micro-batches.
    """

    kind = "plain"
    workers = 0
    reason = "iterable data is read in order"

    def __init__(
        self,
        source: IterableSource,
        prepare: Prepare,
        plan: BatchPlan,
        micro_batches: int,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.plan = plan
        self._source, self._prepare, self._micro_batches = source, prepare, micro_batches
        per_rank = micro_batches // num_ranks
        self._mine = slice(rank * per_rank, (rank + 1) * per_rank)

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` up to, not including, `last_step`; fewer if data ends."""
        samples, generators = self._source.samples(), OwnGenerators()
        with generators.in_place():
            _, skipped, _ = self.plan.batch(first_step)
            next(islice(samples, skipped, skipped), None)
        for step in range(first_step, last_step):
            _, first, end = self.plan.batch(step)
            with generators.in_place():
                batch = list(islice(samples, end - first))
            if len(batch) < end - first:
                return
            mine = micro_batch_bounds(len(batch), self._micro_batches)[self._mine]
            micro_batches = [self._micro_batch(batch, first, *bounds) for bounds in mine]
            yield StepBatch(tuple(micro_batches), len(batch))

    def _micro_batch(self, batch: list[Any], first: int, start: int, stop: int) -> MicroBatch:
        raw = default_collate(batch[start:stop] or batch[:1])
        if self._source.num_classes is not None:
            numbers = range(first + start, first + max(stop, start + 1))
            check_range(raw[1], self._source.num_classes, numbers=numbers)
        return MicroBatch(self._prepare(raw), stop - start)

    def close(self) -> None:
        """Nothing to stop."""
