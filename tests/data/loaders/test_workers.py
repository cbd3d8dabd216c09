"""Worker processes that end, hang or cannot send what they read: one error of the data, in its turn."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ptfast.core.errors import DataError, MachineError, PtfastError
from ptfast.data.loaders import worker_processes
from ptfast.data.loaders.worker_processes import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")


@pytest.fixture(autouse=True)
def _forked_and_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no signal tells of it, torch looks every five seconds whether its workers live."""
    monkeypatch.setattr("torch.multiprocessing.get_start_method", lambda: "fork")
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


def reading(batches: Callable[[Any], Any]) -> Iterator[Any]:
    return WorkerPool(batches, 1, 1).fetch(repeat(0, 100))


def interrupt() -> None:
    raise KeyboardInterrupt


def send_too_much() -> torch.Tensor:
    shared = torch.zeros(1).share_memory_()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return shared


@pytest.mark.parametrize(
    ("read", "kind", "says"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            DataError,
            "killed by SIGKILL. It may have run out of",
        ),
        (
            lambda: os._exit(9),
            DataError,
            "dataloader.workers=1: a worker process died: exit code 9. The data",
        ),
        (lambda: os._exit(0), DataError, "a worker process died: exit code 0"),
        (
            lambda: sys.exit(0),
            DataError,
            r"data: the dataset raises SystemExit \(test_workers.py:\d+\): 0",
        ),
        (interrupt, DataError, r"the dataset raises KeyboardInterrupt \("),
        (lambda: {"rows": lambda: None}, DataError, "the dataset raises .*pickle"),
        (send_too_much, MachineError, "ulimit -n: too few .* Raise it"),
    ],
    ids=["kill", "exit 9", "exit 0", "sys.exit", "interrupt", "no pickle", "files"],
)
def test_a_worker_that_fails_is_one_error(
    read: Callable[[], Any], kind: type[PtfastError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        list(reading(lambda share: read()))


def test_a_worker_that_dies_is_told_of_where_a_batch_is_awaited() -> None:
    """Whatever the main thread is at in the meantime goes on."""
    batches = reading(lambda share: os.getpid())
    pid = next(batches)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    with pytest.raises(DataError, match="a worker process died: killed by SIGKILL"):
        list(batches)


def test_a_lock_that_a_killed_worker_kept_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "_CLOSE_S", 0.2)
    pool = WorkerPool(lambda share: os.getpid(), 2, 1)
    batches = pool.fetch(iter(range(9)))
    pid = next(batches)
    pool._iterator._workers_done_event._event._cond.acquire()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match="a worker process died: killed by SIGKILL"):
        list(batches)


def test_a_worker_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "_CLOSE_S", 0.2, raising=False)

    def read(share: Any) -> int:
        time.sleep(share)
        return share

    pool = WorkerPool(read, 2, 1)
    batches = pool.fetch(iter((0, 0, 1000, 1000)))
    assert next(batches) == 0
    time.sleep(0.3)
    start_s = time.monotonic()
    pool.close()
    assert time.monotonic() - start_s < 4
