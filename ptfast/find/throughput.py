"""Samples per second and memory of a config at several batch sizes, measured in this process."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ptfast.config.schema import Config
from ptfast.config.sections import Checkpointing, Curriculum
from ptfast.data import Data
from ptfast.display import Display
from ptfast.distributed import Ranks, sum_over_ranks
from ptfast.errors import EXIT_BUG, EXIT_OK, DataError
from ptfast.find.child import write_trial
from ptfast.find.room import memory_to_spare
from ptfast.loading import load_data
from ptfast.loop import evaluate
from ptfast.machine import is_memory_error
from ptfast.run import EvalLoader, MicroBatch, Run
from ptfast.runner import build
from ptfast.trainer import Trainer
from ptfast.worker import leave, peak_memory_bytes

WARM_UP_STEPS = 2
WINDOWS = 5
"""Stretches that are timed, of which the median counts: a neighbour's burst spoils one of them."""
ENDLESS = 2**31


def time_batches(
    config: Config,
    folder: Path,
    ranks: Ranks,
    *,
    sizes: Sequence[int],
    seconds: float,
    checkpointing: str | None = None,
    rehearsed: bool = False,
) -> None:
    """Measure each of `sizes` in turn, up to the first that does not fit; results go to `write_trial`.

    Args:
        sizes: samples of an optimizer step over all ranks.
        seconds: that the measurement of a size takes, warm-up and building left out.
        checkpointing: mode in place of the config's.
        rehearsed: evaluate, save and train on, too, with some memory held back all the while.

    Raises:
        PtfastError: whatever stops a run in its first steps, other than a lack of memory.
    """
    data: Data | None = None
    changes: dict[str, Any] = {"curriculum": Curriculum()}
    if checkpointing is not None:
        changes["checkpointing"] = with_mode(config.checkpointing, checkpointing)
    for size in sizes:
        result: dict[str, Any] = {"size": size, "rehearsed": rehearsed}
        try:
            data = data or load_data(config, ranks)
            _check_size(size, data.info.num_train)
            # What grows is measured at its full size, at which it has to fit.
            changed = config.model_copy(update={"batch_size": size, **changes})
            run = build(changed, ranks=ranks, folder=folder, display=Display(), data=data)
            try:
                with memory_to_spare(run.device) if rehearsed else contextlib.nullcontext():
                    result |= _time(run, seconds)
                    if rehearsed:
                        _evaluate_and_save(run)
                        _time(run, 0.0)
            finally:
                for loader in (run.train_loader, *run.eval_loaders.values()):
                    loader.close()
            del run
        except DataError as error:
            if error.code != "D006":
                raise
            # A size that this data cannot be cut into, such as one that leaves a single sample.
            if ranks.is_first:
                write_trial(folder, {**result, "refused": error.what})
            continue
        except (MemoryError, RuntimeError) as error:
            if not is_memory_error(error):
                raise
            # The other ranks may wait in a collective for this one: their parent ends them.
            write_trial(folder, {**result, "no_room": str(error).splitlines()[0][:200]})
            leave(EXIT_BUG if ranks.distributed else EXIT_OK)
        if ranks.is_first:
            write_trial(folder, result)


def with_mode(section: Checkpointing, mode: str) -> Checkpointing:
    """The section with another mode, as the option of that name has it."""
    every = section.every or 2 if mode == "every_n" else None
    return section.model_copy(update={"mode": mode, "every": every, "memory_budget": None})


def _evaluate_and_save(run: Run) -> None:
    """One batch of every split, and a saved state, which take memory of their own."""
    for loader in run.eval_loaders.values():
        evaluate(
            run.model,
            run.task,
            _First(loader),
            device=run.device,
            ranks=run.ranks,
            precision=run.precision,
            average=run.ema,
            flip=run.flip,
            full_size=run.full_size,
            sharded=run.sharded,
        )
    run.save(run, False)


class _First:
    """The first batch of a loader, for a loader."""

    def __init__(self, loader: EvalLoader) -> None:
        self.loader, self.num_samples, self.left_out = loader, loader.num_samples, loader.left_out

    def __iter__(self) -> Iterator[MicroBatch]:
        return itertools.islice(self.loader, 1)

    def close(self) -> None:
        """Nothing to stop."""


def _check_size(size: int, num_train: int | None) -> None:
    if num_train is not None and size > num_train:
        raise DataError("D006", f"more than an epoch of {num_train:,} samples", key="batch_size", value=size)


def _time(run: Run, seconds: float) -> dict[str, Any]:
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    trainer, progress = Trainer(run), run.progress
    run.total_steps = ENDLESS
    batches = trainer.rehearse(run.train_loader.steps(progress.step, ENDLESS))
    start = time.perf_counter()
    trainer.train(batches, progress.step + WARM_UP_STEPS)
    trainer.read_loss()
    step_s = _agreed(time.perf_counter() - start, run) / WARM_UP_STEPS
    # The first steps are slower than the rest, so that a window comes out shorter than planned.
    window_steps = max(1, round(seconds / WINDOWS / step_s))
    rates, step_times = [], []
    for _ in range(WINDOWS):
        samples, start = progress.samples, time.perf_counter()
        trainer.train(batches, progress.step + window_steps)
        trainer.read_loss()
        took_s = time.perf_counter() - start
        rates.append((progress.samples - samples) / took_s)
        step_times.append(took_s / window_steps)
    return {
        "samples_per_s": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
        "step_s": statistics.median(step_times),
        "memory_bytes": peak_memory_bytes(run.device.type),
        "micro_batches": run.micro_batches,
    }


def _agreed(seconds: float, run: Run) -> float:
    """The mean over ranks, so that all of them go on for as many steps."""
    total = torch.tensor(seconds, device=run.device, dtype=torch.float32)
    return max(float(sum_over_ranks(total, run.ranks)) / run.ranks.num_ranks, 1e-6)
