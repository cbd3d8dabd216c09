"""Worker processes that fetch and augment whole micro-batches, in order, without randomness of their own."""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

from ptfast.errors import DataError, MachineError, PtfastError
from ptfast.machine import die_with_parent


class Failure(NamedTuple):
    """What went wrong in a worker, in a form that any pipe can carry."""

    error: PtfastError


class _Fetch(Dataset[Any]):
    """A data set indexed by shares: one item is one micro-batch."""

    def __init__(self, batches: Callable[[Any], Any]) -> None:
        self._batches = batches

    def __getitem__(self, share: Any) -> Any:
        try:
            raw = self._batches(share)
            # The queue would do it in a thread of its own, where an error ends in waiting for ever.
            _share_memory(raw)
        except PtfastError as error:
            return Failure(error)
        except Exception as error:
            return Failure(failed(error))
        return raw


class WorkerPool:
    """Processes that turn shares into raw batches.

    Worker processes pay where cores are to spare and reading a sample takes long; what they compute is the
    same bits as without them.

    Args:
        batches: fetches one share; copied into every worker.
        workers: processes, >= 1.
        prefetch: micro-batches that each prepares ahead.
        pin: whether batches come in pinned memory.
        start_method: of processes; None for the platform's own.
        threads: of each process.
        among: processes that there are with those of other pools; None for its own.

    Raises:
        DataError: D008 if processes are not forked and `batches` cannot be pickled.
    """

    def __init__(
        self,
        batches: Callable[[Any], Any],
        workers: int,
        prefetch: int,
        *,
        pin: bool = False,
        start_method: str | None = None,
        threads: int = 1,
        among: int | None = None,
    ) -> None:
        self._among = among or workers
        self.workers, self._prefetch, self._pin, self._threads = workers, prefetch, pin, threads
        self._fetch, self._method = _Fetch(batches), start_method or mp.get_start_method()
        self._iterator: Any = None
        if self._method != "fork":
            _check_pickles(batches, self._method)

    def fetch(self, plan: Iterable[Any]) -> Iterator[Any]:
        """Raw batches of `plan`, in its order.

        Raises:
            DataError: D008 for an exception in a worker; a worker's own PtfastError is raised as it is.
        """
        self.close()
        with warnings.catch_warnings():
            # The panel says it in one line.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader = DataLoader(
                self._fetch,
                sampler=plan,  # pyright: ignore[reportArgumentType] # any iterable of indices serves
                batch_size=None,
                num_workers=self.workers,
                prefetch_factor=max(1, self._prefetch),
                pin_memory=self._pin,
                collate_fn=_unchanged,
                worker_init_fn=functools.partial(_start_worker, self._threads),
                multiprocessing_context=self._method,
                # The default draws from the global generator: dropout would differ with and without workers.
                generator=torch.Generator(),
            )
            self._iterator = iterator = iter(loader)
        try:
            yield from _unwrap(iterator)
        except RuntimeError as error:
            if "worker" not in str(error).lower():
                raise
            if "shared memory" in str(error):
                raise failed(error) from None
            raise DataError(
                "D008",
                f"a loader worker died: {str(error).splitlines()[0]}",
                key="dataloader.workers",
                value=self._among,
                suggestion="It may have run out of memory; use fewer workers or dataloader.kind=plain",
            ) from None
        finally:
            if self._iterator is iterator:
                self.close()

    def close(self) -> None:
        """Stop the processes."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown_workers()
            for process in iterator._workers:
                # One that is stuck in a read ignores SIGTERM too, and would hold up the exit of this process.
                process.kill()


def failed(error: Exception) -> PtfastError:
    """The error for what reading a batch has raised."""
    if "shared memory" in str(error):
        hint = "Make it larger (docker run --shm-size=8g), or use dataloader=plain"
        return MachineError(
            "E002", "too small for the batches of the workers", key="/dev/shm", suggestion=hint
        )
    return DataError("D008", f"the data set raised {describe(error)}", key="data")


def describe(error: Exception) -> str:
    """Type, message and place of an exception that a user's data set raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    with contextlib.suppress(Exception):
        return f"{type(error).__name__}: {error}{place}"
    return f"{type(error).__name__}{place}"


def _unwrap(iterator: Iterator[Any]) -> Iterator[Any]:
    for raw in iterator:
        if isinstance(raw, Failure):
            raise raw.error
        yield raw


def _share_memory(raw: Any) -> None:
    if isinstance(raw, torch.Tensor):
        raw.share_memory_()
    elif isinstance(raw, (dict, tuple, list)):
        for item in raw.values() if isinstance(raw, dict) else raw:
            _share_memory(item)


def _unchanged(raw: Any) -> Any:
    return raw


def _start_worker(threads: int, _: int) -> None:
    # The signals of a terminal reach the whole group: workers serve until the parent has saved and closes
    # them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(threads)
    die_with_parent()


def _check_pickles(batches: Any, method: str) -> None:
    try:
        pickle.dumps(batches)
    except Exception as error:
        raise DataError(
            "D008",
            f"the data set cannot be sent to worker processes, which start by {method}: {error}",
            key="data",
            suggestion="Define its class and functions at the top of a module, or use dataloader.kind=plain",
        ) from None
