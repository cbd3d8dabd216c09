"""Checks of the steps as they run: reads on the host, debugging aids, gradients in evaluation, compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

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
    names = {
        "anomaly": "anomaly detection is on",
        "profiler": "a profiler is on",
        "gradcheck": "gradcheck runs",
    }
    for aid, places in context.aids.items():
        yield Finding(
            names[aid],
            ", ".join(places) or "unknown",
            f"remove it; debug={aid} when it is needed",
            trial=context.trial(_without_anomaly_detection) if aid == "anomaly" else None,
        )


def gradients_in_evaluation(context: AuditContext) -> Iterator[Finding]:
    """Operations that record gradients while a batch is evaluated."""
    if (place := context.evaluation.with_gradients) is not None:
        yield Finding(
            "gradients are recorded in evaluation",
            place,
            "remove torch.enable_grad() or set_grad_enabled(True) around it",
        )


def graph_breaks(context: AuditContext) -> Iterator[Finding]:
    """Places where compiling breaks off, where something is compiled."""
    for reason, count in context.graph_breaks.items():
        yield Finding(
            f"{times(count)}, compiling broke off: {reason}",
            "compile",
            "code that can be compiled as a whole",
        )


def compiled_again(context: AuditContext) -> Iterator[Finding]:
    """Graphs that are compiled again while steps run, as shapes or settings change."""
    compilation = context.run.compilation
    report = compilation.report() if compilation is not None else {}
    # Once is usual: the last batch of an epoch is smaller.
    if "advice" in report:
        yield Finding(
            f"{report['recompiled']} graphs compiled again within {context.run.progress.step} steps",
            "compile",
            "",
            ("compile.dynamic=true",),
            kind="reordered",
        )


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
    """Return True for the line of a debugging aid, which is found as such."""
    return any(place.endswith(known) for places in context.aids.values() for known in places)


CHECKS = (
    reads_on_the_host,
    tensors_made_on_the_host,
    debugging_left_on,
    gradients_in_evaluation,
    graph_breaks,
    compiled_again,
)
