"""Debugging aids, which are off unless asked for."""

from __future__ import annotations

from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import MachineError, PtfastError
from ptfast.core.sections.section import Count, Family, Natural, Section, Unused


class Debug(Section):
    """Looks at a run that slow it down and change nothing in it."""

    mode: Literal["none", "anomaly", "profiler", "nvtx", "gradcheck"] = "none"
    """The aid: NaN, operators and memory, marks for Nsight Systems, or the gradient of the loss."""
    wait: Natural = 5
    """Steps before `profiler` starts."""
    warmup: Natural = 2
    """Further steps, in which `profiler` runs without recording."""
    active: Count = 5
    """Steps that `profiler` looks at."""
    operators: bool = False
    """Let `nvtx` mark every operator too, not the phases of a step alone."""


def marks_for_a_gpu(debug: Debug, device: str) -> PtfastError | None:
    """Refuse marks for Nsight where no CUDA device is used."""
    if debug.mode != "nvtx" or devices.usable_type(device) == "cuda":
        return None
    what, hint = "marks are for a CUDA device, and none is used", "Use debug=profiler"
    return MachineError("E005", what, key="debug", value="nvtx", suggestion=hint)


FAMILY = Family(
    machine_rules=(marks_for_a_gpu,),
    unused=(
        Unused.unless("debug.mode", ("profiler",), "debug.wait", "debug.warmup", "debug.active"),
        Unused.unless("debug.mode", ("nvtx",), "debug.operators"),
    ),
    free_keys=("debug",),
)
