"""Numbers that a device has computed, on their way to the host, which trains on meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AsyncHostCopy:
    """Numbers of a device that the host reads once they have arrived, without draining the device's queue.

    From CUDA they are copied to page-locked memory, and an event behind the copy tells when it is done. From
    other devices they come when they are read.

    Args:
        numbers: 1-d, on any device; nothing writes to it any more.

    Cost: a copy and an event; torch keeps the page-locked memory for the next one.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._copied = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = torch.Event(device=numbers.device)
            self._copied.record()

    def read(self) -> list[float]:
        """The numbers. The host waits if they have not arrived yet, and only for what was asked before."""
        if self._copied is not None:
            wait_for(self._copied)
        return self._numbers.tolist()


def wait_for(event: Any) -> None:
    """Return once a device has reached `event`; at once if it already has."""
    if not event.query():
        event.synchronize()


def scalars(values: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers and 0-d tensors as one tensor on `device`, without making the host wait."""
    return torch.stack(
        [
            value.to(device, dtype)
            if isinstance(value, Tensor)
            else torch.full((), value, dtype=dtype, device=device)
            for value in values
        ]
    )
