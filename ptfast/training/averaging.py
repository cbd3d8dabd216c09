"""From a config to the average of the weights that it asks for, and the samples this is measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import Task, Watched
from ptfast.data.build_data import Data
from ptfast.techniques.ema.weight_averages import Average, Ema, Swa
from ptfast.techniques.precision.number_formats import Precision
from ptfast.training.prepare_data import build_statistics_loader, evaluated_at_once


def build_average(
    config: Config,
    model: nn.Module,
    data: Data,
    task: Task,
    precision: Precision,
    ranks: Ranks,
    *,
    micro_batches: int,
    steps_of: Callable[[str, Duration], int],
    every: Callable[[str, Duration], Sequence[int]],
    total_steps: int,
    **loading: Any,
) -> Average | None:
    """The average that is evaluated in place of the weights, or None.

    Args:
        steps_of: a key's duration in optimizer steps.
        every: the steps after which another of a key's durations is over.
        total_steps: of the run.
        loading: how samples are read.

    Raises:
        ConfigError: C011 when SWA would find no weights to average.
    """
    section = config.ema
    if section.decay is not None:
        return Ema(model, section.decay)
    if section.swa_start is None:
        return None
    start_step = steps_of("ema.swa_start", section.swa_start)
    steps = [step for step in every("ema.swa_every", section.swa_every) if step >= start_step]
    if not steps:
        what = f"no step from {start_step:,} to {total_steps:,} is due by ema.swa_every={section.swa_every}"
        hint = "Start earlier, or average more often, such as ema.swa_every=10steps"
        raise ConfigError("C011", what, key="ema.swa_start", value=section.swa_start, suggestion=hint)
    samples = build_statistics_loader(
        data,
        batch_size=evaluated_at_once(config, data.info, micro_batches),
        seed=config.seed,
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        **loading,
    )

    def forward(watched: Watched) -> None:
        assert samples is not None
        with precision.autocast():
            for inputs, _ in watched(iter(samples)):
                task.loss(model, inputs)

    return Swa(
        model,
        steps,
        forward if samples is not None else None,
        ranks=ranks,
        extendable="percent" not in (section.swa_start.unit, section.swa_every.unit),
    )
