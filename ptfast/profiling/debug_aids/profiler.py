"""Operators in a few steps: a trace, and a table of those that take most of the time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ptfast.core.run import Run
from ptfast.profiling.debug_aids.step_phases import PHASES, Phases, watched

TRACE, PROFILE = "trace.json", "profile.txt"
"""Files in the run directory: all events, and the table of torch.profiler."""
TOP = 10
"""Operators that the terminal shows."""


@contextmanager
def profiled(run: Run, *, wait: int, warmup: int, active: int) -> Iterator[None]:
    """Record operators in steps `wait + warmup` to `wait + warmup + active` of what is trained inside."""
    # Its library writes to standard error when it starts, stops, and finds no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch import profiler

    activities = [profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)
    opened: list[Any] = []

    def enter(name: str) -> None:
        opened.append(profiler.record_function(name))
        opened[-1].__enter__()

    def write(profile: Any) -> None:
        averages = profile.key_averages()
        sort_by = "self_device_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
        profile.export_chrome_trace(str(run.folder / TRACE))
        (run.folder / PROFILE).write_text(averages.table(sort_by=sort_by, row_limit=100))
        lines.extend(_top_operators(averages, sort_by, active))

    class Steps(Phases):
        def on_step(self, run: Any, step: int) -> None:
            profile.step()

    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        schedule = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    phases = Steps(enter, lambda _: opened.pop().__exit__(None, None, None))
    recording = profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write)
    with recording as profile, watched(run, phases):
        yield
    for line in lines:
        run.display.note(line)


def _top_operators(averages: Any, sort_by: str, active: int) -> list[str]:
    """Lines of the terminal: the phases, then the operators that take most of the time."""
    phases = {event.key: event.cpu_time_total for event in averages if event.key in PHASES}
    whole = sum(phases.values()) or 1
    operators = [event for event in averages if event.key not in PHASES and "ProfilerStep" not in event.key]
    operators.sort(key=lambda event: getattr(event, sort_by), reverse=True)
    total = sum(getattr(event, sort_by) for event in operators) or 1
    shares = ", ".join(f"{name} {phases.get(name, 0) / whole:.0%}" for name in PHASES)
    lines = [f"profiler: {active} steps in {PROFILE} and {TRACE}; time of the host: {shares}"]
    for event in operators[:TOP]:
        time = getattr(event, sort_by)
        lines.append(
            f"  {time / total:4.0%}  {time / active / 1000:9.3f} ms a step  {event.count / active:6g} calls"
            f"  {event.key}"
        )
    return lines
