"""Training batches changed once they are on the device, whoever has loaded them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ptfast.core.protocols import MicroBatch, StepBatch, TrainLoader

Change = Callable[[Any, int, int], Any]
"""What is made of a micro-batch's data at (step, number of the micro-batch in the whole step)."""


class ChangedLoader:
    """A training loader whose micro-batches go through `changes`, in their order.

    Because a change is a function of data, step and micro-batch, the kind of loader, its workers, resuming
    and the number of ranks leave it alone.

    Args:
        first_micro_batch: number of this rank's first micro-batch within a step.
    """

    def __init__(self, loader: TrainLoader, changes: Sequence[Change], first_micro_batch: int) -> None:
        self.plan, self.kind, self.reason = loader.plan, loader.kind, loader.reason
        self.workers = getattr(loader, "workers", 0)
        self._loader, self._changes, self._first = loader, changes, first_micro_batch

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the changed batches of steps `first_step` up to, not including, `last_step`."""
        for step, batch in enumerate(self._loader.steps(first_step, last_step), first_step):
            micro_batches: list[MicroBatch] = []
            for number, (data, num_samples) in enumerate(batch.micro_batches, self._first):
                for change in self._changes:
                    data = change(data, step, number)
                micro_batches.append(MicroBatch(data, num_samples))
            yield StepBatch(tuple(micro_batches), batch.num_samples)

    def close(self) -> None:
        """Stop worker processes."""
        self._loader.close()
