"""From a config to the average of the weights that it asks for, and the samples this is measured on."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import EvalLoader, Task, Watched
from ptfast.data.build_data import Data
from ptfast.data.loaders.eval_loader import build_eval_loader
from ptfast.data.loaders.loading import Loading
from ptfast.data.streams.iterable import IterableSource
from ptfast.techniques.ema.weight_averages import Average, Ema, ScheduleFree, Swa
from ptfast.training.course import Course
from ptfast.training.prepare_data import evaluated_at_once
from ptfast.training.prepare_machine import BuildContext

STATISTICS_SAMPLES = 4096
"""Training samples that BatchNorm's statistics are measured on; more do not change them much."""


def build_average(
    context: BuildContext,
    model: nn.Module,
    data: Data,
    task: Task,
    course: Course,
    loading: Loading,
    optimizer: torch.optim.Optimizer,
) -> Average | None:
    """The average that is evaluated in place of the weights, or None.

    Args:
        optimizer: one with methods `eval` and `train` keeps an average of its own.

    Raises:
        ConfigError: C011 when SWA would find no weights to average.
    """
    section = context.config.ema
    if section.decay is not None:
        return Ema(model, section.decay)
    by_optimizer = hasattr(optimizer, "eval") and hasattr(optimizer, "train")
    if section.swa_start is None and not by_optimizer:
        return None
    samples = _build_statistics_loader(
        data,
        loading,
        batch_size=evaluated_at_once(context.config.eval, data.info, context.micro_batch_size),
        seed=context.config.seed,
        rank=context.ranks.rank,
        num_ranks=context.ranks.num_ranks,
    )

    def forward(watched: Watched) -> None:
        assert samples is not None
        with context.precision.autocast():
            for inputs, _ in watched(iter(samples)):
                task.loss(model, inputs)

    measure = forward if samples is not None else None
    if section.swa_start is None:
        return ScheduleFree(model, optimizer, measure, ranks=context.ranks)
    start_step = course.steps("ema.swa_start", section.swa_start)
    steps = [step for step in course.every("ema.swa_every", section.swa_every) if step >= start_step]
    if not steps:
        span = f"from {start_step:,} to {course.total_steps:,}"
        what = f"no step {span} is averaged by ema.swa_every={section.swa_every}"
        hint = "Start earlier, or average more often, such as ema.swa_every=10steps"
        raise ConfigError("C011", what, key="ema.swa_start", value=section.swa_start, suggestion=hint)
    return Swa(
        model,
        steps,
        measure,
        ranks=context.ranks,
        extendable="percent" not in (section.swa_start.unit, section.swa_every.unit),
    )


def _build_statistics_loader(
    data: Data, loading: Loading, *, batch_size: int, seed: int, rank: int, num_ranks: int
) -> EvalLoader | None:
    """Some thousand training samples in a random order, as many on each rank, as they are evaluated.

    Returns:
        None where there are too few samples, or iterable data, of which none may be taken.
    """
    if isinstance(data.train, IterableSource):
        return None
    size = len(data.train)
    share = min(STATISTICS_SAMPLES, size) // num_ranks
    # BatchNorm takes no batch of one sample.
    share -= share % batch_size == 1
    if share < 2:
        return None
    # In the order of a folder a batch would hold a single class.
    picked = np.random.default_rng(seed).permutation(size)[: share * num_ranks]
    return build_eval_loader(
        data.train.take(picked), data.info, loading, batch_size=batch_size, rank=rank, num_ranks=num_ranks
    )
