"""The batch pipeline: every stage from samples to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import tee
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ptfast.core.protocols import DataInfo, MicroBatch, StepBatch
from ptfast.core.tensors.trees import map_tensors
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sampling.sampler import InOrder, MicroBatchIndices, Sampler
from ptfast.data.sources.image_files import ImageFiles
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.normalize import Normalizer
from ptfast.data.transforms.row_windows import augmented, cropped

T = TypeVar("T")
Transform = Callable[[Any, int, int], Any]
"""Transforms a micro-batch's data, given the step and the number of the micro-batch in the whole step."""


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
    """Return the batches of one rank from `first_step` up to `last_step`, for training and evaluation.

    The stages, in order:

    1. Order: `Sampler.step` or `InOrder` chooses the samples of each micro-batch, as a function of
       (seed, step). A stream keeps the order in which it is read.
    2. Fetch: raw batches are read and augmented, as a function of (seed, epoch, sample): by `RawBatches` in
       this process or in a `WorkerPool`, or gathered from memory by `MemoryBatches`.
    3. Device: `Prepare` moves them to the device, into the model's layout, and normalizes them.
       `StaticBatches` and `DeviceBatches` keep data there and do stages 1 to 3 for many steps at once.
    4. Prefetch: on CUDA, stages 1 to 3 of the next batch run on a `side` stream during training; `report`
       receives the phase for which time is counted.
    5. Transform: whole micro-batches are changed, as by mixup, as a function of (seed, step, micro-batch).
       `first_micro_batch` is the number of this rank's first micro-batch in a step.

    So batches do not depend on the kind of loader, its workers, resuming or the number of ranks.
    """
    ready = batches.steps(first_step, last_step)
    if batches.prepare is not None:
        ready = on_device(ready, batches.prepare)
    if side is not None:
        ready = prefetched(ready, side, report)
    return transformed(ready, first_step, transforms, first_micro_batch) if transforms else ready


def on_device(batches: Iterator[StepBatch], prepare: Prepare) -> Iterator[StepBatch]:
    """Move raw batches to the device and prepare them for the model."""
    for batch in batches:
        ready = [MicroBatch(prepare(raw), num_samples) for raw, num_samples in batch.micro_batches]
        yield StepBatch(tuple(ready), batch.num_samples)


def transformed(
    batches: Iterator[StepBatch], first_step: int, transforms: Sequence[Transform], first_micro_batch: int
) -> Iterator[StepBatch]:
    """Apply every transform to each micro-batch; the batches start at `first_step`."""
    for step, batch in enumerate(batches, first_step):
        micro_batches: list[MicroBatch] = []
        for number, (data, num_samples) in enumerate(batch.micro_batches, first_micro_batch):
            for transform in transforms:
                data = transform(data, step, number)
            micro_batches.append(MicroBatch(data, num_samples))
        yield StepBatch(tuple(micro_batches), batch.num_samples)


class SideStream:
    """A CUDA stream for transfers. Events order it with the training stream, so the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def fill(self, batches: Iterator[T]) -> tuple[T, Any] | None:
        """Make the next batch on this stream; return it with the event of its end, or None after the last.

        It waits for earlier training kernels, which may still read the memory of freed batches.
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
    """Yield the same batches, each made on `side` while the previous one trains.

    On the training stream, a copy would wait for the previous step's kernels, and each step for its copy.
    On `side` it overlaps with a whole step. `report` receives the phase for which time is counted:
    `transfer` while training waits for a batch on its way, else `data`.

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


@dataclass(frozen=True)
class LoaderOptions:
    """Options for reading batches and copying them to the device."""

    device: torch.device
    normalize: bool = True
    channels_last: bool = False
    """Memory format of images on the device."""
    input_type: torch.dtype = torch.float32
    """Type of normalized images: float32, or autocast's type for a model that would cast them first."""
    kind: str = "plain"
    """`plain` (read in this process), `workers` (processes read whole micro-batches), `memory` (decoded in
    memory, gathered and augmented at once), `device` (the same on the training device), `packed` (as `plain`,
    from memory-mapped files)."""
    reason: str = "as the config says"
    """Reason for this kind, for the panel."""
    workers: int | str = 0
    prefetch: int = 2
    worker_threads: int = 1
    """Threads of each worker process."""
    pin: bool | str = "auto"
    fused: bool = True
    """Gather, augment and normalize images on a GPU in one kernel."""

    @property
    def pins(self) -> bool:
        return self.device.type == "cuda" and self.pin in (True, "auto")

    def describe(self, workers: int) -> str:
        threads = f" of {self.worker_threads} threads" if self.worker_threads > 1 else ""
        return f"{workers} process{'es' * (workers > 1)}{threads}"

    def pool(self, batches: Callable[[Any], Any], workers: int, among: int | None = None) -> WorkerPool:
        return WorkerPool(
            batches, workers, self.prefetch, pin=self.pins, threads=self.worker_threads, among=among
        )


