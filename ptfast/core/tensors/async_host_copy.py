"""Asynchronous copies of numbers from a device to the host, while training continues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AsyncHostCopy:
    """Numbers of a device that the host reads once they have arrived, without draining the device's queue.

    CUDA copies them to page-locked memory, and an event after the copy signals its end. On other devices,
    reading them copies them.

    Args:
        numbers: 1-d, on any device; it must not be written to afterwards.

    Cost: a copy and an event; torch's allocator reuses the page-locked memory.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._copied = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.Event(device=numbers.device)
            self._copied.record()

    def read(self) -> list[float]:
        """Return the numbers. The host waits for their copy if necessary, but not for later work."""
        if self._copied is not None:
            wait_for(self._copied)
        return self._numbers.tolist()


def wait_for(event: Any) -> None:
    """Wait until a device has reached `event`."""
    if not event.query():
        event.synchronize()


def scalars(values: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Stack numbers and 0-d tensors into one tensor on `device`, without making the host wait."""
    return torch.stack(
        [
            value.to(device, dtype)
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=dtype, device=device)
            for value in values
        ]
    )
