"""Batches on their way to the GPU while another trains: on a stream of their own, one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

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
    copy. One batch ahead, the next is there even when the host has waited for the device to read a figure. A
    copy starts when the step before last has ended, and overlaps with a whole step.

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
