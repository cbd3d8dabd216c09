"""Samples per second and memory of a config at several batch sizes, measured in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ptfast.core.errors import DataError
from ptfast.core.machine import peak_memory_bytes
from ptfast.core.run import Run
from ptfast.measure.trials.memory_guard import memory_to_spare
from ptfast.measure.trials.train_timing import time_steps
from ptfast.measure.trials.trial_rank import TrialRank
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.curriculum import Curriculum
from ptfast.training.fit import try_out


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

    Raises:
        PtfastError: whatever stops a run in its first steps, other than a lack of memory.
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
