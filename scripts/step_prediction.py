"""The time of a step from the shapes of its operators and the machine's micro-benchmarks alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from operator_replay import Replays, total_s

from ptfast.profiling.limits.operators import Operator


@dataclass(frozen=True)
class MicroBenchmarks:
    """Seconds that a machine takes for single things."""

    operators: dict[Operator, float]
    """For one call of each operator, by itself."""
    framework_s: float
    """That autograd and modules add to a call."""
    touch_s: float
    """For a byte of memory that is written to for the first time."""
    fetch_s: float
    """For a byte that is no longer in cache."""
    near_bytes: int
    """Size of the cache."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step, by what they go to."""

    operators_s: float
    framework_s: float
    memory_s: float
    """For fetching what is no longer in cache, and for memory that the step before has given back."""

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.operators_s + self.framework_s + self.memory_s


def predict(
    operators: Iterable[Operator], fresh_bytes: int, benchmarks: MicroBenchmarks, steps: int = 1
) -> Prediction:
    """Seconds of a step that runs `operators`, none of which was timed in it.

    A call takes what it takes by itself, and the framework's share. Memory of gradients and of what forward
    keeps has been given back by the step before, so that the operating system hands it out, zeroed, again.

    Args:
        operators: of `steps` steps.
        fresh_bytes: of such memory, in these steps.
    """
    operators = list(operators)
    calls = sum(operator.count for operator in operators)
    # What is larger than the cache was fetched when the operator was timed, too.
    far = sum(operator.far_bytes for operator in operators if operator.num_bytes <= benchmarks.near_bytes)
    memory_s = far * benchmarks.fetch_s + fresh_bytes * benchmarks.touch_s
    return Prediction(
        total_s(operators, benchmarks.operators) / steps,
        calls * benchmarks.framework_s / steps,
        memory_s / steps,
    )


def benchmark(
    operators: Iterable[Operator],
    device: torch.device,
    bandwidth: float,
    near_bytes: int,
    clock: Callable[[], float] = time.perf_counter,
) -> MicroBenchmarks:
    """Time `operators` one by one on `device`, and what surrounds them.

    Args:
        bandwidth: bytes a second of memory.
        near_bytes: what the cache holds.

    Cost: some milliseconds for each operator, a tenth of a second beside.
    """
    replays = Replays(device, clock)
    found = replays.seconds(operators)
    return MicroBenchmarks(found, replays.framework_s(), replays.touch_s(), 1 / bandwidth, near_bytes)
