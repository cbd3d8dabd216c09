"""The speed of light of a run: what its step would take at the machine's limits, and what it took."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ptfast.core.clock import STEP
from ptfast.core.machine import is_memory_error
from ptfast.core.units import short_time
from ptfast.profiling.machine_peaks import COST_S, Peaks, known_peaks, measured_peaks
from ptfast.profiling.operator_counting import Counted, Operator, StepCounter, flops
from ptfast.run import Run

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}

SMALL = 0.25
"""The part of a step below which no limit is said to hold it back."""
PAYS_AFTER = 50
"""A run measures the machine if it trains this many times as long as that takes."""
SHORT_S = 10
"""A run that trains for less than this reports nothing."""


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    flops: dict[str, float]
    """Floating-point operations of products and convolutions, by number format."""
    moved_bytes: float
    """That have to go to memory or come from there: of weights, gradients, optimizer state, activations."""
    calls: float
    """Operators that are called."""
    batch_bytes: float = 0.0

    @property
    def format(self) -> str | None:
        """The number format of most of the operations."""
        return max(self.flops, key=self.flops.__getitem__, default=None)


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it was: how long it took, and what it would take at each of the machine's limits."""

    seconds: float
    rows: Mapping[str, float]
    """Seconds by cause, as in the ledger."""
    work: Work
    peaks: Peaks
    floors: Mapping[str, float] = field(default_factory=dict)
    """Seconds by limit: `compute`, `memory`, `overhead`; `transfer` where the device has its own memory."""

    @property
    def bound(self) -> str:
        """The largest bound: a limit of the machine, or something that it waits for."""
        waits = {"data": "data", "transfer": "transfer", "gradient_sync": "sync"}
        candidates = {name: self.rows.get(row, 0.0) for row, name in waits.items()}
        candidates |= {name: self.floors[name] for name in ("compute", "memory", "overhead")}
        largest = max(candidates, key=candidates.__getitem__)
        # None of them: small operators, which reach neither of the peaks.
        return largest if candidates[largest] >= SMALL * self.seconds else "operators"

    @property
    def mfu(self) -> float:
        """The part of the step that its operations would take at the measured peak."""
        return self.floors["compute"] / self.seconds


def count_work(run: Run, counted: Counted) -> Work:
    """The work of one step, from counts over some."""
    steps = counted.steps
    totals: dict[str, float] = defaultdict(float)
    for operator in counted.operators:
        if count := flops(operator):
            totals[_format(run, operator)] += operator.count / steps * count
    weights = _bytes(p for group in run.optimizer.param_groups for p in group["params"])
    state = _bytes(value for kept in run.optimizer.state.values() for value in kept.values())
    # Read: weights by forward, backward and the step, gradients and state by the step. Written: gradients by
    # backward, weights and state by the step.
    moved = 6 * weights + 2 * state + 2 * counted.kept_bytes / steps
    calls = sum(operator.count for operator in counted.operators) / steps
    return Work(dict(totals), moved, calls, counted.batch_bytes / steps)


def weigh(work: Work, peaks: Peaks, seconds: Mapping[str, float], steps: int) -> MeasuredStep:
    """Compare a step with the machine's limits; `seconds` are those of `steps` steps, by cause."""
    rows = {name: seconds.get(name, 0.0) / steps for name in STEP}
    floors = {
        "compute": sum(count / peaks.flops_per_s[name] for name, count in work.flops.items()),
        "memory": work.moved_bytes / peaks.bytes_per_s,
        "overhead": work.calls * peaks.op_s,
    }
    if peaks.transfer_bytes_per_s is not None:
        floors["transfer"] = work.batch_bytes / peaks.transfer_bytes_per_s
    return MeasuredStep(sum(rows.values()), rows, work, peaks, floors)


