"""The processes of a measurement, one a rank, and what they send back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks, barrier, init_process_group
from ptfast.core.errors import EXIT_BUG, EXIT_OK, ParallelError, exit_code_of
from ptfast.core.machine import die_with_parent, is_memory_error
from ptfast.data.build_data import Data
from ptfast.launch.launcher import reported_failure
from ptfast.launch.rank_main import leave, report_failure
from ptfast.techniques.backend.torch_settings import resolve_device

Place = tuple[int, int, int]
"""A process's rank, the number of ranks, and the port where they meet."""
Processes = list[tuple[Any, Connection]]
"""Of each rank, with the connection to it."""
OnResult = Callable[[dict[str, Any]], None]


@dataclass
class TrialRank:
    """A rank of a measurement.

    Args:
        folder: for the files of its runs.
        data: loaded already, if given.
        send: takes each result.
    """

    config: Config
    folder: Path
    ranks: Ranks
    data: Data | None = None
    send: OnResult = lambda _: None

    def report(self, result: dict[str, Any]) -> None:
        """Send a result from the first rank."""
        if self.ranks.is_first:
            self.send(result)

    @contextmanager
    def reporting_lack_of_memory(self, result: dict[str, Any]) -> Iterator[None]:
        """If memory runs out inside, report `result` and end this process, which can no longer be trusted."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_memory_error(error):
                raise
            self.send({**result, "no_room": str(error).splitlines()[0][:200]})
            # The other ranks may wait in a collective for this one: their parent ends them.
            leave(EXIT_BUG if self.ranks.distributed else EXIT_OK)


def start_ranks(target: Callable[..., None], num_ranks: int, method: str, *arguments: Any) -> Processes:
    """Start processes that end with this one, and that Ctrl-C reaches through this one alone.

    Args:
        target: called with a connection, the place of the process (None for a single one) and `arguments`.
        method: `fork`, or `spawn` for a new interpreter.
    """
    context: Any = multiprocessing.get_context(method)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: Processes = []
    # Children inherit blocked signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for rank in range(num_ranks):
            here, there = context.Pipe()
            place = (rank, num_ranks, port) if num_ranks > 1 else None
            process = context.Process(target=_start, args=(os.getpid(), target, there, place, *arguments))
            process.start()
            there.close()
            ranks.append((process, here))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ranks


def _start(parent: int, target: Callable[..., None], *arguments: Any) -> None:
    die_with_parent(parent)
    target(*arguments)


def end_ranks(ranks: Processes) -> None:
    """End the processes."""
    for process, connection in ranks:
        process.kill()
        process.join()
        connection.close()


def join(place: Place | None, config: Config) -> Ranks:
    """Join the ranks of this process's trial."""
    if place is None:
        return Ranks()
    rank, size, port = place
    own = Ranks(rank, rank, size, size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    init_process_group(resolve_device(config.device, own), own, config.parallel.timeout.seconds)
    return own


def measure_once(
    measurement: Callable[..., None],
    composed: Composed,
    config: Config,
    folder: Path,
    num_ranks: int,
    keywords: dict[str, Any],
    on_result: OnResult = lambda _: None,
) -> tuple[list[dict[str, Any]], int | None]:
    """Measure a config in new processes.

    Args:
        measurement: a function of a `TrialRank` and the keywords, which reports what it measures.
        folder: of this measurement alone; made here.
        on_result: called with each result as it comes in.

    Returns:
        The results, and the signal that ended a rank, if one did.
    """
    folder.mkdir()
    sys.stdout.flush()
    results: list[dict[str, Any]] = []
    ranks = start_ranks(_measure, num_ranks, "spawn", measurement, config, folder, keywords)
    at_work, code = {connection: process for process, connection in ranks}, EXIT_OK
    try:
        while at_work and not code:
            ready = wait(list(at_work))
            for connection in [each for each in at_work if each in ready]:
                try:
                    result = connection.recv()
                except (EOFError, ConnectionError):
                    process = at_work.pop(connection)
                    process.join()
                    code = code or process.exitcode
                    continue
                on_result(result)
                results.append(result)
    finally:
        end_ranks(ranks)
    if reported := reported_failure(folder, composed):
        raise reported
    if code > 0 and not (results and "no_room" in results[-1]):
        raise ParallelError("P001", f"the search exited with {code} and gave no reason")
    return results, -code if code < 0 else None


def _measure(
    connection: Connection,
    place: Place | None,
    measurement: Callable[..., None],
    config: Config,
    folder: Path,
    keywords: dict[str, Any],
) -> None:
    try:
        ranks = join(place, config)
        measurement(TrialRank(config, folder, ranks, send=connection.send), **keywords)
        barrier(ranks)
    except Exception as error:
        report_failure(folder, error)
        leave(exit_code_of(error))
    leave(EXIT_OK)
