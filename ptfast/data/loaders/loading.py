"""How batches are read and brought to the device, for every loader of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ptfast.data.loaders.worker_processes import WorkerPool


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

    def pool(self, batches: Callable[[Any], Any], workers: int, among: int | None = None) -> WorkerPool:
        """Worker processes that fetch `batches`; the arguments are those of `WorkerPool`."""
        return WorkerPool(
            batches, workers, self.prefetch, pin=self.pins, threads=self.worker_threads, among=among
        )
