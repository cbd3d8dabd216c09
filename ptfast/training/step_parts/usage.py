"""Memory that a run holds, and how busy it keeps its processors, over time."""

from __future__ import annotations

import contextlib
import time

from ptfast.core.machine import held_memory_bytes, processor_time_s

LEAST_S = 1.0
"""Time between two looks: over less, a share of busy time says little, and a look is no longer cheap."""


class Usage:
    """What has been used since the last look.

    Args:
        device_type: of the run; the memory and the time are those of a GPU where it is one.

    Cost: about 0.1 ms a look on a CPU.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._mark = self._times()

    def look(self) -> dict[str, float]:
        """Figures by name, none too soon after the last; a GPU's busy time takes the package nvidia-ml-py."""
        if time.perf_counter() - self._mark[0] < LEAST_S:
            return {}
        now = self._times()
        wall_s, cores_s = (b - a for a, b in zip(self._mark, now, strict=True))
        self._mark = now
        figures = {"memory_bytes": held_memory_bytes(self._device_type), "cpu_cores": cores_s / wall_s}
        if self._device_type == "cuda":
            import torch

            with contextlib.suppress(ImportError, RuntimeError):
                figures["gpu_use"] = torch.cuda.utilization() / 100
        return figures

    @staticmethod
    def _times() -> tuple[float, float]:
        return time.perf_counter(), processor_time_s()
