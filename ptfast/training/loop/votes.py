"""Exchange short messages between ranks between steps, and decide whether training stops."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

import torch

from ptfast.core import devices
from ptfast.core.clock import STEP
from ptfast.core.distributed import sum_over_ranks
from ptfast.core.tensors.async_host_copy import AsyncHostCopy
from ptfast.profiling.stragglers import Stragglers
from ptfast.run import Run

EXCHANGE_S = 5.0
"""Approximate maximum time from a signal, or from the end of `run.max_time`, to the next vote."""


class StopReason(str, Enum):
    """Why training ends; the value is the status of the run."""

    LAST_STEP = "finished"
    NO_GAIN = "stopped"
    MAX_TIME = "paused"
    SIGNAL = "preempted"
    CTRL_C = "interrupted"


@dataclass
class Vote:
    """The message of one rank, or of all ranks: sums, except for the signal and `phases_s`."""

    signal: int
    """The largest signal received; 0 for none."""
    late: int
    """Number of ranks that have reached `run.max_time`."""
    due: int
    """1 if it is time for a checkpoint, by the first rank's clock."""
    written: int
    """Number of ranks that have written their shard of the checkpoint."""
    step_s: float
    """Seconds per step."""
    phases_s: list[float]
    """Seconds by phase of a step since the last log line, rank by rank; empty between log lines."""

    def send(self, run: Run) -> AsyncHostCopy:
        """Send the message to all ranks; the host does not wait."""
        rank, world_size, size = run.ranks.rank, run.ranks.world_size, len(STEP)
        pins = run.device.type == "cuda"
        own = torch.zeros(4 + world_size * (1 + size), dtype=devices.sum_dtype(run.device), pin_memory=pins)
        own[:4] = own.new_tensor([self.late, self.due, self.written, self.step_s])
        own[4 + rank] = self.signal
        if self.phases_s:
            at = 4 + world_size + rank * size
            own[at : at + size] = own.new_tensor(self.phases_s)
        return AsyncHostCopy(sum_over_ranks(own.to(run.device, non_blocking=True), run.ranks))


def read_votes(sent: AsyncHostCopy, world_size: int) -> Vote:
    """Return the votes of all ranks as one; waits for them."""
    late, due, written, step_s, *rest = sent.read()
    signals, phases_s = rest[:world_size], rest[world_size:]
    return Vote(int(max(signals)), int(late), int(due), int(written), step_s / world_size, phases_s)


def own_vote(run: Run, step_s: float, phases_s: list[float]) -> Vote:
    """Return the message of this rank after a step."""
    limit_s = run.plan.max_time_s
    late = limit_s is not None and run.clock.elapsed_s() > limit_s
    late = late and run.progress.step < run.total_steps
    due = run.checkpointer.writer.interval_over and run.ranks.is_first
    return Vote(run.stop_signal or 0, late, due, run.checkpointer.writer.is_written, step_s, phases_s)


def stop_reason(run: Run, vote: Vote) -> StopReason | None:
    """Return why training stops by the votes of all ranks, if it does, and record the reason in the run."""
    if vote.signal:
        run.stop_reason = signal.Signals(vote.signal).name
        return StopReason.CTRL_C if vote.signal == signal.SIGINT else StopReason.SIGNAL
    if vote.late:
        run.stop_reason = "reached run.max_time"
        return StopReason.MAX_TIME
    return None


def agree_to_stop(run: Run) -> StopReason | None:
    """Ask all ranks, outside of the steps, why training stops; waits for them."""
    vote = own_vote(run, EXCHANGE_S, [])
    if run.ranks.distributed:
        vote = read_votes(vote.send(run), run.ranks.world_size)
    return stop_reason(run, vote)


class Votes:
    """Lets all ranks agree every few seconds, so that no rank waits for one that has left.

    On CUDA, if steps do not wait for metrics, ranks use the previous votes.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._stragglers = run, Stragglers(run)
        self._sent: AsyncHostCopy | None = None
        self.max_steps = 1
        """Number of steps until the next exchange."""

    def exchange(self, step_s: float, *, defers: bool) -> StopReason | None:
        """Exchange votes with the other ranks after a step, and return why training stops, if it does.

        Args:
            step_s: seconds per step.
            defers: whether the host may use these votes later.
        """
        run, step = self._run, self._run.progress.step
        logs = run.ranks.distributed and step in run.plan.intervals.log_steps
        vote = own_vote(run, step_s, self._stragglers.own() if logs else [])
        if run.ranks.distributed:
            # One rank cannot end a sharded evaluation, so all agree before it.
            evaluates = run.sharded and step in run.plan.intervals.eval_steps
            waits = step >= run.total_steps or evaluates or not defers
            sent, before = vote.send(run), self._sent
            self._sent = sent
            vote = read_votes(sent if waits else before or sent, run.ranks.world_size)
            self._stragglers.receive(vote.phases_s)
        run.checkpointer.writer.poll(due=bool(vote.due), all_written=vote.written == run.ranks.world_size)
        self.max_steps = max(
            1, int(min(EXCHANGE_S, run.checkpointer.writer.every_s or EXCHANGE_S) / max(vote.step_s, 1e-6))
        )
        return stop_reason(run, vote)
