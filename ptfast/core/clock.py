"""The clock of a run, which assigns every second of wall time to a cause."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

STARTED_VARIABLE = "PTFAST_STARTED"
"""Environment variable with the start time of a run, by the monotonic clock."""
STEP = ("data", "transfer", "forward", "teacher", "backward", "gradient_sync", "optimizer", "callbacks")
"""The phases of a training step."""
CAUSES = (
    *("start_up", "warm_up", *STEP),
    *("evaluation", "saving", "logging", "measuring", "closing", "unexplained"),
)
"""All causes that a run's time is assigned to, in display order."""
BETWEEN_STEPS = ("logging", "evaluation", None)
"""Causes on the host while the device may still be training."""
SAMPLED = 17
"""One step in this many is timed on a device. A prime, because loaders stutter every num_workers steps."""


class Clock:
    """The wall time of a run by cause; each mark ends one cause and starts the next.

    Args:
        age_s: seconds elapsed so far, which count as `start_up`.

    Cost: 0.25 us a mark; a training step has four to six marks.
    """

    def __init__(self, age_s: float = 0.0) -> None:
        self.seconds: defaultdict[str | None, float] = defaultdict(float)
        self.cause: str | None = "start_up"
        self._start = self._mark = time.perf_counter() - age_s

    def to(self, cause: str | None) -> None:
        """Assign time to `cause` from now on; None assigns it to no cause."""
        now = time.perf_counter()
        self.seconds[self.cause] += now - self._mark
        self.cause, self._mark = cause, now

    def elapsed_s(self) -> float:
        """Return the seconds since the start of the run, of all causes."""
        return time.perf_counter() - self._start

    def moment(self) -> tuple[float, float, Any]:
        """Return this moment for `between`: seconds without warm-up and measuring, all seconds, an event."""
        elapsed_s = self.elapsed_s()
        return elapsed_s - self.seconds["warm_up"] - self.seconds["measuring"], elapsed_s, None

    def between(self, begin: tuple[float, float, Any], end: tuple[float, float, Any]) -> float:
        """Return the seconds between two moments, for throughput; on a device, by the device's own time."""
        return end[0] - begin[0]

    @contextmanager
    def gathering(self, cause: str) -> Iterator[None]:
        """Assign all time inside this block to `cause`, ignoring the marks in it."""
        self.to(cause)
        outside, self.seconds = self.seconds, defaultdict(float)
        try:
            yield
        finally:
            self.to(cause)  # wait for the device to finish the work of this block
            inside, self.seconds = self.seconds, outside
            self.seconds[cause] += sum(inside.values())
            self.to(None)

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the same batches; time counts as `data` from each request until the next mark."""
        while True:
            self.to("data")
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def so_far(self, rest: str = "unexplained") -> dict[str, float]:
        """Return seconds by cause without a mark, from any thread; unassigned seconds go to `rest`."""
        booked = {cause: seconds for cause, seconds in self.seconds.copy().items() if cause is not None}
        return booked | {rest: booked.get(rest, 0.0) + self.elapsed_s() - sum(booked.values())}

    def ledger(self) -> dict[str, float]:
        """Return the seconds of all `CAUSES`; `unexplained` is the rest of the wall time."""
        self.to(self.cause)
        booked = {cause: self.seconds.get(cause, 0.0) for cause in CAUSES}
        return booked | {"unexplained": self.elapsed_s() - sum(booked.values())}


class DeviceClock(Clock):
    """A clock for training on an asynchronous device, where times measured on the host mean nothing.

    Events in the device's queue mark sampled steps, and the host's work between steps (`BETWEEN_STEPS`).
    Any other cause first waits for the device. The time since training started is then divided: work
    between steps gets the time between its events, which is the device's wait for it. The steps share the
    rest in the proportions of the sampled steps.

    Args:
        before: the clock that this one continues.
        event: creates an event with `record`, `query`, `synchronize`, and `elapsed_time` in ms.

    Cost: the host's, plus about 5 us a mark in one of `SAMPLED` steps and between steps.
    """

    def __init__(self, before: Clock, event: Callable[[], Any]) -> None:
        super().__init__()
        vars(self).update(vars(before))
        self._event = event
        self._training, self._sampling, self._between, self._steps = False, False, False, 0
        self._marks = deque[tuple[str | None, bool, Any]]()
        """For each mark its cause, whether it lies between steps, and the event that starts it."""
        self._spare: list[Any] = []
        self._spans, self._samples = defaultdict[str, float](float), defaultdict[str, float](float)
        self._between_s = defaultdict["str | None", float](float)

    def to(self, cause: str | None) -> None:
        if not (cause in STEP or cause in BETWEEN_STEPS):
            self._stop_training(cause)
            return
        if not self._training:
            super().to(cause)
            self._training = cause in STEP and cause != "callbacks"
            if not self._training:
                return
        was_marked = self._sampling or self._between
        # A callback may be called in a step or between steps.
        self._between = cause in BETWEEN_STEPS or (cause == "callbacks" and self._between)
        # A loader that marks `data` after `transfer` is still in the same wait for data.
        if cause == "data" and self.cause != "transfer":
            self._steps += 1
            self._sampling = self._steps % SAMPLED == 2
        self._sampling = self._sampling and not self._between
        if self._sampling or self._between or was_marked:
            self._record(cause if self._sampling or self._between else "training")
        self.cause = cause
        if cause == "logging":
            self._collect()

    def ledger(self) -> dict[str, float]:
        self._stop_training(self.cause if self.cause not in STEP else None)
        self._split(self._samples)
        return super().ledger()

    def so_far(self, rest: str = "unexplained") -> dict[str, float]:
        return super().so_far("training" if self._training else rest)

    def moment(self) -> tuple[float, float, Any]:
        event = self._event()
        event.record()
        return (*super().moment()[:2], event)

    def between(self, begin: tuple[float, float, Any], end: tuple[float, float, Any]) -> float:
        paced_s = super().between(begin, end)
        with contextlib.suppress(RuntimeError):
            # Warm-up and measuring do not count for the device's throughput either.
            return begin[2].elapsed_time(end[2]) / 1e3 - (end[1] - begin[1] - paced_s)
        return paced_s

    def _stop_training(self, cause: str | None) -> None:
        """Wait for the device if it trains, divide the training time, and continue with `cause`."""
        if self._training:
            with contextlib.suppress(RuntimeError):  # the device has failed
                self._record("training").synchronize()
            self.cause, self._training, self._sampling, self._between = "training", False, False, False
        super().to(cause)
        self._collect(finished=True)
        for cause, seconds in self._between_s.items():
            self.seconds["training"] -= seconds
            self.seconds[cause] += seconds
        # If no step was sampled, the time of these steps stays in `training` until one is.
        self._split(self._spans)
        self._spare += (event for _, _, event in self._marks)
        for found in (self._marks, self._between_s, self._spans):
            found.clear()

    def _record(self, cause: str | None) -> Any:
        event = self._spare.pop() if self._spare else self._event()
        event.record()
        self._marks.append((cause, self._between, event))
        return event

    def _collect(self, *, finished: bool = False) -> None:
        """Add up the time between the marks that the device has passed: all of them if it has `finished`."""
        with contextlib.suppress(RuntimeError):
            while len(self._marks) > 1 and (finished or self._marks[1][2].query()):
                cause, between, begin = self._marks[0]
                span = begin.elapsed_time(self._marks[1][2])
                self._marks.popleft()
                self._spare.append(begin)
                if between:
                    self._between_s[cause] += span / 1e3
                elif cause not in ("training", None):
                    self._spans[cause] += span
                    self._samples[cause] += span

    def _split(self, spans: dict[str, float]) -> None:
        whole = sum(spans.values())
        if whole > 0:
            seconds = self.seconds.pop("training", 0.0)
            for cause, span in spans.items():
                self.seconds[cause] += seconds * span / whole


def label(cause: str) -> str:
    """Return a cause as displayed."""
    return cause.replace("_", "-" if cause.endswith("_up") else " ")


def for_device(clock: Clock, device: torch.device) -> Clock:
    """Return `clock`, or a `DeviceClock` that continues it if the device is asynchronous and has events."""
    if device.type == "cpu":
        return clock
    import torch

    event = partial(torch.Event, device=device, enable_timing=True)
    try:
        event().record()
    except (RuntimeError, NotImplementedError):
        return clock
    return DeviceClock(clock, event)
