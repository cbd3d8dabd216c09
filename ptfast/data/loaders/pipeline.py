"""The pipeline of batches: every stage between the samples and the training loop, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.data.loaders.loading import Prepare
from ptfast.data.loaders.step_batches import Batches

T = TypeVar("T")
Transform = Callable[[Any, int, int], Any]
"""Changes a micro-batch's data, given the step and the number of the micro-batch in the whole step."""


def batch_pipeline(
    batches: Batches,
    first_step: int,
    last_step: int,
    *,
    side: SideStream | None = None,
    report: Callable[[str], None] = lambda cause: None,
    transforms: Sequence[Transform] = (),
    first_micro_batch: int = 0,
) -> Iterator[StepBatch]:
    """The batches of one rank from `first_step` up to `last_step`, for training and evaluation.

    The stages, in order:

    1. Order: which samples make up each micro-batch, a function of (seed, step): `Sampler.step` or `InOrder`.
       A stream has the order in which it is read.
    2. Fetch: raw batches of these samples, with random changes by (seed, epoch, sample): by `RawBatches` in
       this process, in the processes of a `WorkerPool`, or gathered from memory by `MemoryBatches`.
    3. Device: moved there, brought into the model's layout and normalized, by `Prepare`. `StaticBatches` and
       `DeviceBatches` keep data there: they gather many steps at a time, which is all three stages in one.
    4. Prefetch: on CUDA, stages 1 to 3 of the next batch on a `side` stream while one trains; `report`
       receives what time goes to.
    5. Transform: changes to whole micro-batches, such as mixup, by (seed, step, micro-batch).
       `first_micro_batch` is the number of this rank's first one in a step.

    So neither the kind of loader nor its workers, resuming or the number of ranks changes a batch.
    """
    ready = batches.steps(first_step, last_step)
    if batches.prepare is not None:
        ready = on_device(ready, batches.prepare)
    if side is not None:
        ready = prefetched(ready, side, report)
    return transformed(ready, first_step, transforms, first_micro_batch) if transforms else ready


def on_device(batches: Iterator[StepBatch], prepare: Prepare) -> Iterator[StepBatch]:
    """Raw batches, made ready for the model."""
    for batch in batches:
        ready = [MicroBatch(prepare(raw), num_samples) for raw, num_samples in batch.micro_batches]
        yield StepBatch(tuple(ready), batch.num_samples)


def transformed(
    batches: Iterator[StepBatch], first_step: int, transforms: Sequence[Transform], first_micro_batch: int
) -> Iterator[StepBatch]:
    """Batches from `first_step` on, with every transform applied to each micro-batch."""
    for step, batch in enumerate(batches, first_step):
        micro_batches: list[MicroBatch] = []
        for number, (data, num_samples) in enumerate(batch.micro_batches, first_micro_batch):
            for transform in transforms:
                data = transform(data, step, number)
            micro_batches.append(MicroBatch(data, num_samples))
        yield StepBatch(tuple(micro_batches), batch.num_samples)


class SideStream:
    """A CUDA stream for transfers. The host never waits: the device orders the streams by events."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def fill(self, batches: Iterator[T]) -> tuple[T, Any] | None:
        """The next batch, made on this stream, and a mark of its end; None where `batches` end.

        Kernels of the training so far come first: they may read memory of dropped batches, which is reused.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            batch = next(batches, None)
        return None if batch is None else (batch, self._stream.record_event())

    def hand_over(self, mark: Any) -> None:
        """Make the training stream wait for `mark`."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def open_side_stream(device: torch.device) -> SideStream | None:
    return SideStream(device) if device.type == "cuda" else None


def prefetched(
    batches: Iterator[T], side: SideStream, report: Callable[[str], None] = lambda cause: None
) -> Iterator[T]:
    """The same batches, each filled on `side` while the one before it trains.

    On the training stream a copy would wait for the kernels of the step before, and every step for its copy.
    Here it starts when the step before last has ended, and overlaps with a whole step. `report` receives what
    time goes to: `transfer` while training waits for a batch on its way, else `data`.

    Cost: the memory of one more batch. Source: apex's data_prefetcher; DALI does the same.
    """
    filled = side.fill(batches)
    while filled is not None:
        following = side.fill(batches)
        report("transfer")
        side.hand_over(filled[1])
        report("data")
        yield filled[0]
        filled = following
