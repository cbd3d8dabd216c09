"""Worker processes that fetch and augment whole micro-batches, in order and deterministically."""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from ptfast.core.errors import INSTALLED, DataError, MachineError, PtfastError, name_of, summary_of
from ptfast.core.machine import die_with_parent
from ptfast.core.tensors.torch_internals import worker_signals
from ptfast.core.tensors.trees import tensors_in

RAISED = (Exception, SystemExit)
"""Exceptions that are caught from a dataset: its `sys.exit` must not end a run as if it were finished."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run but must not end its workers."""
_END = object()
_CLOSE_S = 2.0
"""Seconds that a worker may take to stop."""


@dataclass
class _Fetch(Dataset[Any]):
    """A dataset indexed by `MicroBatchIndices` that returns raw batches, or the error of reading one."""

    batches: Callable[[Any], Any]

    def __getitem__(self, micro_batch: Any) -> Any:
        try:
            raw = self.batches(micro_batch)
            # The queue would do this in its own thread, where an error would hang the receiver.
            for tensor in tensors_in(raw):
                tensor.share_memory_()
        except PtfastError as error:
            return error
        except BaseException as error:
            # Workers ignore signals, so even a KeyboardInterrupt was raised by the dataset.
            return failed(error)
        return raw


class _Done:
    """Tells workers to exit, with a timeout: a killed worker may hold the lock of torch's event forever."""

    def __init__(self, event: Any) -> None:
        self._event, self._is_set = event, False

    def set(self) -> None:
        told = threading.Thread(target=self._event.set, daemon=True)
        told.start()
        told.join(_CLOSE_S)
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class WorkerPool:
    """Processes that turn `MicroBatchIndices` into raw batches, bit-identical to those read in-process.

    `batches` fetches one micro-batch and is copied into every worker. `among` is the total number of
    processes of this pool and others, and `key` the config key that sets it, for messages.
    """

    def __init__(
        self,
        batches: Callable[[Any], Any],
        workers: int,
        prefetch: int,
        *,
        pin: bool = False,
        threads: int = 1,
        among: int | None = None,
        key: str = "dataloader.workers",
    ) -> None:
        self._among, self._key = among or workers, key
        self.workers, self._prefetch, self._pin, self._threads = workers, prefetch, pin, threads
        self._fetch, self._method = _Fetch(batches), mp.get_start_method()
        self._iterator: Any = None
        if self._method != "fork":
            try:
                pickle.dumps(batches)
            except Exception as error:
                what = (
                    f"the dataset cannot be sent to worker processes, which start by {self._method}: {error}"
                )
                hint = "Define its class and functions at the top of a module, or use dataloader.kind=plain"
                raise DataError("D008", what, key="data", suggestion=hint) from None

    def fetch(self, plan: Iterable[Any]) -> Iterator[Any]:
        """Yield the raw batches of `plan`, in its order.

        Raises:
            DataError: D008 for an exception in a worker; a worker's PtfastError is raised unchanged.
        """
        self.close()
        iterator: Any = None
        try:
            self._iterator = iterator = self._start(plan)
            iterator._workers_done_event = _Done(iterator._workers_done_event)
            worker_signals._remove_worker_pids(id(iterator))
            # Otherwise the iterator would remove them again when it is deleted.
            iterator._worker_pids_set = False
            while (raw := _next(iterator)) is not _END:
                if isinstance(raw, PtfastError):
                    raise raw
                yield raw
        except (RuntimeError, OSError, EOFError) as error:
            if (lack := _lack(error)) is not None:
                raise lack from None
            # Batches of a dead worker cannot be received: the connection to it fails.
            if isinstance(error, RuntimeError) and "worker" not in str(error).lower():
                raise
            raise self._died(iterator) from None
        finally:
            if self._iterator is iterator:
                self.close()

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return

        def kill() -> None:
            for process in iterator._workers:
                process.kill()

        # Workers that are stuck in a read ignore SIGTERM too, and torch would wait for each in turn.
        late = threading.Timer(_CLOSE_S, kill)
        late.start()
        try:
            iterator._shutdown_workers()
        finally:
            late.cancel()
            kill()

    def _start(self, plan: Iterable[Any]) -> Any:
        with warnings.catch_warnings():
            # The panel warns about too many workers itself.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader = DataLoader(
                self._fetch,
                sampler=plan,  # pyright: ignore[reportArgumentType] # any iterable of indices serves
                batch_size=None,
                num_workers=self.workers,
                prefetch_factor=max(1, self._prefetch),
                pin_memory=self._pin,
                collate_fn=_identity,
                worker_init_fn=functools.partial(_start_worker, self._threads),
                multiprocessing_context=self._method,
                # The default draws from the global generator: dropout would differ with and without workers.
                generator=torch.Generator(),
            )
            # Block signals until the new processes ignore them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
            try:
                return iter(loader)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _died(self, iterator: Any) -> DataError:
        workers = [] if iterator is None else iterator._workers
        wait([worker.sentinel for worker in workers], timeout=1.0)
        code = next((worker.exitcode for worker in workers if worker.exitcode is not None), None)
        how = "without an exit code" if code is None else f"exit code {code}"
        hint = "The dataset ended its process, or a library that it uses crashed"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            hint = f"It may have run out of memory: lower {self._key}"
        what = f"a worker process died: {how}"
        return DataError("D008", what, key=self._key, value=self._among, suggestion=hint)


