"""The clock of a run, which books every second of its wall time on a cause."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

STARTED_VARIABLE = "PTFAST_STARTED"
"""Variable with the moment from which the wall time of a run counts, by the clock that nobody sets."""
STEP = ("data", "transfer", "forward", "backward", "gradient_sync", "optimizer", "callbacks")
"""The phases of a training step."""
CAUSES = (
    *("start_up", "warm_up", *STEP),
    *("evaluation", "saving", "logging", "measuring", "closing", "unexplained"),
)
"""All that the time of a run goes to, in the order in which it is shown."""
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

    def pace_s(self) -> float:
        """Seconds since the start without warm-up and measuring, for throughputs."""
        return self.elapsed_s() - self.seconds["warm_up"] - self.seconds["measuring"]

    @contextmanager
    def gathering(self, cause: str) -> Iterator[None]:
        """Book all that happens inside on `cause`, whatever the marks in there say."""
        self.to(cause)
        outside, self.seconds = self.seconds, defaultdict(float)
        try:
            yield
        finally:
            self.to(None)
            inside, self.seconds = self.seconds, outside
            self.seconds[cause] += sum(inside.values())

    def waiting(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches; time goes to `data` while waiting for each, and on until the next mark."""
        while True:
            self.to("data")
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def ledger(self) -> dict[str, float]:
        """Seconds by cause, all of `CAUSES`; `unexplained` is what is left of the wall time."""
        self.to(self.cause)
        booked = {cause: self.seconds.get(cause, 0.0) for cause in CAUSES}
        return booked | {"unexplained": self.elapsed_s() - sum(booked.values())}


class DeviceClock(Clock):
    """A clock of training on a device that works asynchronously, where the host's time means nothing.

    The marks of some steps put events into the device's queue; the host waits for none of them. When it
    leaves training to read a figure, the time since training began is divided in proportion to the events.
    So a batch that the host waits for while the device still has work costs nothing, and one that the device
    waits for costs that wait.

    Args:
        before: the clock so far, which this one continues.
        event: makes an event that keeps the time: with `record`, `synchronize` and `elapsed_time` in ms.

    Cost: as for the host, and some 5 us a mark in one step of `SAMPLED`.
    """

    def __init__(self, before: Clock, event: Callable[[], Any]) -> None:
        super().__init__()
        vars(self).update(vars(before))
        self._event = event
        self._training, self._sampling, self._steps = False, False, 0
        self._events: list[tuple[str | None, Any]] = []
        self._spare: list[Any] = []
        self._samples = defaultdict[str, float](float)

    def to(self, cause: str | None) -> None:
        if cause in STEP and (self._training or cause != "callbacks"):
            # What a loader says while it transfers lies within one wait for data.
            begins = cause == "data" and self.cause != "transfer"
            if not self._training:
                super().to(cause)
                self._training = True
            if begins:
                if self._sampling:
                    self._sample(None)
                self._steps += 1
                self._sampling = self._steps % SAMPLED == 2
            if self._sampling:
                self._sample(cause)
            self.cause = cause
            return
        if self._training:
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                self._sample(None).synchronize()
            self.cause, self._training, self._sampling = "training", False, False
        super().to(cause)
        with contextlib.suppress(RuntimeError):
            # The device is past all events.
            spans = defaultdict[str, float](float)
            for (cause, begin), (_, end) in zip(self._events, self._events[1:], strict=False):
                if cause is not None:
                    spans[cause] += begin.elapsed_time(end)
            self._spare += [event for _, event in self._events]
            self._events.clear()
            for cause, span in spans.items():
                self._samples[cause] += span
            # If no step was sampled, the time of these steps waits for one.
            self._split(spans)

    def ledger(self) -> dict[str, float]:
        self._split(self._samples)
        return super().ledger()

    def _sample(self, cause: str | None) -> Any:
        event = self._spare.pop() if self._spare else self._event()
        event.record()
        self._events.append((cause, event))
        return event

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
