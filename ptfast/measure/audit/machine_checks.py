"""Checks of the machine: its cores, number formats and tools, and who else is using it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ptfast.core import devices
from ptfast.core.machine import shared_memory, usable_cores
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import num_bytes
from ptfast.measure.audit.audit_context import AuditContext
from ptfast.measure.audit.finding import Finding

OTHERS = 0.25
"""Cores that others take on average from which on they are a neighbour."""


def threads_beside_cores(context: AuditContext) -> Iterator[Finding]:
    """More threads than cores, which then wait for each other, or fewer on a CPU that trains."""
    threads, cores = torch.get_num_threads(), usable_cores() - round(context.steps.others_cores)
    most = usable_cores(hyperthreads=True)
    if threads > most or (context.device_type == "cpu" and 2 * threads <= cores):
        yield Finding(
            f"{threads} thread{'s' * (threads != 1)} on {cores} free core{'s' * (cores != 1)}",
            "backend.threads",
            "or OMP_NUM_THREADS, where that sets it",
            ("backend.threads=auto",),
            kind="reordered",
        )


def tf32_off(context: AuditContext) -> Iterator[Finding]:
    """Float32 products without TF32 on an NVIDIA GPU that has it."""
    if (
        context.device_type == "cuda"
        and context.config.precision.mode == "fp32"
        and torch.get_float32_matmul_precision() == "highest"
        and devices.lack_of_precision("tf32", "cuda") is None
    ):
        yield Finding(
            "float32 products without tensor cores", "precision", "", ("precision=tf32",), kind="reduced"
        )


def compiler_missing(context: AuditContext) -> Iterator[Finding]:
    """No C++ compiler, or on a GPU no triton: compile=... cannot be tried."""
    if (lack := devices.lack_of_compiler(context.device_type)) is not None:
        yield Finding(lack.what, "this machine", lack.remedy.partition(", or ")[0], kind="reordered")


def shared_memory_small(context: AuditContext) -> Iterator[Finding]:
    """Less shared memory than the worker processes' batches take, as in a container that was given little."""
    loader, batch = context.config.dataloader, context.batch
    ahead = max(context.run.resolved.workers, 1) * (loader.prefetch + 1)
    needed = ahead * sum(tensor.nbytes for tensor in tensors_in(batch))
    there = shared_memory()
    if loader.kind not in ("memory", "device") and there < needed:
        yield Finding(
            f"{num_bytes(there)} of shared memory, and batches read ahead take {num_bytes(needed)}",
            "/dev/shm",
            "docker run --shm-size=8g, or dataloader.prefetch=1",
        )


def clocks_throttled(context: AuditContext) -> Iterator[Finding]:
    """Processors that were slowed down for heat or power while steps ran."""
    if context.steps.throttled:
        yield Finding(
            "the processors were slowed down for heat or power",
            "this machine",
            "better cooling, or less load",
        )


def noisy_neighbours(context: AuditContext) -> Iterator[Finding]:
    """Other processes that kept cores busy while steps ran."""
    if (cores := context.steps.others_cores) >= OTHERS:
        yield Finding(
            f"other processes took {cores:.1f} cores",
            "this machine",
            "end them, or measure when they are done",
        )


CHECKS = (
    threads_beside_cores,
    tf32_off,
    compiler_missing,
    shared_memory_small,
    clocks_throttled,
    noisy_neighbours,
)
