"""Threads, kernel selection, and CPU memory."""

from __future__ import annotations

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Count, Family, OrAuto, Section


class Backend(Section):
    """Threads, kernels and memory."""

    threads: Count | OrAuto = "auto"
    """Threads per rank."""
    worker_threads: Count = 1
    """Threads per worker process of the loader."""
    cudnn_benchmark: bool | OrAuto = "auto"
    """Let cuDNN time its kernels and use the fastest; `auto` does so while inputs have few shapes."""
    deterministic: bool = False
    """Use only kernels that give the same bits in every run."""
    reuse_memory: bool = True
    """Keep the CPU's freed memory for the next step instead of returning it to the system."""
    expandable_segments: bool | OrAuto = "auto"
    """Let segments of GPU memory grow; `auto` does so for texts of many lengths, without CUDA graphs."""
    cudnn_attention: bool | OrAuto = "auto"
    """Let cuDNN compute attention where it can; `auto` does so unless texts have many lengths."""
    flush_denormals: bool = True
    """Treat numbers below 1e-38 as 0 on a CPU, where computing with them is many times slower."""
    gc: bool | OrAuto = "auto"
    """Collect Python's garbage only between steps; `auto` does so if a dataset runs in this process."""


def repeatable_kernels(backend: Backend) -> PtfastError | None:
    """Reject kernel selection by timing if results must be deterministic."""
    if not (backend.deterministic and backend.cudnn_benchmark is True):
        return None
    what = "kernels chosen by timing differ from run to run, which backend.deterministic forbids"
    hint = "Use backend.cudnn_benchmark=auto"
    return ConfigError("C011", what, key="backend.cudnn_benchmark", value=True, suggestion=hint)


FAMILY = Family(
    rules=(repeatable_kernels,),
    free_keys=("backend.reuse_memory", "backend.expandable_segments", "backend.gc"),
    panel=lambda backend, choices: {
        "kernels": "deterministic" if backend.deterministic else None,
        "memory": "freed blocks are kept for the next step" if choices.get("backend.reuse_memory") else None,
    },
)