class Prepare:
    """Moves raw batches to the device, brings them into the model's layout and normalizes them.

    Without statistics in `info`, `images` (uint8, channels last) are scaled to 0 to 1, and other inputs are
    not changed. `statistics` contains the applied values.
    """

    def __init__(self, options: LoaderOptions, info: DataInfo, *, images: bool) -> None:
        self.device, self.images, self.channels_last = options.device, images, options.channels_last
        self.fuses = options.fused and images and options.device.type == "cuda"
        self.pin, self._on_host = options.pins, options.device.type == "cpu"
        self.input_type = options.input_type if images else torch.float32
        self.statistics: dict[str, list[float]] | None = None
        if options.normalize:
            self.statistics = info.extra.get("normalize")
        if self.statistics is None and images:
            channels = info.in_channels or 3
            self.statistics = {"mean": [0.0] * channels, "std": [info.extra.get("max_value", 255)] * channels}
        self.layout = torch.channels_last if self.channels_last else torch.contiguous_format
        self._normalizer: Normalizer | None = None
        if self.statistics is not None:
            how = {"images": images, "dtype": self.input_type, "layout": self.layout}
            self._normalizer = Normalizer(**self.statistics, device=self.device, **how)

    def __call__(self, raw: Any) -> Any:
        """Return the batch of a raw one: `(inputs, targets)`, or a user's structure with moved tensors."""
        if isinstance(raw, (tuple, list)) and len(raw) == 2 and isinstance(raw[0], Tensor):
            return self.inputs(raw[0]), self.move(raw[1])
        return self.move(raw)

    def inputs(self, inputs: Tensor) -> Tensor:
        return self.laid_out(self.move(inputs))

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Normalize raw inputs on the device; return images as (batch, channels, height, width)."""
        if self.images:
            if inputs.shape[3] == 1 and not self.channels_last:
                # Strides of a single channel are ambiguous; reshape gives those of a contiguous tensor.
                inputs = inputs.reshape(len(inputs), 1, *inputs.shape[1:3])
            else:
                inputs = inputs.permute(0, 3, 1, 2)
                fuses = self._normalizer is not None and self._normalizer.fuses(inputs)
                inputs = inputs if self.channels_last or fuses else inputs.contiguous()
        elif self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs if self._normalizer is None else self._normalizer(inputs)

    @property
    def mean_and_factor(self) -> tuple[Tensor, Tensor] | None:
        """Mean and factor that normalize inputs."""
        return self._normalizer and self._normalizer.mean_and_factor

    def move(self, value: Any) -> Any:
        """Return `value` with every tensor in it on the device."""
        return value if self._on_host else map_tensors(self._moved, value)

    def _moved(self, tensor: Any) -> Any:
        if self.pin and isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        # Some devices still copy from memory that is not pinned when the host goes on to overwrite it.
        return tensor.to(self.device, non_blocking=self.pin)


CHUNK_BYTES = 64 * 2**20
"""Bytes of normalized data to gather at once from memory."""


StepIndices = Callable[[int], tuple[list[MicroBatchIndices], int]]
"""Returns a rank's micro-batches at a step, before fetching, and the number of samples of the whole step."""


