"""Samples per second and memory of a config at several batch sizes, measured in this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from ptfast.config.schema import Config
from ptfast.config.sections import Checkpointing, Curriculum
from ptfast.display import Display
from ptfast.distributed import Ranks
from ptfast.errors import EXIT_BUG, EXIT_OK, DataError
from ptfast.find.child import write_trial
from ptfast.find.room import memory_to_spare
from ptfast.find.timing import time_steps
from ptfast.loop import evaluate
from ptfast.machine import is_memory_error
from ptfast.run import EvalLoader, MicroBatch, Run
from ptfast.runner import build
from ptfast.worker import leave, peak_memory_bytes


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
    changes: dict[str, Any] = {"curriculum": Curriculum()}
    if checkpointing is not None:
        changes["checkpointing"] = with_mode(config.checkpointing, checkpointing)
    for size in sizes:
        result: dict[str, Any] = {"size": size, "rehearsed": rehearsed}
        try:
            # What grows is measured at its full size, at which it has to fit.
            changed = config.model_copy(update={"batch_size": size, **changes})
            run = build(changed, ranks=ranks, folder=folder, display=Display())
            try:
                _check_size(size, run.info.num_train)
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
            leave_without_room(folder, ranks, result, error)
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


def leave_without_room(folder: Path, ranks: Ranks, result: dict[str, Any], error: Exception) -> NoReturn:
    """End this process, in which nothing can be trusted any more, with word of the trial that did not fit."""
    write_trial(folder, {**result, "no_room": str(error).splitlines()[0][:200]})
    # The other ranks may wait in a collective for this one: their parent ends them.
    leave(EXIT_BUG if ranks.distributed else EXIT_OK)


def _time(run: Run, seconds: float) -> dict[str, Any]:
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    figures = time_steps(run, seconds)
    return figures | {
        "memory_bytes": peak_memory_bytes(run.device.type),
        "micro_batches": run.micro_batches,
    }
