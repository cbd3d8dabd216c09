"""Background writes of checkpoints: a copy in main memory, and a thread that writes it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from ptfast.core.clock import Clock
from ptfast.core.distributed import Ranks, on_all_ranks
from ptfast.core.errors import NumericsError
from ptfast.core.machine import available_memory, usable_cores
from ptfast.core.tensors.async_host_copy import wait_for
from ptfast.core.tensors.checkpoint_files import ShardedDraft, WholeDraft
from ptfast.core.tensors.trees import tensors_in

T = TypeVar("T")

LEAST_BYTES = 4 << 20
"""`saving.background=auto` writes smaller checkpoints in the foreground, because there is little to gain."""

PIECE_BYTES = 8 << 20
"""The size of the pieces that two threads copy."""
NICENESS = 10
"""The niceness of the writing thread, relative to the main thread, until training waits for it."""


class HostCopies:
    """Copies of nested values in main memory, whose buffers are reused for the next copy.

    Copies share storage as the tensors do, and keep their strides, so that the files are the same.

    Cost: one pass over the bytes, and as much main memory. CUDA copies to page-locked memory, in the training
    stream: its next kernel waits for the copy, but the host does not.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Return the size of the buffers."""
        return sum(map(len, self._buffers))

    def take(self, values: T) -> tuple[T, Callable[[], Any]]:
        """Return a deep copy of `values`, and a function that waits until the device has filled it.

        It overwrites the previous copy.
        """
        tensors = [tensor for tensor in tensors_in(values) if _has_storage(tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        sources = [_bytes_of(storage) for storage in storages.values()]
        buffers, kept = list[Tensor](), dict(enumerate(self._buffers))
        for index, source in enumerate(sources):
            buffer = kept.pop(index, None)
            if buffer is None or len(buffer) != len(source) or buffer.is_pinned() != source.is_cuda:
                buffer = torch.empty(len(source), dtype=torch.uint8, pin_memory=source.is_cuda)
            buffers.append(buffer)
        self._buffers = buffers
        _copy([*zip(buffers, sources, strict=True)])
        of_storage = dict(zip(storages, (buffer.untyped_storage() for buffer in buffers), strict=True))
        memo: dict[int, Any] = {}
        for tensor in tensors:
            copied = torch.empty(0, dtype=tensor.dtype)
            storage = of_storage[tensor.untyped_storage()._cdata]
            copied.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        devices = {source.device for source in sources if source.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        return deepcopy(values, memo), lambda: deque(map(wait_for, events), maxlen=0)


class CheckpointWriter:
    """Writes the checkpoints of a run, in the foreground or from a thread, one at a time.

    Training continues once the copy is made. A new checkpoint waits until the previous one is written.

    Args:
        background: write from a thread; `auto` does so from `LEAST_BYTES` on, if the copy takes less than
            half of the free memory.
        every_s: wall time between two saves; None if saves are scheduled by steps.

    Cost: between saves, one check of the thread per log line.
    """

    def __init__(
        self,
        ranks: Ranks,
        clock: Clock,
        background: bool | Literal["auto"] = "auto",
        every_s: float | None = None,
    ) -> None:
        self.background, self.every_s, self._ranks, self._clock = background, every_s, ranks, clock
        self.is_due = False
        """The ranks agree that a checkpoint is due."""
        self._copies, self._saved_s, self._is_stale = HostCopies(), 0.0, False
        self._written: Future[Any] | None = None
        self._thread_id: int | None = None
        self._together = False
        self._publish: Callable[[], None] = lambda: None
        self.states = self.in_background = 0
        """Checkpoints written so far: all, and those written by a thread."""
        self.writing_s = self.longest_stall_s = 0.0
        """Total writing time, also in the background; the longest pause of training for one checkpoint."""

    @property
    def interval_over(self) -> bool:
        """Whether the next checkpoint is due by this rank's clock."""
        return self.every_s is not None and self._clock.elapsed_s() - self._saved_s >= self.every_s

    @property
    def is_written(self) -> bool:
        """Whether this rank's thread has finished writing."""
        return self._written is not None and self._written.done()

    def poll(self, *, due: bool, all_written: bool) -> None:
        """Publish the pending checkpoint if it is written, and record if the next one is `due`.

        Args:
            due: `interval_over` of the first rank, the same on all ranks.
            all_written: whether `is_written` on all ranks. Values from before the last save are ignored.
        """
        if self._together:
            if all_written and not self._is_stale:
                self.finish()
        elif self.is_written:
            self.finish()
        self.is_due, self._is_stale = due and not self._is_stale, False

    def begin(self) -> None:
        """Begin a save on all ranks: wait for the previous checkpoint."""
        self.finish()
        self.is_due, self._is_stale, self._saved_s = False, True, self._clock.elapsed_s()

    def write(
        self,
        draft: WholeDraft | ShardedDraft,
        *,
        check: Sequence[Tensor] = (),
        tell: Callable[[Path], object] = lambda folder: None,
        background: bool = False,
    ) -> None:
        """Write and publish a draft.

        Args:
            check: tensors that must be finite; N001 if they are not, and nothing is written.
            tell: called in the main thread of the first rank, with the folder, once it is in place.
            background: allow a thread to write it while training continues.
        """
        content: Any = draft.content, [*check]
        size, on_gpu = _size_of(content)
        fits = size < available_memory() // 2 + self._copies.num_bytes
        background = background and self.background is not False
        if self.background == "auto":
            background = background and size >= LEAST_BYTES and fits
        if draft.together:
            background = all(on_all_ranks(background, self._ranks.world_size))
        arrived = None
        if background or (on_gpu and fits):
            content, arrived = self._copies.take(content)

        def run() -> Any:
            start_s = time.perf_counter()
            try:
                if background:
                    self._thread_id = threading.get_native_id()
                    _set_niceness(self._thread_id, NICENESS)
                if arrived is not None:
                    arrived()
                values, checked = content
                _check_finite(checked, draft.step)
                return draft.write(values)
            finally:
                self.writing_s += time.perf_counter() - start_s

        def publish(written: Callable[[], Any]) -> None:
            folder = draft.publish(written)
            if self._ranks.is_first:
                tell(folder)

        self._thread_id = None
        self.states += 1
        self.in_background += background
        if not background:
            publish(run)
            return
        # Not a daemon thread: if the interpreter stops one inside of torch, the process aborts.
        pool = ThreadPoolExecutor(1, "ptfast-checkpoint-writer")
        written = pool.submit(run)
        pool.shutdown(wait=False)
        self._together, self._written = draft.together, written
        self._publish = lambda: publish(written.result)

    def finish(self) -> None:
        """Wait until the pending checkpoint is written, and publish it; raises its write error."""
        if self._written is None:
            return
        cause = self._clock.cause
        if self._together or not self.is_written:
            self._clock.to("saving")
        self._wait()
        self._written = None
        try:
            self._publish()
        finally:
            self._publish = lambda: None
            # The callbacks of `tell` mark the clock themselves.
            if self._clock.cause != cause:
                self._clock.to(cause)

    def leave(self) -> None:
        """Wait for the pending write of a failed run. A sharded checkpoint is not published."""
        if self._written is not None:
            self._clock.to("saving")
            self._wait()

    def _wait(self) -> None:
        assert self._written is not None
        if self._thread_id is not None and not self._written.done():
            _set_niceness(self._thread_id, 0)
        wait([self._written])

    def report(self) -> dict[str, float]:
        """Return the statistics of saving for `summary.json`; the clock has the time that training paused."""
        return {
            "states": self.states,
            "in_background": self.in_background,
            "writing_s": self.writing_s,
            "longest_stall_s": self.longest_stall_s,
        }


