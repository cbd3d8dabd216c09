"""Checks of the steps as they run: reads on the host, debugging aids, gradients in evaluation, compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from ptfast.core import devices
from ptfast.core.machine import shared_memory, usable_cores
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import num_bytes
from ptfast.measure.audit.audit_context import CALL_STEPS, AuditContext
from ptfast.measure.audit.finding import Finding, Price
from ptfast.measure.audit.model_checks import times

_MENDS = {
    "item": "keep sums as tensors on the device, and read them once in a while",
    "cpu": "keep it on the device until it is needed, once in many steps",
    "print of a tensor": "print once in many steps, of a value that was read anyway",
    "if or while on a tensor": "torch.where, or a decision by shapes and settings that the host knows",
    "boolean mask": "torch.where or a product with the mask, whose shapes are known",
    "repeat_interleave": "repeat_interleave(..., output_size=N)",
}
_ELSE = "an operation whose result has a shape that is known beforehand"


def reads_on_the_host(context: AuditContext) -> Iterator[Finding]:
    """A value that is read from the device in every step, for which the host waits."""
    for (what, place), calls in context.calls.reads.items():
        if _is_debugging(context, place):
            continue
        often = calls.count / CALL_STEPS
        yield Finding(
            f"{what}: {times(often)} a step, the host waits for the device",
            place,
            _MENDS.get(what, _ELSE),
            price=Price(calls.seconds / CALL_STEPS),
        )
    known = {place for _, place in context.calls.reads}
    for place, count in context.syncs.items():
        if place not in known:
            yield Finding(f"{times(count / CALL_STEPS)} a step, the host waits for the device", place, _ELSE)


def tensors_made_on_the_host(context: AuditContext) -> Iterator[Finding]:
    """A tensor that the model makes on the host and moves to the device."""
    for place, calls in context.calls.moved.items():
        if not _is_debugging(context, place):
            yield Finding(
                f"a tensor made on the host and moved, {times(calls.count / CALL_STEPS)} a step",
                place,
                "device=x.device where it is made",
                price=Price(calls.seconds / CALL_STEPS),
            )


def debugging_left_on(context: AuditContext) -> Iterator[Finding]:
    """Anomaly detection, a profiler, NVTX marks or gradcheck that the user's own code turns on."""
    names = {"anomaly": "anomaly detection is on", "profiler": "a profiler is on"}
    for aid, places in context.aids.items():
        yield Finding(
            names.get(aid, f"{aid} runs"),
            ", ".join(places) or "unknown",
            f"remove it; debug={aid} when it is needed",
            trial=context.trial(_without_anomaly_detection) if aid == "anomaly" else None,
        )


def gradients_in_evaluation(context: AuditContext) -> Iterator[Finding]:
    """Operations that record gradients while a batch is evaluated."""
    if (place := context.evaluation.with_gradients) is not None:
        mend = "remove torch.enable_grad() or set_grad_enabled(True) around it"
        yield Finding("gradients are recorded in evaluation", place, mend)


def graph_breaks(context: AuditContext) -> Iterator[Finding]:
    """Places where compiling breaks off, where something is compiled."""
    for reason, count in context.graph_breaks.items():
        what = f"{times(count)}, compiling broke off: {reason}"
        yield Finding(what, "compile", "code that can be compiled as a whole")


def compiled_again(context: AuditContext) -> Iterator[Finding]:
    """Graphs that are compiled again while steps run, as shapes or settings change."""
    compilation = context.run.compilation
    report = compilation.report() if compilation is not None else {}
    # Once is usual: the last batch of an epoch is smaller.
    if "advice" in report:
        what = f"{report['recompiled']} graphs compiled again within {context.run.progress.step} steps"
        yield Finding(what, "compile", "", ("compile.dynamic=true",), "reordered")


@contextmanager
def _without_anomaly_detection() -> Iterator[None]:
    """Have nobody turn anomaly detection on inside."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        with mock.patch.object(torch, "set_anomaly_enabled"):
            yield
    finally:
        torch.set_anomaly_enabled(*before)


def _is_debugging(context: AuditContext, place: str) -> bool:
    """True for the line of a debugging aid, which is found as such."""
    return any(place.endswith(known) for places in context.aids.values() for known in places)


CHECKS = (
    reads_on_the_host,
    tensors_made_on_the_host,
    debugging_left_on,
    gradients_in_evaluation,
    graph_breaks,
    compiled_again,
)


OTHERS = 0.25
"""Cores that others take on average from which on they are a neighbour."""


def threads_beside_cores(context: AuditContext) -> Iterator[Finding]:
    """More threads than cores, which then wait for each other, or fewer on a CPU that trains."""
    threads, cores = torch.get_num_threads(), usable_cores() - round(context.steps.others_cores)
    most = usable_cores(hyperthreads=True)
    if threads > most or (context.device_type == "cpu" and 2 * threads <= cores):
        what = f"{threads} thread{'s' * (threads != 1)} on {cores} free core{'s' * (cores != 1)}"
        mend = "or OMP_NUM_THREADS, where that sets it"
        yield Finding(what, "backend.threads", mend, ("backend.threads=auto",), "reordered")


def tf32_off(context: AuditContext) -> Iterator[Finding]:
    """Float32 products without TF32 on an NVIDIA GPU that has it."""
    exact = context.config.precision.mode == "fp32" and torch.get_float32_matmul_precision() == "highest"
    if context.device_type == "cuda" and exact and devices.lack_of_precision("tf32", "cuda") is None:
        what = "float32 products without tensor cores"
        yield Finding(what, "precision", "", ("precision=tf32",), "reduced")


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
        what = f"{num_bytes(there)} of shared memory, and batches read ahead take {num_bytes(needed)}"
        yield Finding(what, "/dev/shm", "docker run --shm-size=8g, or dataloader.prefetch=1")


def clocks_throttled(context: AuditContext) -> Iterator[Finding]:
    """Processors that were slowed down for heat or power while steps ran."""
    if context.steps.throttled:
        what = "the processors were slowed down for heat or power"
        yield Finding(what, "this machine", "better cooling, or less load")


def noisy_neighbours(context: AuditContext) -> Iterator[Finding]:
    """Other processes that kept cores busy while steps ran."""
    if (cores := context.steps.others_cores) >= OTHERS:
        mend = "end them, or measure when they are done"
        yield Finding(f"other processes took {cores:.1f} cores", "this machine", mend)


MACHINE_CHECKS = (
    threads_beside_cores,
    tf32_off,
    compiler_missing,
    shared_memory_small,
    clocks_throttled,
    noisy_neighbours,
)
