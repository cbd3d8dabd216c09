"""The roofline of a run: the step time at the machine's limits, compared with the measured step time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ptfast.core import devices
from ptfast.core.clock import STEP
from ptfast.core.errors import MachineError
from ptfast.core.machine import cache_folder, is_memory_error
from ptfast.core.run_directory import read_json, write_json
from ptfast.core.tensors.dtensors import local_part
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import short_time
from ptfast.profiling.operator_counting import Counted, Product, StepCounter, flops
from ptfast.run import Run
from ptfast.techniques.precision.mixed_precision import set_float32

TRY_S = 0.15
"""Seconds per rate. Attempts are short, so that some run undisturbed even next to a busy neighbor."""
COST_S = 1.2
"""Approximate duration of all measurements."""
_SIZES = {"cuda": 8192, "mps": 2048}
_SIZE = 512
_BYTES = {"cuda": 2**28}
_STREAMED_BYTES = 32 * 2**20
_SETTINGS = {"tf32": "high", "fp32_high": "high", "fp32_medium": "medium"}
"""Torch's matmul precision settings for formats that are float32 in memory."""
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Peaks:
    """The highest rates measured on a machine."""

    flops_per_s: dict[str, float]
    """FLOP/s of square matrix products, by number format: `fp32`, `bf16`, ..."""
    bytes_per_s: float
    """Bytes per second read and written, for tensors larger than the cache."""
    op_s: float
    """Seconds per small operator, among many."""


def known_peaks(device: torch.device, formats: Iterable[str] = ()) -> Peaks | None:
    """Return cached peaks of this device with these threads and this torch; None if one is missing."""
    found = read_json(_path(device))
    try:
        peaks = Peaks(**{name: value for name, value in found.items() if name != "of"})
    except TypeError:
        return None
    return peaks if set(formats) <= set(peaks.flops_per_s) else None


def measured_peaks(device: torch.device, formats: Iterable[str] = ("fp32",)) -> Peaks:
    """Measure this machine's matrix products in `formats`, memory and overhead, and cache them on disk.

    The fastest attempt counts, including those of earlier measurements. The random state does not change.

    Cost: about a second, once per device, number of threads and version of torch.
    """
    rates = {name: _products_per_s(name, device) for name in dict.fromkeys(formats)}
    before = known_peaks(device) or Peaks({}, 0.0, float("inf"))
    names = sorted(rates.keys() | before.flops_per_s.keys())
    data = torch.zeros(_BYTES.get(device.type, _STREAMED_BYTES), dtype=torch.uint8, device=device)
    target = torch.zeros_like(data)
    copied_per_s = len(data) / _quickest(device, lambda: target.copy_(data))
    number, calls = torch.ones(1, device=device), 200

    def add() -> None:
        for _ in range(calls):
            torch.add(number, number)

    peaks = Peaks(
        {name: max(rates.get(name, 0.0), before.flops_per_s.get(name, 0.0)) for name in names},
        bytes_per_s=max(2 * copied_per_s, before.bytes_per_s),
        op_s=min(_quickest(device, add) / calls, before.op_s),
    )
    of = {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    # If the file cannot be written, the next run measures again.
    with contextlib.suppress(OSError, MachineError):
        (path := _path(device)).parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"of": of, **asdict(peaks)})
    return peaks


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = devices.cpu_facts("model name", "CPU part")
    return f"{device.type} {next(iter(names), '')} of {os.cpu_count()} cores"