class Batches:
    """The batches of one rank, a pure function of the step. Subclasses implement `steps`."""

    indices_at: StepIndices | None = None
    """The samples of each step; None for a stream."""
    prepare: Prepare | None = None
    """Prepares the batches for the model; None if they are ready."""
    pools: Sequence[WorkerPool] = ()
    workers = 0
    """Number of processes that read the batches, over all pools."""

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` (from 0, over epochs) up to, not including, `last_step`."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the worker processes."""
        for pool in self.pools:
            pool.close()


class SampledBatches(Batches):
    """Batches of samples fetched by index. Unreadable files are reported to `source`."""

    def __init__(
        self,
        sampler: Sampler | InOrder,
        prepare: Prepare,
        fetch: Callable[[MicroBatchIndices], Any] | WorkerPool,
        source: MapSource,
    ) -> None:
        self.indices_at, self._sampler, self.prepare = sampler.step, sampler, prepare
        self._fetch = fetch.fetch if isinstance(fetch, WorkerPool) else partial(map, fetch)
        if isinstance(fetch, WorkerPool):
            self.pools, self.workers = [fetch], fetch.workers
        skips = isinstance(source, ImageFiles) and source.skips
        self._note_unreadable = cast(ImageFiles, source).note_unreadable if skips else None

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        # Workers prefetch micro-batches some steps ahead.
        early, due = tee(self._sampler.steps(first_step, last_step))
        raw_batches = self._fetch(micro_batch for micro_batches, _ in early for micro_batch in micro_batches)
        for micro_batches, num_samples in due:
            fetched: list[MicroBatch] = []
            for micro_batch in micro_batches:
                raw = next(raw_batches)
                if self._note_unreadable is not None:
                    self._note_unreadable(micro_batch.indices, raw[1])
                fetched.append(MicroBatch(raw, micro_batch.num_samples))
            yield StepBatch(tuple(fetched), num_samples)


class ChunkedBatches(Batches):
    """Batches gathered many steps at a time. Subclasses implement `_gather`."""

    def __init__(self, sampler: Sampler, prepare: Prepare, sample_bytes: int) -> None:
        self.sampler, self.indices_at, self._prepare = sampler, sampler.step, prepare
        step_bytes = max(1, sampler.batch_size * sample_bytes)
        self._chunk_steps = max(1, min(1024, CHUNK_BYTES // step_bytes))

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        step = first_step
        while step < last_step:
            _, first, end = self.sampler.plan.epoch_of(step)
            # Chunks start at fixed steps of an epoch.
            start = step - (step - first) % self._chunk_steps
            stop = min(start + self._chunk_steps, end)
            plan = self._planned(start, stop)
            pieces = self._gather(
                [micro_batch for micro_batches, _ in plan for micro_batch in micro_batches], start
            )
            batches: list[StepBatch] = []
            for micro_batches, num_samples in plan:
                ready = [MicroBatch(next(pieces), micro_batch.num_samples) for micro_batch in micro_batches]
                batches.append(StepBatch(tuple(ready), num_samples))
            yield from batches[step - start : last_step - start]
            step = stop

    def _planned(self, start: int, stop: int) -> list[tuple[list[MicroBatchIndices], int]]:
        """Return the micro-batches of the steps from `start` to `stop`, all of one epoch."""
        return [self.sampler.step(step) for step in range(start, stop)]

    def _gather(
        self, micro_batches: list[MicroBatchIndices], first_step: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the inputs and targets of each micro-batch, in order from `first_step` on."""
        raise NotImplementedError


class StaticBatches(ChunkedBatches):
    """Batches of small, unaugmented data, normalized once and kept on the device.

    One gather and one split produce up to 64 MB of batches: a step costs about a microsecond.
    """

    def __init__(self, sampler: Sampler, prepare: Prepare, source: TensorSource) -> None:
        inputs = prepare.inputs(source.inputs)
        super().__init__(sampler, prepare, inputs[0].numel() * inputs.element_size())
        self._targets = prepare.move(source.targets)
        # Rows are gathered from contiguous memory, channels last; channels first is only a view.
        self._permuted = prepare.channels_last and inputs.dim() == 4
        self._inputs = inputs.permute(0, 2, 3, 1).contiguous() if self._permuted else inputs.contiguous()

    def _gather(
        self, micro_batches: list[MicroBatchIndices], first_step: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        parts, stride = [micro_batch.indices for micro_batch in micro_batches], 1
        if any(len(part) % 16 for part in parts[:-1]):
            # Kernels may sum in another order if memory is aligned differently. So each micro-batch starts at
            # a multiple of 16 rows, which are whole cache lines, as a separate tensor would.
            stride = 2
            parts = [each for part in parts for each in (part, np.zeros(-len(part) % 16, np.int64))]
        sizes = [len(part) for part in parts]
        index = self._prepare.move(as_tensor(np.concatenate(parts)))
        inputs, targets = self._inputs.index_select(0, index), self._targets.index_select(0, index)
        if self._permuted:
            inputs = inputs.permute(0, 3, 1, 2)
        return zip(inputs.split(sizes)[::stride], targets.split(sizes)[::stride], strict=True)


@dataclass
class RawBatches:
    """Fetches a micro-batch from the source and augments it; each worker process gets a copy."""

    source: MapSource
    augment: Augment

    def __call__(self, micro_batch: MicroBatchIndices) -> Any:
        source, places = self.source, micro_batch.indices
        if self.augment.resized_crop is None:
            raw = source.fetch(places, micro_batch.epoch)
            return augmented(self.augment, raw, micro_batch) if self.augment else raw
        if not source.crops_originals:
            source = TensorSource(*source.fetch(places, micro_batch.epoch), images=True)
            places = np.arange(len(places))
        return cropped(self.augment, source, micro_batch, places)
