"""What else keeps the processors busy during a measurement, and how fast they are clocked."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.core.machine import machine_times, processor_time_of, processor_time_s

ROOT = Path("/")
"""Root of the system's files."""
OTHERS_CORES, STEAL_CORES, SLOWED = 0.1, 0.05, 0.9
"""Interference is what takes more of a core than this, or clocks below this part of the highest seen."""


@dataclass(frozen=True)
class ProcessorTimes:
    """Seconds so far, of which two readings give what a stretch of time has cost.

    Cost: about 0.2 ms for a reading.
    """

    wall_s: float
    own_s: float
    """Processor time of this process and of the processes that it has started."""
    busy_s: float | None
    """Processor time of all processes on the CPUs that this one may use; None where nobody says."""
    steal_s: float | None
    """Time that a hypervisor gave to others."""

    @classmethod
    def read(cls) -> ProcessorTimes:
        """Read the clocks of this process, its children and its CPUs."""
        busy_s, steal_s = _machine_times()
        return cls(time.perf_counter(), processor_time_s(), busy_s, steal_s)

    def until(self, later: ProcessorTimes, own_s: float) -> dict[str, Any]:
        """What a stretch up to `later` looks like from outside.

        Args:
            own_s: processor time of all processes of the measurement, on every rank.

        Returns:
            `others_cores` and `steal_cores`: how many cores other processes and other machines took on
            average; `load`, and `mhz` of the CPUs. None for what the system does not say.
        """
        wall_s = max(later.wall_s - self.wall_s, 1e-9)
        others = steal = None
        if self.busy_s is not None and later.busy_s is not None:
            others = max(later.busy_s - self.busy_s - own_s, 0.0) / wall_s
        if self.steal_s is not None and later.steal_s is not None:
            steal = (later.steal_s - self.steal_s) / wall_s
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return {"others_cores": others, "steal_cores": steal, "load": load, "mhz": _mhz()}


def interference(sample: Mapping[str, Any], highest_mhz: float | None = None) -> str:
    """What disturbed a stretch, in a few words; empty where nothing is known to have.

    Args:
        sample: what `ProcessorTimes.until` gave.
        highest_mhz: clock of the fastest stretch to compare with.
    """
    words: list[str] = []
    if (sample.get("others_cores") or 0.0) > OTHERS_CORES:
        words.append(f"others took {sample['others_cores']:.2f} cores")
    if (sample.get("steal_cores") or 0.0) > STEAL_CORES:
        words.append(f"{sample['steal_cores']:.2f} cores were stolen")
    if highest_mhz and sample.get("mhz") and sample["mhz"] < SLOWED * highest_mhz:
        words.append(f"clocked at {sample['mhz']:.0f} of {highest_mhz:.0f} MHz")
    return ", ".join(words)


def wait_for_children(most_s: float = 1.0, look_s: float = 0.02) -> None:
    """Wait until the processes that this one has started have nothing left to do, such as reading ahead."""
    children = [child.pid for child in multiprocessing.active_children() if child.pid]
    end, before = time.perf_counter() + most_s, -1.0
    while children and time.perf_counter() < end:
        now = sum(map(processor_time_of, children))
        if now == before:
            return
        before = now
        time.sleep(look_s)


def _machine_times() -> tuple[float, float] | tuple[None, None]:
    return machine_times(ROOT)


def _mhz() -> float | None:
    """Mean clock of the CPUs that this process may use; None where the system does not say."""
    cpus: Iterable[int] = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    clocks: list[float] = []
    for cpu in cpus:
        try:
            file = ROOT / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq"
            clocks.append(int(file.read_text()) / 1000)
        except (OSError, ValueError):
            return None
    return statistics.mean(clocks) if clocks else None