def _products_per_s(name: str, device: torch.device) -> float:
    """Return the FLOP/s of a square matrix product in the number format `name`."""
    size = _SIZES.get(device.type, _SIZE)
    dtype = _TYPES.get(name, torch.float32)
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.rand(size, size, generator=draws).to(device, dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    try:
        set_float32(_SETTINGS.get(name, "highest") if dtype == torch.float32 else before)
        return 2 * size**3 / _quickest(device, lambda: torch.mm(left, right))
    finally:
        set_float32(before)


def _quickest(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest call after the first."""
    best, end = float("inf"), None
    while end is None or best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        now = time.perf_counter()
        if end is None:
            end = now + TRY_S
        else:
            best = min(best, now - start)
    return best


def _path(device: torch.device) -> Path:
    key = f"{device_name(device)} {torch.get_num_threads()} {torch.__version__}"
    return cache_folder() / f"peaks-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


SMALL = 0.25
"""A limit below this share of a step is not reported as its bound."""
PAYS_AFTER = 50
"""A run measures the machine if training takes this many times as long as measuring."""
SHORT_S = 10
"""A run that trains for less time reports no roofline."""


@dataclass(frozen=True)
class Work:
    """The work of one step."""

    flops: dict[str, float]
    """Floating-point operations of matrix products and convolutions, by number format."""
    moved_bytes: float
    """Bytes read and written: weights, gradients, optimizer state and activations."""
    calls: float
    """Number of operator calls."""


def count_work(run: Run, counted: Counted) -> Work:
    """Return the mean work of one step, from counts over several steps."""
    steps = counted.steps
    totals: dict[str, float] = defaultdict(float)
    for product in counted.operators.products:
        if count := flops(product):
            totals[_format(run, product)] += count / steps
    weights = _bytes(p for group in run.optimizer.param_groups for p in group["params"])
    state = _bytes(value for kept in run.optimizer.state.values() for value in kept.values())
    # Weights are read by forward, backward and the optimizer, which also reads gradients and state; gradients
    # are written by backward, weights and state by the optimizer.
    moved = 6 * weights + 2 * state + 2 * counted.kept_bytes / steps
    return Work(dict(totals), moved, counted.operators.calls.total() / steps)


def weigh(work: Work, peaks: Peaks, seconds: Mapping[str, float], steps: int) -> dict[str, Any]:
    """Compare a step with the machine's limits; return the entries of summary.json, including lines to print.

    `seconds` maps each cause in the ledger to its seconds over `steps` steps.
    """
    rows = {name: seconds.get(name, 0.0) / steps for name in STEP}
    step_s, total = sum(rows.values()), sum(work.flops.values())
    floors = {
        "compute": sum(count / peaks.flops_per_s[name] for name, count in work.flops.items()),
        "memory": work.moved_bytes / peaks.bytes_per_s,
        "overhead": work.calls * peaks.op_s,
    }
    waits = {"data": rows["data"], "transfer": rows["transfer"], "sync": rows["gradient_sync"]}
    limits = waits | floors
    bound = max(limits, key=limits.__getitem__)
    if limits[bound] < SMALL * step_s:
        # No limit explains the step: its operators are too small to reach a peak rate.
        bound = "operators"
    mfu = floors["compute"] / step_s
    main_format = max(work.flops, key=work.flops.__getitem__, default=None)
    reached, peak = "no matrix products to count", None
    if main_format is not None:
        peak = peaks.flops_per_s[main_format]
        name = main_format.replace("_medium", " at medium").replace("_high", " at high")
        reached = f"{mfu:.0%} of {flop(peak)}/s in {name}"
    slowest_first = sorted(floors.items(), key=lambda item: -item[1])
    parts = [f"{name} {short_time(s)}" for name, s in slowest_first if s >= 0.005 * step_s]
    return {
        "step_s": step_s,
        "flops_per_step": total,
        "flops_per_s": total / step_s,
        "format": main_format,
        "peak_flops_per_s": peak,
        "mfu": mfu,
        "floors_s": floors,
        "waits_s": {name: rows[name] for name in ("data", "transfer", "gradient_sync")},
        "bytes_per_s": peaks.bytes_per_s,
        "calls_per_step": work.calls,
        "bound": bound,
        "line": f"{reached}; bound by {bound}",
        "floors": f"{', '.join(parts) or 'below 0.5 %'}; a step takes {short_time(step_s)}",
    }


def _format(run: Run, product: Product) -> str:
    """Return the number format in which an operator multiplies."""
    inputs = tensors_in((product.args, product.kwargs))
    dtype = next((x.dtype for x in inputs if x.dtype.is_floating_point), torch.float32)
    if (name := next((name for name, each in _TYPES.items() if each == dtype), None)) is not None:
        return name
    setting, convolves = run.precision.matmul, "conv" in product.name
    if run.device.type == "cuda":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Please use the new API")
            rounds = torch.backends.cudnn.allow_tf32 if convolves else setting != "highest"
        return "tf32" if rounds else "fp32"
    return "fp32" if setting == "highest" or convolves else f"fp32_{setting}"


def _bytes(values: Iterable[Any]) -> int:
    """Return the total bytes of the tensors in `values`; of sharded ones, only this rank's shards count."""
    return sum(local_part(value).nbytes for value in values if isinstance(value, torch.Tensor))


def flop(number: float) -> str:
    """Format floating-point operations with three digits: `98.1 GFLOP`."""
    for factor, unit in ((1e12, "T"), (1e9, "G")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}FLOP"
    return f"{number / 1e6:.3g} MFLOP"


def roofline_of(run: Run, *, may_measure: bool) -> dict[str, Any] | None:
    """Return the entry `roofline` of summary.json; None if the run was too short for one.

    The machine's limits are measured after training, once per machine, and cached for later runs. Runs of
    less than a minute do not measure them.

    Cost: a second the first time, 0.2 s otherwise. Booked as `measuring`.
    """
    counter: StepCounter = run.counter
    counted, seconds = counter.counted, run.clock.ledger()
    steps = run.progress.step - counter.first_counted - (counted.steps if counted is not None else 0)
    if counter.compiled and counted is not None:
        steps += counted.steps  # the counted step was undone
    train_s = sum(seconds[name] for name in STEP)
    if steps < 1 or train_s < SHORT_S:
        return None
    if counted is None:
        return {"line": f"operations are not counted: {counter.why_not}"} if counter.why_not else None
    run.clock.to("measuring")
    try:
        work = count_work(run, counted)
        peaks = known_peaks(run.device, work.flops)
        pays = may_measure and train_s >= PAYS_AFTER * COST_S
        if peaks is not None and pays and weigh(work, peaks, seconds, steps)["mfu"] > 1:
            peaks = None  # measured while another program kept the machine busy
        if peaks is None and pays:
            # Training may have left too little memory for measuring.
            try:
                with run.display.status("measuring this machine's peak rates"):
                    peaks = measured_peaks(run.device, work.flops)
            except (MemoryError, RuntimeError) as error:
                if not is_memory_error(error):
                    raise
        if peaks is not None:
            return weigh(work, peaks, seconds, steps)
        step_s, total = train_s / steps, sum(work.flops.values())
        enough = f"{PAYS_AFTER * COST_S:.0f} s"
        why = f"this machine's peak is not measured yet; a run of {enough} or more measures it"
        line = f"{flop(total / step_s)}/s; {why}"
        return {"step_s": step_s, "flops_per_step": total, "flops_per_s": total / step_s, "line": line}
    finally:
        run.clock.to("closing")
