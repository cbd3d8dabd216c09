"""Settings of torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Family, OrAuto, Section, Unused
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.parallel import Parallel


class Compile(Section):
    """The parts that `torch.compile` compiles, and how."""

    mode: Literal["none", "blocks", "model", "reduce_overhead", "max_autotune"] = "none"
    """Compile blocks or the model; or the model with CUDA graphs, or autotuned."""
    blocks: str | tuple[str, ...] = "auto"
    """For `blocks`: one or more patterns of module names; `auto` for the repeated blocks."""
    dynamic: bool | OrAuto = "auto"
    """Use one graph for batches of any length; `auto` does so for texts of more than a few lengths."""


def accumulating_in_graphs() -> PtfastError:
    """Return the error for CUDA graphs with gradient accumulation."""
    what = "a CUDA graph overwrites the gradients of the previous micro-batch"
    hint = "Use one micro-batch per rank, or compile=model"
    return ConfigError("C011", what, key="compile", value="reduce_overhead", suggestion=hint)


def allowed_by_ranks(
    compile: Compile, parallel: Parallel, gradients: Gradients, micro_batches: int | None
) -> Iterator[PtfastError]:
    """Reject CUDA graphs if a step has several micro-batches on a rank, and whole models under fsdp."""
    many = parallel.strategy == "single" and (micro_batches or 1) > 1
    if compile.mode == "reduce_overhead" and (many or gradients.accumulate > 1):
        yield accumulating_in_graphs()
    if parallel.strategy == "fsdp" and compile.mode not in ("none", "blocks"):
        what = "parallel=fsdp gathers weights between blocks, so the whole model cannot be compiled"
        yield ConfigError("C011", what, key="compile", value=compile.mode, suggestion="Use compile=blocks")


def compiler(compile: Compile, device: str) -> PtfastError | None:
    """Reject compilation if a tool or device is missing."""
    if compile.mode == "none":
        return None
    device = devices.usable_type(device)
    lack = devices.check_compiler(device)
    if lack is None and compile.mode == "reduce_overhead" and device != "cuda":
        what = f"CUDA graphs need a CUDA device, but this is {device}"
        lack = devices.Unsupported(what, "Use compile=model")
    return devices.cannot_run(lack, "compile", compile.mode)


FAMILY = Family(
    rules=(allowed_by_ranks,),
    machine_rules=(compiler,),
    unused=(
        Unused.unless("compile.mode", ("blocks",), "compile.blocks"),
        Unused(
            ("compile.dynamic",),
            lambda compile: compile.mode != "none",
            "without compiling",
            "compile=model",
        ),
    ),
)