def _check_finite(weights: Sequence[Tensor], step: int) -> None:
    parts = (torch.view_as_real(part) if part.is_complex() else part for part in weights)
    if not all(bool(end.isfinite()) for part in parts for end in torch.aminmax(part)):
        what = f"weights or buffers are not finite after step {step}"
        hint = "Lower optimizer.lr or clip with gradients.clip_norm=1; the last checkpoint is older"
        raise NumericsError("N001", what, suggestion=hint)


def _size_of(content: Any) -> tuple[int, bool]:
    """Return the bytes of all tensors, and whether any is on CUDA."""
    tensors = [tensor for tensor in tensors_in(content) if _has_storage(tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values()), any(t.is_cuda for t in tensors)


def _set_niceness(thread_id: int, niceness: int) -> None:
    """Set a thread's niceness relative to the main thread; lowering it may need a privilege."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            os.setpriority(
                os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, os.getpid()) + niceness
            )


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if torch.get_num_threads() > 1 or any(source.is_cuda for _, source in pairs) or usable_cores() < 2:
        for buffer, source in pairs:
            buffer.copy_(source, non_blocking=source.is_cuda)
        return
    # The core of the writing thread is still idle: use it for the copy.
    pieces = [
        piece
        for buffer, source in pairs
        for piece in zip(buffer.split(PIECE_BYTES), source.split(PIECE_BYTES), strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        deque(pool.map(lambda piece: piece[0].copy_(piece[1]), pieces), maxlen=0)


def _has_storage(tensor: Any) -> bool:
    """Return True if a tensor can be rebuilt on another storage; other tensors are cloned."""
    plain = type(tensor) is Tensor and tensor.layout == torch.strided
    plain = plain and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return plain and tensor.device.type in ("cpu", "cuda")


def _bytes_of(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