def _next(iterator: Any) -> Any:
    """Return the next batch of a torch loader's iterator, or `_END`.

    When a worker dies, torch's SIGCHLD handler raises wherever the main thread is, even while a checkpoint
    is saved. So workers are registered with it during this wait only, after a check for earlier deaths.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        if in_main_thread:
            worker_signals._set_worker_pids(id(iterator), tuple(worker.pid for worker in iterator._workers))
            worker_signals._error_if_any_worker_fails()
        return next(iterator, _END)
    finally:
        if in_main_thread:
            worker_signals._remove_worker_pids(id(iterator))


def failed(error: BaseException, dataset: Any = None) -> PtfastError:
    """Return the error for an exception in reading a batch; it names the method of the user's `dataset`."""
    if (lack := _lack(error)) is not None:
        return lack
    theirs = dataset is not None or _passes_through(error, None)
    what = f"{'the dataset' if theirs else 'reading a batch'} raises {summary_of(error)}"
    if dataset is None:
        return DataError("D008", what, key="data")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_locals.get("self") is dataset:
            what = f"{frame.f_code.co_name} raises {summary_of(error)}"
            break
    return DataError("D008", what, key="data._target_", value=name_of(dataset))


@contextlib.contextmanager
def as_data_errors(dataset: Any, *, seen: bool = False) -> Iterator[None]:
    """Turn exceptions of a user's dataset into a DataError D008 that names the dataset and the method.

    With `seen`, convert only exceptions that pass through the user's code; others are bugs of ptfast.
    """
    try:
        yield
    except PtfastError:
        raise
    except RAISED as error:
        if seen and not _passes_through(error, dataset):
            raise
        raise failed(error, dataset) from error


def _passes_through(error: BaseException, dataset: Any) -> bool:
    """Return True if a frame of the error lies in a user's file or in a method of the dataset."""
    return any(
        frame.f_locals.get("self") is dataset or not frame.f_code.co_filename.startswith((*INSTALLED, "<"))
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _lack(error: BaseException) -> MachineError | None:
    """Return the error for too few file descriptors or too little shared memory, if `error` is about them."""
    text = str(error)
    if "Too many open files" in text:
        what = "too few for the files of the data and the batches of its workers"
        hint = "Raise it (ulimit -n 4096), or use dataloader=plain"
        return MachineError("E002", what, key="ulimit -n", suggestion=hint)
    if "shared memory" in text:
        hint = "Make it larger (docker run --shm-size=8g), or use dataloader=plain"
        what = "too small for the batches of the workers"
        return MachineError("E002", what, key="/dev/shm", suggestion=hint)
    return None


def _identity(raw: Any) -> Any:
    return raw


def _start_worker(threads: int, _: int) -> None:
    # A terminal signals the whole process group; workers keep serving until the parent saves and closes them.
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)

    # By default the queue's thread drops items that it cannot send, and the parent would wait forever.
    def send_failure(queue: Any, error: Exception, item: Any) -> None:
        if isinstance(item, tuple):
            queue.put((item[0], failed(error)))

    Queue._on_queue_feeder_error = send_failure  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(threads)
    die_with_parent()