def _describe(step: MeasuredStep) -> dict[str, Any]:
    """The entries of summary.json, with a line for people."""
    work = step.work
    total = sum(work.flops.values())
    facts: dict[str, Any] = {
        "step_s": step.seconds,
        "flops_per_step": total,
        "flops_per_s": total / step.seconds,
        "format": work.format,
        "peak_flops_per_s": step.peaks.flops_per_s[work.format] if work.format else None,
        "mfu": step.mfu,
        "floors_s": dict(step.floors),
        "waits_s": {name: step.rows[name] for name in ("data", "transfer", "gradient_sync")},
        "bytes_per_s": step.peaks.bytes_per_s,
        "calls_per_step": work.calls,
        "bound": step.bound,
    }
    floors = sorted(step.floors.items(), key=lambda item: -item[1])
    parts = [f"{name} {short_time(s)}" for name, s in floors if s >= 0.005 * step.seconds]
    reached = "no matrix products to count"
    if work.format:
        name = work.format.replace("_medium", " at medium").replace("_high", " at high")
        reached = f"{step.mfu:.0%} of {flop(facts['peak_flops_per_s'])}/s in {name}"
    facts["line"] = f"{reached}; bound by {step.bound}"
    facts["floors"] = f"{', '.join(parts) or 'below 0.5 %'}; a step takes {short_time(step.seconds)}"
    return facts


def _format(run: Run, operator: Operator) -> str:
    """The number format in which an operator multiplies."""
    dtype = operator.dtype or torch.float32
    if dtype in TYPES:
        return TYPES[dtype]
    setting, convolves = run.resolved.matmul_precision, "conv" in operator.name
    if run.device.type == "cuda":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Please use the new API")
            rounds = torch.backends.cudnn.allow_tf32 if convolves else setting != "highest"
        return "tf32" if rounds else "fp32"
    return "fp32" if setting == "highest" or convolves else f"fp32_{setting}"


def _bytes(values: Iterable[Any]) -> int:
    """Bytes of tensors on this rank; of sharded ones, its part."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)
            total += local.numel() * local.element_size()
    return total


def flop(number: float) -> str:
    """Floating-point operations in three digits: `98.1 GFLOP`."""
    for factor, unit in ((1e12, "T"), (1e9, "G")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}FLOP"
    return f"{number / 1e6:.3g} MFLOP"


def speed_of_light(run: Run, *, may_measure: bool) -> dict[str, Any] | None:
    """The entry `speed_of_light` of summary.json; None where the run was too short to say anything.

    The machine's limits are measured when training is over, and once for a machine: another run finds them in
    the cache folder. A run of less than a minute measures nothing.

    Cost: a second, the first time; 0.2 s otherwise. Booked as `measuring`.
    """
    counter: StepCounter = run.counter
    counted, seconds = counter.counted, run.clock.ledger()
    steps = run.progress.step - counter.first_counted - (counted.steps if counted is not None else 0)
    if counter.compiled and counted is not None:
        steps += counted.steps  # of none that was trained
    train_s = sum(seconds[name] for name in STEP)
    if steps < 1 or train_s < SHORT_S:
        return None
    if counted is None:
        return {"line": f"operations are not counted: {counter.why_not}"} if counter.why_not else None
    run.clock.to("measuring")
    try:
        work = count_work(run, counted)
        cost: dict[str, Any] = {"counting_s": seconds["measuring"]}
        peaks = known_peaks(run.device, work.flops)
        pays = may_measure and train_s >= PAYS_AFTER * COST_S
        if peaks is not None and pays and weigh(work, peaks, seconds, steps).mfu > 1:
            peaks = None  # taken while something else kept the machine busy
        if peaks is None and pays:
            peaks = _measure(run, work)
            cost["measuring_s"] = peaks.seconds if peaks is not None else 0.0
        if peaks is None:
            step_s, total = train_s / steps, sum(work.flops.values())
            enough = f"{PAYS_AFTER * COST_S:.0f} s"
            why = f"this machine's peak is not measured yet; a run that trains for {enough} measures it"
            line = f"{flop(total / step_s)}/s; {why}"
            facts = {"step_s": step_s, "flops_per_step": total, "flops_per_s": total / step_s, "line": line}
            return facts | cost
        cost["padding_share"] = run.resolved.padding_share
        return _describe(weigh(work, peaks, seconds, steps)) | cost
    finally:
        run.clock.to("closing")


def _measure(run: Run, work: Work) -> Peaks | None:
    """The machine's limits; None where training has left no memory for it."""
    try:
        with run.display.status("measuring this machine's peak rates"):
            return measured_peaks(run.device, work.flops)
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        return None
