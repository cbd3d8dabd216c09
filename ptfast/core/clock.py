"""The clock of a run, which books every second of its wall time on a cause."""

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
"""Variable with the moment from which the wall time of a run counts, by the clock that is never set."""
STEP = ("data", "transfer", "forward", "teacher", "backward", "gradient_sync", "optimizer", "callbacks")
"""The phases of a training step."""
CAUSES = (
    *("start_up", "warm_up", *STEP),
    *("evaluation", "saving", "logging", "measuring", "closing", "unexplained"),
)
"""All that the time of a run goes to, in the order in which it is shown."""
BETWEEN_STEPS = ("logging", "evaluation", None)
"""What the host turns to while a device may still train."""
SAMPLED = 17
"""One in so many steps is timed on a device. A prime: loaders stutter with the number of their workers."""


class Clock:
    """The wall time of a run by cause, from marks at which one cause ends and the next begins.

    Args:
        age_s: seconds that have gone by already: those of `start_up`, with which a run begins.

    Cost: 0.25 us a mark, of which a training step has four to six.
    """

    def __init__(self, age_s: float = 0.0) -> None:
        self.seconds: defaultdict[str | None, float] = defaultdict(float)
        self.cause: str | None = "start_up"
        self._start = self._mark = time.perf_counter() - age_s

    def to(self, cause: str | None) -> None:
        """From here on, time goes to `cause`; None books it nowhere."""
        now = time.perf_counter()
        self.seconds[self.cause] += now - self._mark
        self.cause, self._mark = cause, now

    def elapsed_s(self) -> float:
        """Seconds since the start of the run, whatever they went to."""
        return time.perf_counter() - self._start

    def moment(self) -> tuple[float, float, Any]:
        """This moment for `between`: seconds without warm-up and measuring, all seconds, a device's event."""
        elapsed_s = self.elapsed_s()
        return elapsed_s - self.seconds["warm_up"] - self.seconds["measuring"], elapsed_s, None

    def between(self, begin: tuple[float, float, Any], end: tuple[float, float, Any]) -> float:
        """Seconds from one moment to a later one, for throughputs; on a device, by its own time."""
        return end[0] - begin[0]

    @contextmanager
    def gathering(self, cause: str) -> Iterator[None]:
        """Book all that happens inside on `cause`, whatever the marks in there say."""
        self.to(cause)
        outside, self.seconds = self.seconds, defaultdict(float)
        try:
            yield
        finally:
            self.to(cause)  # a device has to finish what was begun inside
            inside, self.seconds = self.seconds, outside
            self.seconds[cause] += sum(inside.values())
            self.to(None)

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; time goes to `data` while waiting for each, and on until the next mark."""
        while True:
            self.to("data")
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def so_far(self, rest: str = "unexplained") -> dict[str, float]:
        """Seconds by cause, for any thread: no mark; those that are not booked on one yet go to `rest`."""
        booked = {cause: seconds for cause, seconds in self.seconds.copy().items() if cause is not None}
        return booked | {rest: booked.get(rest, 0.0) + self.elapsed_s() - sum(booked.values())}

    def ledger(self) -> dict[str, float]:
        """Seconds by cause, all of `CAUSES`; `unexplained` is what is left of the wall time."""
        self.to(self.cause)
        booked = {cause: self.seconds.get(cause, 0.0) for cause in CAUSES}
        return booked | {"unexplained": self.elapsed_s() - sum(booked.values())}


class DeviceClock(Clock):
    """A clock of training on a device that works asynchronously, where the host's time means nothing.

    Events in the device's queue mark some steps, and the host's work between steps (`BETWEEN_STEPS`).
    Before any other cause the device is waited for, and the time since training began divided: work
    between steps gets what its events say, the wait that it has cost; the steps share the rest as those
    sampled.

    Args:
        before: the clock so far, which this one continues.
        event: makes an event with `record`, `query`, `synchronize`, and `elapsed_time` in ms.

    Cost: as for the host, and some 5 us a mark in one step of `SAMPLED` and between steps.
    """

    def __init__(self, before: Clock, event: Callable[[], Any]) -> None:
        super().__init__()
        vars(self).update(vars(before))
        self._event = event
        self._training, self._sampling, self._between, self._steps = False, False, False, 0
        self._marks = deque[tuple[str | None, bool, Any]]()
        """Causes, whether they lie between steps, and the events at which they begin."""
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
        # What a loader says while it transfers lies within one wait for data.
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
            # Warming up and measuring are not the device's pace either.
            return begin[2].elapsed_time(end[2]) / 1e3 - (end[1] - begin[1] - paced_s)
        return paced_s

    def _stop_training(self, cause: str | None) -> None:
        """Wait for the device if it trains, divide the time since it began, and go on to `cause`."""
        if self._training:
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                self._record("training").synchronize()
            self.cause, self._training, self._sampling, self._between = "training", False, False, False
        super().to(cause)
        self._collect(finished=True)
        for cause, seconds in self._between_s.items():
            self.seconds["training"] -= seconds
            self.seconds[cause] += seconds
        # If no step was sampled, the time of these steps waits for one.
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
        """Add up the time between marks that the device is past: all if it has `finished`."""
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
    """A cause as people read it."""
    return cause.replace("_", "-" if cause.endswith("_up") else " ")


def for_device(clock: Clock, device: torch.device) -> Clock:
    """`clock`, or its continuation if the device works asynchronously and has events."""
    if device.type == "cpu":
        return clock
    import torch

    event = partial(torch.Event, device=device, enable_timing=True)
    try:
        event().record()
    except (RuntimeError, NotImplementedError):
        return clock
    return DeviceClock(clock, event)
