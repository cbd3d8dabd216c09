"""Data whose next sample does not come, and a signal to the run that waits for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset
from toys import blobs

STUCK_S = 60.0


class Stuck(Dataset[Any]):
    """Falls asleep at one of its reads, counted from 1, if there is a file `stuck` that names a signal.

    Args:
        at: the read, of the process that reads.
        deaf: go on sleeping, whatever is raised.
        val_at: the same of the data that is held out, if there is to be any.
    """

    num_classes = 2

    def __init__(self, at: int = 0, deaf: bool = False, val_at: int | None = None) -> None:
        self.at, self.deaf, self.reads, self.pid = at, deaf, 0, os.getpid()
        self.inputs, self.targets = blobs(100).tensors
        if val_at is not None:
            self.val = Stuck(val_at)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == self.at and Path("stuck").exists():
            self.get_stuck()
        return self.inputs[index], self.targets[index]

    def get_stuck(self) -> None:
        number = signal.Signals[Path("stuck").read_text()]
        # The run is to have done all that it has the data for.
        time.sleep(0.3 if os.getpid() != self.pid else 0)
        end_s = time.monotonic() + STUCK_S
        while time.monotonic() < end_s:
            try:
                os.kill(self.pid, number)
                time.sleep(0.1 if self.deaf else STUCK_S)
            except BaseException:
                if not self.deaf:
                    raise


class StuckStream(IterableDataset[Any]):
    """The same without a length."""

    num_classes = 2

    def __init__(self, at: int) -> None:
        self.rows = Stuck(at)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(100))
