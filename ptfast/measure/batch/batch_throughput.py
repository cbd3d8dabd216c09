"""Samples per second and memory of a config at several batch sizes, measured in this process."""

from __future__ import annotations

import contextlib
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ptfast.core.errors import DataError
from ptfast.core.machine import memory_limit, peak_memory_bytes
from ptfast.measure.experiment.segments import ENDLESS, mean_over_ranks
from ptfast.measure.trials.trial_rank import TrialRank
from ptfast.run import Run
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.curriculum import Curriculum
from ptfast.training.fit import try_out
from ptfast.training.step import Trainer

SPARE = 0.05
"""Part of the memory that a run may take at most, which has to stay free."""
LESS_MEMORY = "Try precision=amp, checkpointing=full, gradients.accumulate=2 or a smaller model"
"""The suggestion where not even the smallest batch fits."""


@contextmanager
def memory_to_spare(device: torch.device) -> Iterator[None]:
    """Have what is done inside get by with a little less memory than there is.

    Held is what counts against the limit there is: memory of the GPU, or addresses of this process where
    `ulimit` limits those. Pages of a machine or a container count when they are written, so that there the
    most that was taken is looked at afterwards.
    """
    limit, name = memory_limit(device.type)
    spare = int(SPARE * limit)
    before = peak_memory_bytes("cpu")
    held: object = None
    if device.type == "cuda":
        held = torch.empty(spare, dtype=torch.uint8, device=device)
    elif name.startswith("ulimit") and sys.platform != "win32":
        held = mmap.mmap(-1, spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield
    if held is None and peak_memory_bytes("cpu") - before > limit - spare:
        raise MemoryError(f"out of memory but for the last {SPARE:.0%}")
    del held


def time_batches(
    trial: TrialRank,
    *,
    sizes: Sequence[int],
    seconds: float,
    checkpointing: str | None = None,
    rehearsed: bool = False,
) -> None:
    """Measure each of `sizes` in turn, up to the first that does not fit.

    Args:
        sizes: samples of an optimizer step over all ranks.
        seconds: that the measurement of a size takes, warm-up and building left out.
        checkpointing: mode in place of the config's.
        rehearsed: evaluate, save and train on, too, with some memory held back all the while.
    """
    config = trial.config
    changes: dict[str, Any] = {"curriculum": Curriculum()}
    if checkpointing is not None:
        changes["checkpointing"] = with_mode(config.checkpointing, checkpointing)
    for size in sizes:
        result: dict[str, Any] = {"size": size, "rehearsed": rehearsed}
        try:
            # What grows is measured at its full size, at which it has to fit.
            changed = config.model_copy(update={"batch_size": size, **changes})
            with trial.building(changed, result) as run:
                _check_size(size, run.info.num_train)
                with memory_to_spare(run.device) if rehearsed else contextlib.nullcontext():
                    result |= _time(run, seconds)
                    if rehearsed:
                        try_out(run)
                        _time(run, 0.0)
            del run  # its memory is the next one's
        except DataError as error:
            if error.code != "D006":
                raise
            # A size that this data cannot be cut into, such as one that leaves a single sample.
            result["refused"] = error.what
        trial.report(result)


def with_mode(section: Checkpointing, mode: str) -> Checkpointing:
    """The section with another mode, as the option of that name has it."""
    every = section.every or 2 if mode == "every_n" else None
    return section.model_copy(update={"mode": mode, "every": every, "memory_budget": None})


def _check_size(size: int, num_train: int | None) -> None:
    if num_train is not None and size > num_train:
        raise DataError("D006", f"more than an epoch of {num_train:,} samples", key="batch_size", value=size)


def _time(run: Run, seconds: float) -> dict[str, Any]:
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    figures = time_steps(run, seconds)
    return figures | {
        "memory_bytes": peak_memory_bytes(run.device.type),
        "micro_batches": run.settings.micro_batches,
    }


WINDOWS = 5
"""Segments that are timed, of which the median counts: a neighbour's burst spoils one of them."""


def time_steps(
    run: Run, seconds: float, round_steps: int = 1, look: Callable[[], dict[str, Any]] = dict
) -> dict[str, Any]:
    """Train for about `seconds`, and measure the throughput.

    Args:
        round_steps: a window is a multiple of so many steps, whose times differ in a way that recurs.
        look: called when all is measured and workers are still there; adds to what is returned.
    """
    trainer, progress, clock = Trainer(run), run.progress, run.clock
    run.settings.total_steps = ENDLESS
    batches = trainer.warm_up(clock.waiting(run.train_loader.steps(progress.step, ENDLESS)))

    def take(num_steps: int) -> tuple[int, float]:
        samples, start = progress.samples, time.perf_counter()
        trainer.train(batches, progress.step + num_steps)
        trainer.window.read()
        return progress.samples - samples, time.perf_counter() - start

    # The first step waits for kernels and processes to be made ready, and finds batches ready after that. A
    # window begins in the middle of a round: at its edge, batches that come late would count in another one.
    take(1 + round_steps // 2)
    window_s, num_steps = seconds / WINDOWS, round_steps
    while (took_s := mean_over_ranks(take(num_steps)[1], run)) < window_s / 2:
        num_steps *= 2
    window_steps = round_steps * max(1, round(window_s / took_s * num_steps / round_steps))
    waited_s = -clock.ledger()["data"]
    windows = [take(window_steps) for _ in range(WINDOWS)]
    waited_s += clock.ledger()["data"]
    rates = [samples / took_s for samples, took_s in windows]
    total_s = sum(took_s for _, took_s in windows)
    return {
        "samples_per_s": statistics.median(rates),
        "rates": rates,
        "low": min(rates),
        "high": max(rates),
        "step_s": statistics.median(took_s for _, took_s in windows) / window_steps,
        "waiting": mean_over_ranks(waited_s / total_s, run),
        **look(),
    }
