"""Run torchrun's agent in a thread, and watch its ranks from the main thread, which receives signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from subprocess import Popen
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher import api

from ptfast.core.machine import on_main_thread
from ptfast.training.hangs.deadlines import (
    AGENT_S,
    EXIT_BARRIER_S,
    LAST_S,
    LEAVE_S,
    POLL_S,
    REPEATED_S,
    SHUTDOWN_S,
)
from ptfast.training.hangs.hang_supervisor import DUMP


@dataclass
class Ended:
    """How this machine's ranks ended."""

    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes of failed ranks, by rank, in the order in which they left."""
    hung: list[int] = field(default_factory=list)
    """Ranks that hung and were killed."""
    started: bool = False
    """Whether any rank was started."""
    received: int | None = None
    """The first signal the launcher received."""
    error: BaseException | None = None
    """The error that ended the agent itself."""


_Base: Any = api.LocalElasticAgent


class Agent(_Base):
    """Starts this machine's ranks, unless the run is ending."""

    latest: Agent | None = None
    """The newest instance; torch does not return it."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.processes: dict[int, Popen[bytes]] = {}
        self.killed: list[int] = []
        """Ranks that did not exit when torchrun told them to."""
        self.lock, self.ending = threading.Lock(), False
        Agent.latest = self

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        with self.lock:
            self._leave_if_ending()
            ids = super()._start_workers(worker_group)
            handlers = self._pcontext.subprocess_handlers
            self.processes = {
                each.global_rank: handlers[each.local_rank].proc for each in worker_group.workers
            }
            self.killed = []
        return ids

    def _monitor_workers(self, worker_group: Any) -> Any:
        self._leave_if_ending()
        return super()._monitor_workers(worker_group)

    def _shutdown(self, *given: Any, **options: Any) -> None:
        if not self.ending:
            running = {rank: process for rank, process in self.processes.items() if process.poll() is None}
            super()._shutdown(*given, **options)
            self.killed = [rank for rank, each in running.items() if each.poll() == -signal.SIGKILL]
            return
        # The main thread ends the ranks, which would die with this thread, because it started them.
        for process in self.processes.values():
            process.wait()

    def _leave_if_ending(self) -> None:
        if self.ending:
            raise SignalException("the run is ending", signal.SIGTERM)


api.LocalElasticAgent = Agent


def watch(act: Callable[[], Any], names: Sequence[str]) -> Ended:
    """Call `act`, which runs an agent, and wait until its ranks have ended; the signals `names` end them."""
    watcher, Agent.latest = _Watch(), None

    def call() -> None:
        try:
            act()
        except BaseException as error:
            watcher.ended.error = error

    thread = threading.Thread(target=call, name="ptfast-agent", daemon=True)
    # Outside the main thread, signals are left to the program that calls ptfast.
    numbers = [signal.Signals[name] for name in names] if on_main_thread() else []
    previous = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, lambda number, frame: watcher.waiting.append(number))
    try:
        thread.start()
        while thread.is_alive() and not watcher.all_over():
            thread.join(POLL_S)
            watcher.check()
        watcher.check()
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
    watcher.ended.hung = watcher.ended.hung or (Agent.latest.killed if Agent.latest else [])
    # The agent's store has a thread: a forked process that released the store would wait for it forever.
    Agent.latest = None
    return watcher.ended


@dataclass
class _Watch:
    ended: Ended = field(default_factory=Ended)
    processes: dict[int, Popen[bytes]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    """Signals to forward."""
    left: set[int] = field(default_factory=set)
    """Ranks that have ended."""
    received_s: float = float("inf")
    deadline_s: float = float("inf")
    all_left_s: float = float("inf")

    def check(self) -> None:
        """Forward signals, record ranks that have exited, and kill ranks that are late."""
        agent, now, ended = Agent.latest, time.monotonic(), self.ended
        while self.waiting:
            self._pass_on(self.waiting.pop(0), now)
        if agent is None:
            return
        if agent.processes is not self.processes:
            # The ranks were restarted.
            self.processes, ended.codes, ended.hung, self.left = agent.processes, {}, [], set()
            self.all_left_s = float("inf")
            ended.started = True
            if ended.received is None:
                self.deadline_s = float("inf")
        codes = {rank: process.poll() for rank, process in self.processes.items() if rank not in self.left}
        gone = {rank: code for rank, code in codes.items() if code is not None}
        self.left |= gone.keys()
        # Among ranks that exited together, a killed one is the cause.
        ended.codes |= {rank: code for rank, code in sorted(gone.items(), key=lambda each: each[1]) if code}
        if ended.codes or (self.left and ended.received is not None):
            self.deadline_s = min(self.deadline_s, now + LEAVE_S)
        if self.processes and len(self.left) == len(self.processes):
            self.all_left_s = min(self.all_left_s, now)
        elif now > self.deadline_s and not ended.hung:
            ended.hung = [rank for rank in self.processes if rank not in self.left]
            # First let them write their stacks to a file.
            self._send(DUMP)
            time.sleep(POLL_S)
            self._send(signal.SIGKILL)
            self.all_left_s = now

    def _pass_on(self, number: int, now: float) -> None:
        if self.ended.received is None:
            self.ended.received, self.received_s = number, now
            self.deadline_s = min(self.deadline_s, now + SHUTDOWN_S)
        elif now - self.received_s > REPEATED_S:
            self.deadline_s = min(self.deadline_s, now + LAST_S)
        else:
            return
        agent = Agent.latest
        if agent is None:
            return
        with agent.lock:
            agent.ending, self.processes = True, agent.processes
        self._send(number)
        # A stopped process receives the signal only once it continues.
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def all_over(self) -> bool:
        """Whether all ranks are done; the agent may still wait for other machines."""
        agent, now = Agent.latest, time.monotonic()
        if self.ended.received is not None and not self.processes:
            return True
        if agent is None or agent.processes is not self.processes:
            return False
        fails = bool(self.ended.codes or self.ended.hung)
        if fails and self.ended.received is None and agent._remaining_restarts > 0:
            return False
        waits_s = AGENT_S if fails or self.ended.received is not None else EXIT_BARRIER_S
        return now > self.all_left_s + waits_s
