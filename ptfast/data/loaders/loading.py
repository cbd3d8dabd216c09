"""How batches are read and brought to the device, for every loader of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any, TypeVar

import torch
from torch import Tensor

from ptfast.core.protocols import DataInfo, MicroBatch
from ptfast.core.tensors.trees import map_tensors
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.map_source import BaseSource
from ptfast.data.sampling.sampler import Indices, Share
from ptfast.data.sources.image_files import ImageFiles
from ptfast.data.transforms.normalize import Normalizer


@dataclass(frozen=True)
class ReaderOptions:
    """How batches are read, and how they reach the device."""

    device: torch.device
    normalize: bool = True
    """Bring inputs to mean 0 and deviation 1 by the data's statistics."""
    channels_last: bool = False
    """Memory format of images on the device."""
    kind: str = "plain"
    """`plain` (this process fetches), `workers` (processes fetch whole micro-batches), `memory` (decoded in
    memory, gathered and augmented at once), `device` (the same on the training device), `packed` (as `plain`,
    from memory-mapped files)."""
    reason: str = "as the config says"
    """Why that kind, for the panel."""
    workers: int | str = 0
    """Processes of the kind `workers`, or `auto` for the cores to spare."""
    prefetch: int = 2
    """Micro-batches that each worker prepares ahead."""
    worker_threads: int = 1
    """Of each worker process."""
    pin: bool | str = "auto"
    """Copy through page-locked memory, so that the host does not wait for the transfer."""
    read_ahead: bool = False
    """Read the next training batch in a thread."""

    @property
    def pins(self) -> bool:
        """True if memory is page-locked for this device."""
        return self.device.type == "cuda" and self.pin in (True, "auto")

    def describe(self, workers: int) -> str:
        """So many worker processes, for the panel."""
        threads = f" of {self.worker_threads} threads" if self.worker_threads > 1 else ""
        return f"{workers} process{'es' * (workers > 1)}{threads}"

    def pool(self, batches: Callable[[Any], Any], workers: int, among: int | None = None) -> WorkerPool:
        """A `WorkerPool` that fetches `batches` like this."""
        return WorkerPool(
            batches, workers, self.prefetch, pin=self.pins, threads=self.worker_threads, among=among
        )


T = TypeVar("T")


class SideStream:
    """A CUDA stream for transfers. The host waits for nothing: the device orders the streams by events.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def filling(self) -> AbstractContextManager[Any]:
        """While it is open, copies and kernels go into this stream and wait for the training's so far.

        Those may still read memory of dropped batches, which is used again here.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """The point that the stream is at now."""
        return self._stream.record_event()

    def hand_over(self, mark: Any) -> None:
        """Have the training wait for `mark`."""
        torch.cuda.current_stream(self._device).wait_event(mark)


def open_side_stream(device: torch.device) -> SideStream | None:
    """A stream for transfers to `device`; None where there is nothing to transfer, or no streams."""
    return SideStream(device) if device.type == "cuda" else None


def prefetched(
    batches: Iterator[T], side: SideStream, report: Callable[[str], None] = lambda cause: None
) -> Iterator[T]:
    """The same batches, each filled on `side` while the one before it trains.

    On the stream that trains, a copy would wait for the kernels of the step before, and every step for its
    copy. Here it starts when the step before last has ended, and overlaps with a whole step.

    Args:
        report: receives what time goes to: `transfer` while the training waits for a batch on its way, else
            `data`.

    Cost: the memory of one more batch. Source: apex's data_prefetcher; DALI does the same.
    """
    following = _fill(batches, side)
    while following is not None:
        batch, mark = following
        following = _fill(batches, side)
        report("transfer")
        side.hand_over(mark)
        report("data")
        yield batch


def _fill(batches: Iterator[T], side: SideStream) -> tuple[T, Any] | None:
    with side.filling():
        batch = next(batches, None)
    return None if batch is None else (batch, side.mark())


_LOOK_S = 0.1
"""How often a thread that waits for room looks whether anybody still wants its batches."""
_CLOSE_S = 2.0
"""How long the thread may take to notice that nobody does; one that is stuck ends with the process."""


