"""Peaks of this machine: matrix products of each type, memory, transfers, and small operators."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ptfast.core import devices
from ptfast.core.errors import MachineError
from ptfast.core.machine import cache_folder
from ptfast.core.run_directory import read_json, write_json

TRY_S = 0.15
"""Seconds of tries, short ones: some go undisturbed even where a neighbour is busy."""
COST_S = 1.2
"""About how long all of it takes."""
_SIZES = {"cuda": 8192, "mps": 2048}
_SIZE = 512
_BYTES = {"cuda": 2**28}
_STREAMED_BYTES = 32 * 2**20
_SETTINGS = {"tf32": "high", "fp32_high": "high", "fp32_medium": "medium"}
"""Number formats that are float32 at another of torch's settings of matrix products."""
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Peaks:
    """The most that a machine was seen to do."""

    flops_per_s: dict[str, float]
    """Of square matrix products, by number format: `fp32`, `bf16`, ..."""
    bytes_per_s: float
    """Read and written, of tensors larger than the cache."""
    op_s: float
    """A small operator, one after another."""
    transfer_bytes_per_s: float | None = None
    """From page-locked memory to the device; None where they are one."""
    seconds: float = field(default=0.0, compare=False)
    """That measuring took; 0 when it was known."""


def known_peaks(device: torch.device, formats: Iterable[str] = ()) -> Peaks | None:
    """The peaks measured of this device before, with these threads and this torch; None if one is missing."""
    found = read_json(_path(device))
    try:
        peaks = Peaks(**{name: value for name, value in found.items() if name != "of"})
    except TypeError:
        return None
    return peaks if set(formats) <= set(peaks.flops_per_s) else None


def measured_peaks(device: torch.device, formats: Iterable[str] = ("fp32",)) -> Peaks:
    """Measure this machine's products in `formats`, memory and overhead, and remember them on disk.

    The quickest of many tries counts, and the best ever measured. The random state stays as it is.

    Cost: about a second, once for a device, a number of threads and a version of torch.
    """
    start = time.perf_counter()
    rates = {name: _products_per_s(name, device) for name in dict.fromkeys(formats)}
    before = known_peaks(device) or Peaks({}, 0.0, float("inf"))
    names = sorted(rates.keys() | before.flops_per_s.keys())
    transfers = [before.transfer_bytes_per_s] if before.transfer_bytes_per_s is not None else []
    if device.type == "cuda":
        host = torch.zeros(_STREAMED_BYTES, dtype=torch.uint8, pin_memory=True)
        transfers.append(_bytes_per_s(host, torch.empty_like(host, device=device)))
    data = torch.zeros(_BYTES.get(device.type, _STREAMED_BYTES), dtype=torch.uint8, device=device)
    number, calls = torch.ones(1, device=device), 200

    def add() -> None:
        for _ in range(calls):
            torch.add(number, number)

    peaks = Peaks(
        {name: max(rates.get(name, 0.0), before.flops_per_s.get(name, 0.0)) for name in names},
        bytes_per_s=max(2 * _bytes_per_s(data, torch.zeros_like(data)), before.bytes_per_s),
        op_s=min(_quickest(device, add) / calls, before.op_s),
        transfer_bytes_per_s=max(transfers, default=None),
    )
    found = {name: value for name, value in asdict(peaks).items() if name != "seconds"}
    of = {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    # What cannot be remembered is measured again.
    with contextlib.suppress(OSError, MachineError):
        (path := _path(device)).parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"of": of, **found})
    return Peaks(**found, seconds=time.perf_counter() - start)


def device_name(device: torch.device) -> str:
    """The name of this device, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = devices.cpu_facts("model name", "CPU part")
    return f"{device.type} {next(iter(names), '')} of {os.cpu_count()} cores"


def _products_per_s(name: str, device: torch.device) -> float:
    """Floating-point operations a second of a square matrix product in the number format `name`."""
    size = _SIZES.get(device.type, _SIZE)
    dtype = _TYPES.get(name, torch.float32)
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.rand(size, size, generator=draws).to(device, dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    try:
        _set_matmul(_SETTINGS.get(name, "highest") if dtype == torch.float32 else before)
        return 2 * size**3 / _quickest(device, lambda: torch.mm(left, right))
    finally:
        _set_matmul(before)


def _set_matmul(setting: str) -> None:
    with warnings.catch_warnings():
        # Torch 2.9 recommends other names for this switch, which its own compiler then trips over.
        warnings.filterwarnings("ignore", "Please use the new API")
        torch.set_float32_matmul_precision(setting)


def _bytes_per_s(source: torch.Tensor, target: torch.Tensor) -> float:
    return len(source) / _quickest(target.device, lambda: target.copy_(source, non_blocking=True))


def _quickest(device: torch.device, call: Callable[[], Any]) -> float:
    """Seconds of the quickest call after the first."""
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
