"""Training throughput in this process, and the share of time that waits for data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from ptfast.core.run import Run
from ptfast.training.step import Trainer
from ptfast.training.step_parts.loss_window import sum_and_read
from ptfast.training.step_parts.rehearsal import rehearse

WINDOWS = 5
"""Stretches that are timed, of which the median counts: a neighbour's burst spoils one of them."""
ENDLESS = 2**31


def time_steps(
    run: Run, seconds: float, round_steps: int = 1, look: Callable[[], dict[str, Any]] = dict
) -> dict[str, Any]:
    """Train for about `seconds`, and measure the throughput.

    Args:
        round_steps: a window is a multiple of so many steps, whose times differ in a way that recurs.
        look: called when all is measured and workers are still there; adds to what is returned.

    Returns:
        `samples_per_s` over all ranks with the `rates` of the windows, their `low` and `high`, `step_s`, and
        the share of the time that ranks spent `waiting` for their next batch.
    """
    trainer, progress, clock = Trainer(run), run.progress, run.clock
    run.settings.total_steps = ENDLESS
    batches = rehearse(trainer, clock.waiting(run.train_loader.steps(progress.step, ENDLESS)))

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


def mean_over_ranks(value: float, run: Run) -> float:
    """The mean of a figure above 0 over ranks, by which all of them decide alike."""
    return max(sum_and_read([value], run.device, run.ranks)[0] / run.ranks.num_ranks, 1e-6)
