"""Batches on their way to the GPU while another trains: on a stream of their own, one step ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ptfast.core.protocols import EvalLoader, MicroBatch, StepBatch, TrainLoader

T = TypeVar("T")


class Side(Protocol):
    """A queue of work on the device, beside the one that trains."""

    def catch_up(self) -> None:
        """Have what is filled from here on wait for all that was asked of the device before."""
        ...

    def filling(self) -> AbstractContextManager[Any]:
        """While it is open, copies and kernels go into this queue."""
        ...

    def mark(self) -> Any:
        """The point that the queue has now."""
        ...

    def hand_over(self, batch: Any, mark: Any) -> None:
        """Have the training wait for `mark`, and keep `batch`'s memory until the training is done with it."""
        ...


class SideStream:
    """A CUDA stream for transfers. The host waits for nothing: the device orders the streams by events.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def catch_up(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def filling(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        return self._stream.record_event()

    def hand_over(self, batch: Any, mark: Any) -> None:
        training = torch.cuda.current_stream(self._device)
        training.wait_event(mark)
        for tensor in tensors_in(batch):
            # The allocator knows only the stream it was made on, and would give the memory away too soon.
            tensor.record_stream(training)


def open_side_stream(device: torch.device) -> Side | None:
    """A stream for transfers to `device`; None where there is nothing to transfer, or no streams."""
    return SideStream(device) if device.type == "cuda" else None


def prefetched(
    batches: Iterator[T], side: Side, tell: Callable[[str], None] = lambda cause: None
) -> Iterator[T]:
    """The same batches, each filled on `side` while the one before it trains.

    On the stream that trains, a copy would wait for the kernels of the step before, and every step for its
    copy. One batch ahead, the next is there even when the host has waited for the device to read a figure.

    Args:
        tell: hears what time goes to: `transfer` while the training waits for a batch on its way, and `data`.

    Cost: the memory of one more batch. Source: apex's data_prefetcher; DALI does the same.
    """
    side.catch_up()
    ahead = _fill(batches, side)
    while ahead is not None:
        batch, mark = ahead
        ahead = _fill(batches, side)
        tell("transfer")
        side.hand_over(batch, mark)
        tell("data")
        yield batch


class PrefetchedLoader:
    """A training loader whose batches are filled on a side stream, by `prefetched`."""

    def __init__(
        self, loader: TrainLoader, side: Side, tell: Callable[[str], None] = lambda cause: None
    ) -> None:
        self.plan, self.kind, self.reason = loader.plan, loader.kind, loader.reason
        self.workers = getattr(loader, "workers", 0)
        self._loader, self._side, self._tell = loader, side, tell

    def steps(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yield the batches of steps `first_step` up to, not including, `last_step`."""
        return prefetched(self._loader.steps(first_step, last_step), self._side, self._tell)

    def close(self) -> None:
        """Stop worker processes."""
        self._loader.close()


class PrefetchedEvaluation:
    """An evaluation loader whose batches are filled on a side stream, by `prefetched`."""

    def __init__(self, loader: EvalLoader, side: Side) -> None:
        self.num_samples, self.left_out = loader.num_samples, loader.left_out
        self._loader, self._side = loader, side

    def __iter__(self) -> Iterator[MicroBatch]:
        return prefetched(iter(self._loader), self._side)

    def close(self) -> None:
        """Stop worker processes."""
        self._loader.close()


def _fill(batches: Iterator[T], side: Side) -> tuple[T, Any] | None:
    with side.filling():
        batch = next(batches, None)
    return None if batch is None else (batch, side.mark())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a batch, wherever they are in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
