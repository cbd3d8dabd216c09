"""Data whose next sample does not come, and a signal to the run that waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from toys import blobs

from ptfast.core.protocols import Callback
from ptfast.core.run_directory import read_json
from ptfast.tasks.ratios import Ratios

STUCK_S = 60.0


def hang() -> None:
    """Send this process a signal, and go on for too long."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STUCK_S)


class Hangs(Callback):
    """Hangs in one of its methods."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step(self, run: Any, step: int) -> None:
        if self.how == "on_step" and step == 3:
            hang()

    def on_evaluation(self, run: Any, step: int, split: str, metrics: dict[str, float]) -> None:
        if self.how == "on_evaluation":
            hang()

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        if self.how == "on_save":
            hang()


class HangingNet(nn.Module):
    """Hangs in its fourth forward pass of training."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(64, num_classes), 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == 4:
            hang()
        return self.layer(images.flatten(1))


class HangingMetric(Ratios):
    def compute(self) -> Any:
        hang()


class HangingSgd(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == 4:
            hang()
        return super().step(closure)


class Talks(Callback):
    """Writes more than anybody reads, and a signal comes meanwhile."""

    def on_step(self, run: Any, step: int) -> None:
        if step == 3:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            print("x" * 1_000_000, flush=True)


class Late:
    """A logger that notes how the run stands as it is closed."""

    def open(self, folder: Path, config: Any) -> None:
        self.folder = folder

    def log(self, record: Any) -> None:
        pass

    def close(self) -> None:
        Path("closed").write_text(str(read_json(self.folder / "summary.json").get("status")))


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
