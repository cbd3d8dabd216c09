"""Operators run in isolation on random tensors: what each takes on this machine, away from any model."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.profiling.limits.operators import Operator, Operators, Shaped, flops

BLOCKS = 5
"""Stretches of calls that are timed, of which the median counts."""
BLOCK_S = 3e-4
SIZES = 4
"""Sizes at which an operator without products is timed; those in between are interpolated."""
NEAR_BYTES = 8 * 2**20
"""Cache of a processor that does not say how large its own is."""
_TOUCHED_BYTES = 32 * 2**20
_INDICES: dict[str, Callable[[Any], int]] = {
    "embedding": lambda args: args[0].shape[0],
    "embedding_dense_backward": lambda args: args[2],
    "nll_loss_forward": lambda args: args[0].shape[1],
    "nll_loss_backward": lambda args: args[1].shape[1],
}
"""How many rows the integers of an operator may choose from; those of others are 0."""


class Replays:
    """Seconds that operators take on `device`, each timed once and remembered.

    Products, convolutions and attention are timed at exactly their shapes. Everything else costs by its
    size: it is timed at a few of the sizes at which it comes, in cache and out of it, and interpolated.

    Args:
        clock: seconds; on a machine that others use, too, the processor's time of this thread says more than
            the clock on the wall.

    Cost: some milliseconds for each distinct operator, or a few of its calls where those take longer.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock

    def seconds(self, operators: Iterable[Operator]) -> dict[Operator, float]:
        """Seconds of one call of each; operators that cannot be run by themselves are left out."""
        curves: dict[Any, list[Operator]] = defaultdict(list)
        found: dict[Operator, float] = {}
        for operator in operators:
            if flops(operator):
                self._add(found, operator)
            else:
                layout = tuple((len(spec.shape), spec.dtype, 0 in spec.stride) for spec in operator.tensors)
                curves[operator.op, layout].append(operator)
        for alike in curves.values():
            alike.sort(key=lambda operator: operator.num_bytes)
            picked = {alike[round(i * (len(alike) - 1) / (SIZES - 1))]: None for i in range(SIZES)}
            points: dict[Operator, float] = {}
            for operator in picked:
                self._add(points, operator)
            found |= _interpolated(alike, points)
        return found

    def _add(self, found: dict[Operator, float], operator: Operator) -> None:
        try:
            found[operator] = self.time(operator)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            # It needs more than shapes: offsets that fit together, say.
            return

    def time(self, operator: Operator) -> float:
        """Seconds of a call: the median of a few stretches of calls back to back."""
        rows = _INDICES.get(operator.name, lambda _: 1)(operator.args)
        args = _random(operator.args, self.device, rows)
        kwargs = {name: _random(value, self.device, rows) for name, value in operator.kwargs}
        with torch.no_grad():
            return self.back_to_back(lambda: operator.op(*args, **kwargs))

    def back_to_back(self, call: Callable[[], Any]) -> float:
        """Seconds that `call` takes, the first time left out."""
        call()
        once = self._stretch(call, 1)
        calls = max(1, min(1000, int(BLOCK_S / max(once, 1e-7))))
        return statistics.median(self._stretch(call, calls) / calls for _ in range(BLOCKS))

    def _stretch(self, call: Callable[[], Any], calls: int) -> float:
        self._wait()
        start = self.clock()
        for _ in range(calls):
            call()
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def framework_s(self) -> float:
        """Seconds that autograd and modules add to an operator: a deep model of numbers, less operators."""
        layers = [nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(20)]
        model = nn.Sequential(*layers).to(self.device)
        inputs = torch.ones(1, 1, device=self.device)

        def step() -> None:
            model(inputs).sum().backward()
            for parameter in model.parameters():
                parameter.grad = None

        step()
        with Operators() as operators:
            step()
        alone = self.seconds(operators)
        calls = sum(operator.count for operator in operators)
        return max(0.0, self.back_to_back(step) - total_s(operators, alone)) / calls

    def touch_s(self) -> float:
        """Seconds that the operating system takes for a byte of memory when it is first written to."""
        if self.device.type != "cpu":
            return 0.0  # torch keeps the memory of a GPU
        found = []
        for _ in range(BLOCKS):
            fresh = torch.empty(_TOUCHED_BYTES, dtype=torch.uint8)
            first = self._stretch(lambda memory=fresh: memory.fill_(1), 1)
            found.append(first - self._stretch(lambda memory=fresh: memory.fill_(1), 1))
        return max(0.0, statistics.median(found)) / _TOUCHED_BYTES


def total_s(operators: Iterable[Operator], seconds: dict[Operator, float]) -> float:
    """Seconds of all calls of `operators`, by those of one call of each."""
    return sum(operator.count * seconds.get(operator, 0.0) for operator in operators)


def cache_bytes(device: torch.device) -> int:
    """The last level of cache that `device` has."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or NEAR_BYTES
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or NEAR_BYTES
    except (ValueError, OSError, AttributeError):
        return NEAR_BYTES


def _interpolated(alike: list[Operator], points: dict[Operator, float]) -> dict[Operator, float]:
    """Seconds of operators that differ in size alone, between those that were timed."""
    import numpy as np

    if not points:
        return {}
    sizes, seconds = [operator.num_bytes for operator in points], list(points.values())
    return {operator: float(np.interp(operator.num_bytes, sizes, seconds)) for operator in alike}


def _random(value: Any, device: torch.device, rows: int) -> Any:
    """Tensors in place of their shapes: numbers between 0 and 1, rows to choose from, or all true."""
    if isinstance(value, tuple):
        return [_random(item, device, rows) for item in value]
    if not isinstance(value, Shaped):
        return value
    tensor: Tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    if value.dtype == torch.bool:
        return tensor.fill_(True)
    if not value.dtype.is_floating_point:
        return tensor.zero_() if rows == 1 else tensor.random_(0, rows)
    # What broadcasting repeats is one number in memory; a single one is a factor, which must not wear off.
    return tensor.fill_(1) if 0 in value.stride or not value.shape else tensor.uniform_(0, 1)
