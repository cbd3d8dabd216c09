"""Debugging aids, which are off by default."""

from __future__ import annotations

from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import MachineError, PtfastError
from ptfast.core.sections.section import Count, Family, Natural, Section, Unused


class Debug(Section):
    """Debugging aids that slow a run down without changing its results."""

    mode: Literal["none", "anomaly", "profiler", "nvtx", "gradcheck"] = "none"
    """The aid: find NaN, profile operators and memory, mark phases for Nsight Systems, or check gradients."""
    wait: Natural = 5
    """Steps before `profiler` starts."""
    warmup: Natural = 2
    """Further steps in which `profiler` runs without recording."""
    active: Count = 5
    """Number of steps that `profiler` records."""
    operators: bool = False
    """Let `nvtx` mark every operator, not only the phases of a step."""


def marks_for_a_gpu(debug: Debug, device: str) -> PtfastError | None:
    """Reject marks for Nsight Systems if the run does not use a CUDA device."""
    if debug.mode != "nvtx" or devices.usable_type(device) == "cuda":
        return None
    what, hint = "marks need a CUDA device, but the run uses another device", "Use debug=profiler"
    return MachineError("E005", what, key="debug", value="nvtx", suggestion=hint)


FAMILY = Family(
    machine_rules=(marks_for_a_gpu,),
    unused=(
        Unused.unless("debug.mode", ("profiler",), "debug.wait", "debug.warmup", "debug.active"),
        Unused.unless("debug.mode", ("nvtx",), "debug.operators"),
    ),
    free_keys=("debug",),
)