def read_ahead(batches: Iterator[T]) -> Iterator[T]:
    """The same batches, of which a thread reads one ahead.

    Decoding, gathering and normalising leave the interpreter to others for most of their time. The thread
    ends with the last batch, or when nobody wants more; what goes wrong in it is raised here, in its turn.
    """
    queue: Queue[tuple[T | None, BaseException | None]] = Queue(1)
    unwanted = threading.Event()

    def put(item: tuple[T | None, BaseException | None]) -> bool:
        while not unwanted.is_set():
            try:
                queue.put(item, timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False

    def read() -> None:
        error: BaseException | None = None
        try:
            for batch in batches:
                if not put((batch, None)):
                    return
        except BaseException as caught:
            error = caught
        put((None, error))

    thread = threading.Thread(target=read, name="ptfast-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            batch, error = queue.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        unwanted.set()
        late_s = time.monotonic() + _CLOSE_S
        while thread.is_alive() and time.monotonic() < late_s:
            try:
                queue.get(timeout=_LOOK_S)
            except Empty:
                continue


@dataclass
class Prepare:
    """Brings raw batches of one source onto the device."""

    device: torch.device
    images: bool
    """Raw inputs are uint8 (batch, height, width, channels)."""
    normalizer: Normalizer | None
    channels_last: bool
    """Memory format of 4-d inputs; their shape is (batch, channels, height, width) either way."""
    pin: bool
    """Copy through pinned memory, so that the host does not wait for the transfer."""
    note_unreadable: Callable[[Indices, Tensor], None] | None = None
    """Receives indices and targets of each raw batch."""

    def __post_init__(self) -> None:
        self._on_host = self.device.type == "cpu"

    def __call__(self, raw: Any) -> Any:
        """The batch for a raw one: `(inputs, targets)`, or a user's own structure with its tensors moved."""
        if isinstance(raw, (tuple, list)) and len(raw) == 2 and isinstance(raw[0], Tensor):
            return self.inputs(raw[0]), self.move(raw[1])
        return self.move(raw)

    def micro_batch(self, raw: Any, share: Share) -> MicroBatch:
        if self.note_unreadable is not None:
            self.note_unreadable(share.indices, raw[1])
        return MicroBatch(self(raw), share.num_samples)

    def inputs(self, inputs: Tensor) -> Tensor:
        """Raw inputs on the device, in the model's layout, normalised."""
        return self.laid_out(self.move(inputs))

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Raw inputs that are on the device, in the model's layout, normalised."""
        if self.images:
            inputs = _channels_first(inputs, self.channels_last)
        elif self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs if self.normalizer is None else self.normalizer(inputs)

    def move(self, value: Any) -> Any:
        """`value` with every tensor in it on the device."""
        return map_tensors(self._sent, value)

    def _sent(self, tensor: Any) -> Any:
        if self._on_host:
            return tensor
        if self.pin and isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        # Out of memory that is not pinned, the copy of some devices is still under way when the host goes on
        # to overwrite it.
        return tensor.to(self.device, non_blocking=self.pin)


def build_prepare(source: BaseSource, info: DataInfo, loading: ReaderOptions) -> Prepare:
    """The preparation of `source`'s batches, with the statistics that `info` holds."""
    return Prepare(
        device=loading.device,
        images=source.images,
        normalizer=build_normalizer(info, loading.device, loading.normalize, images=source.images),
        channels_last=loading.channels_last,
        pin=loading.pins,
        note_unreadable=source.note_unreadable if isinstance(source, ImageFiles) and source.skips else None,
    )


def build_normalizer(
    info: DataInfo, device: torch.device, normalize: bool, *, images: bool
) -> Normalizer | None:
    """The normaliser by `info`'s statistics; without them images are scaled to 0 to 1, the rest stays raw."""
    known = info.extra.get("normalize") if normalize else None
    if known is not None:
        return Normalizer(known["mean"], known["std"], device, images=images)
    if images:
        channels = info.in_channels or 3
        return Normalizer(
            [0.0] * channels, [info.extra.get("max_value", 255)] * channels, device, images=True
        )
    return None


def _channels_first(images: Tensor, channels_last: bool) -> Tensor:
    """(batch, height, width, channels) as (batch, channels, height, width), in the memory format wanted."""
    if channels_last:
        return images.permute(0, 3, 1, 2)
    if images.shape[3] == 1:
        # Strides of a lone channel are ambiguous; these are the ones of a plain contiguous tensor.
        return images.reshape(len(images), 1, *images.shape[1:3])
    return images.permute(0, 3, 1, 2).contiguous()
