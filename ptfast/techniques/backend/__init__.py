"""Threads, which kernels torch takes, and the memory of the CPU."""

from __future__ import annotations

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.resolved import Resolved
from ptfast.core.sections.section import Count, Family, OrAuto, Section


class Backend(Section):
    """Threads, kernels and memory."""

    threads: Count | OrAuto = "auto"
    """Threads of each rank."""
    worker_threads: Count = 1
    """Threads of each of the loader's worker processes."""
    cudnn_benchmark: bool | OrAuto = "auto"
    """Let cuDNN time its kernels and take the quickest; `auto` while the shapes of inputs are few."""
    deterministic: bool = False
    """Only kernels that give the same bits in every run."""
    hold_memory: bool = True
    """Hold the CPU's freed memory for the next step, and do not give it back to the system."""
    expandable_segments: bool | OrAuto = "auto"
    """Let the segments of a GPU's memory grow; `auto` for texts of many lengths, without CUDA graphs."""
    cudnn_attention: bool | OrAuto = "auto"
    """Let cuDNN compute attention where it can; `auto` unless texts come in many lengths."""
    flush_denormals: bool = True
    """Take numbers below 1e-38 for 0 on a CPU, which computes with them many times slower."""
    gc: bool | OrAuto = "auto"
    """Collect Python's garbage between steps only; `auto` where a dataset's own code runs in this process."""


def repeatable_kernels(backend: Backend) -> PtfastError | None:
    """Refuse to choose kernels by timing where bits must repeat."""
    if not (backend.deterministic and backend.cudnn_benchmark is True):
        return None
    what = "kernels chosen by timing differ from run to run, which backend.deterministic forbids"
    hint = "Use backend.cudnn_benchmark=auto"
    return ConfigError("C011", what, key="backend.cudnn_benchmark", value=True, suggestion=hint)


def panel(backend: Backend, resolved: Resolved) -> dict[str, object]:
    """How kernels are chosen, where there is a choice, and what becomes of freed memory."""
    until = ", while inputs have few shapes" if backend.cudnn_benchmark == "auto" else ""
    searched = f"cuDNN takes the quickest by trying{until}" if resolved.cudnn_benchmark else None
    held = "freed blocks are kept for the next step" if resolved.holds_memory else None
    unplanned = "not by cuDNN, which plans anew for every length"
    return {
        "kernels": "deterministic" if resolved.deterministic else searched,
        "attention": unplanned if resolved.cudnn_attention is False else None,
        "memory": "in segments that grow" if resolved.expands_segments else held,
        "garbage collection": "between steps only" if resolved.collects_between else None,
    }


FAMILY = Family(
    rules=(repeatable_kernels,),
    free_keys=("backend.hold_memory", "backend.expandable_segments", "backend.gc"),
    panel=panel,
)
