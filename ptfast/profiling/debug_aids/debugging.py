"""Debugging aids that slow training down and are off unless asked for."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ptfast.core.errors import ConfigError, NumericsError
from ptfast.profiling.debug_aids.step_phases import PHASES, Phases, watched
from ptfast.run import Run

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

    class ProfiledSteps(Phases):
        def on_step(self, run: Any, step: int) -> None:
            profile.step()

    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        schedule = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    phases = ProfiledSteps(enter, lambda _: opened.pop().__exit__(None, None, None))
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


__all__ = ["debugging"]

Mode = Literal["none", "anomaly", "profiler", "nvtx", "gradcheck", "memory"]
TorchCheck = Literal["none", "gradcheck", "gradgradcheck"]


@contextmanager
def debugging(
    mode: Mode,
    run: Run | None = None,
    *,
    wait: int = 0,
    warmup: int = 0,
    active: int = 1,
    torch_check: TorchCheck = "none",
    operators: bool = False,
) -> Iterator[None]:
    """Train inside this to have the checks of `mode`.

    `anomaly` stops at the first backward function that yields NaN and names it; the traceback of the forward
    call that made it goes to standard error. Cost: several times slower.

    `profiler` records operators in some steps: a trace for chrome://tracing or ui.perfetto.dev, and a table.
    Cost: those steps take up to twice as long, the others nothing.

    `nvtx` marks the phases of every step for NVIDIA's Nsight Systems. Cost: a few microseconds a phase;
    `operators` marks every operator of forward and backward too, at some microseconds for each.

    `gradcheck` compares the gradient of the loss with finite differences before training starts, in float64
    on a few samples. Cost: some thirty forward passes of those samples. `torch_check` adds torch's checks.

    `memory` reports how much memory the phases of some steps take, and what the forward pass keeps for the
    backward pass; on a GPU it also writes a snapshot for pytorch.org/memory_viz. Cost: a thread that looks
    every millisecond, and a Python call for every tensor that is kept.

    Args:
        run: about to be trained; not looked at by `none` and `anomaly`.
        wait: steps before `profiler` and `memory` start, in which caches fill.
        warmup: further steps, in which the profiler runs without recording.
        active: steps that are looked at.
        torch_check: torch's own checks that `gradcheck` makes too; `gradgradcheck` makes both.
        operators: of `nvtx`.

    Raises:
        NumericsError: N001 where a backward function yields NaN, N002 where a gradient does not fit its loss.
        ConfigError: C011 when the run ends before the steps that are to be looked at.
    """
    if mode == "anomaly":
        with _anomaly():
            yield
        return
    if mode == "none" or run is None:
        yield
        return
    steps_left, needed = run.total_steps - run.progress.step, wait + warmup + active
    if mode in ("profiler", "memory") and steps_left < needed:
        what = f"only {steps_left} steps are left to train, and debug={mode} takes {needed}"
        hint = "Lower debug.wait, debug.warmup or debug.active, or train longer"
        raise ConfigError("C011", what, key="debug", value=mode, suggestion=hint)
    if mode == "gradcheck":
        from ptfast.profiling.debug_aids.gradcheck import check_by_torch, check_gradients

        with run.display.status("checking gradients"):
            error = check_gradients(run)
            if torch_check != "none":
                check_by_torch(run, twice=torch_check == "gradgradcheck")
        passed = f"; torch's {torch_check} passes" if torch_check != "none" else ""
        run.display.note(f"gradcheck: gradients match the loss to a relative error of {error:.1e}{passed}")
        yield
    elif mode == "nvtx":
        from ptfast.profiling.debug_aids.step_phases import Phases, watched

        phases = Phases(torch.cuda.nvtx.range_push, lambda _: torch.cuda.nvtx.range_pop())
        with watched(run, phases), torch.autograd.profiler.emit_nvtx(enabled=operators):
            yield
    elif not run.ranks.is_first:
        yield
    elif mode == "profiler":
        with profiled(run, wait=wait, warmup=warmup, active=active):
            yield
    else:
        from ptfast.profiling.debug_aids.memory_profile import Memory
        from ptfast.profiling.debug_aids.step_phases import watched

        memory = Memory(run, wait + warmup, active)
        with watched(run, memory), contextlib.closing(memory):
            yield


@contextmanager
def _anomaly() -> Iterator[None]:
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            yield
    except RuntimeError as error:
        if "returned nan values" not in str(error):
            raise
        raise NumericsError("N001", f"backward pass: {error}") from error
