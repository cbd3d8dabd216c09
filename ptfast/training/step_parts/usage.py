"""Memory that a run holds, and how busy it keeps its processors, over time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ptfast.core.machine import held_memory_bytes, processor_time_s

LEAST_S = 1.0
"""Time between two looks: over less, a share of busy time says little, and a look is no longer cheap."""


class Usage:
    """What has been used since the last look.

    Args:
        device_type: of the run; the memory and the time are those of a GPU where it is one.
        warn: receives why a figure cannot be had. It is left out from then on.

    Cost: about 0.1 ms a look on a CPU.
    """

    def __init__(self, device_type: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._asked: dict[str, Callable[[], float]] = {"memory_bytes": lambda: held_memory_bytes(device_type)}
        if device_type == "cuda":
            import torch

            self._asked["gpu_use"] = lambda: torch.cuda.utilization() / 100
        self._mark = self._times()

    def look(self) -> dict[str, float]:
        """Figures by name, none too soon after the last; a GPU's busy time takes the package nvidia-ml-py."""
        if time.perf_counter() - self._mark[0] < LEAST_S:
            return {}
        now = self._times()
        wall_s, cores_s = (b - a for a, b in zip(self._mark, now, strict=True))
        self._mark = now
        figures = {"cpu_cores": cores_s / wall_s}
        for name, ask in [*self._asked.items()]:
            try:
                figures[name] = ask()
            except Exception as error:  # NVML has a class of its own for what MIG and vGPU do not tell
                del self._asked[name]
                if not isinstance(error, ImportError):
                    self._warn(f"{name} is not logged: {type(error).__name__}: {error}")
        return figures

    @staticmethod
    def _times() -> tuple[float, float]:
        return time.perf_counter(), processor_time_s()
