"""Batches on their way to the GPU while another trains: on a stream of their own, one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from ptfast.core.tensors.trees import tensors_in

T = TypeVar("T")


class SideStream:
    """A CUDA stream for transfers. The host waits for nothing: the device orders the streams by events.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def catch_up(self) -> None:
        """Have what is filled from here on wait for all that was asked of the device before."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def filling(self) -> AbstractContextManager[Any]:
        """While it is open, copies and kernels go into this stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """The point that the stream is at now."""
        return self._stream.record_event()

    def hand_over(self, batch: Any, mark: Any) -> None:
        """Have the training wait for `mark`, and keep `batch`'s memory until the training is done with it."""
        training = torch.cuda.current_stream(self._device)
        training.wait_event(mark)
        for tensor in tensors_in(batch):
            # The allocator knows only the stream it was made on, and would give the memory away too soon.
            tensor.record_stream(training)


def open_side_stream(device: torch.device) -> SideStream | None:
    """A stream for transfers to `device`; None where there is nothing to transfer, or no streams."""
    return SideStream(device) if device.type == "cuda" else None


def prefetched(
    batches: Iterator[T], side: SideStream, report: Callable[[str], None] = lambda cause: None
) -> Iterator[T]:
    """The same batches, each filled on `side` while the one before it trains.

    On the stream that trains, a copy would wait for the kernels of the step before, and every step for its
    copy. One batch ahead, the next is there even when the host has waited for the device to read a figure.

    Args:
        report: receives what time goes to: `transfer` while the training waits for a batch on its way, else
            `data`.

    Cost: the memory of one more batch. Source: apex's data_prefetcher; DALI does the same.
    """
    side.catch_up()
    following = _fill(batches, side)
    while following is not None:
        batch, mark = following
        following = _fill(batches, side)
        report("transfer")
        side.hand_over(batch, mark)
        report("data")
        yield batch


def _fill(batches: Iterator[T], side: SideStream) -> tuple[T, Any] | None:
    with side.filling():
        batch = next(batches, None)
    return None if batch is None else (batch, side.mark())
