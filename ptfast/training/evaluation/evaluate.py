"""Figures of a model over a whole split."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ptfast.core import devices
from ptfast.core.distributed import Ranks, broadcast_buffers
from ptfast.core.protocols import EvalLoader, Task, Watched
from ptfast.tasks.added_metrics import Table, with_tables
from ptfast.techniques.ema.weight_averages import Average
from ptfast.techniques.precision.number_formats import Precision
from ptfast.training.evaluation.pad_batches import FullSize
from ptfast.training.evaluation.test_time_views import averaged_over_views
from ptfast.training.step_parts.first_step import fitting
from ptfast.training.step_parts.loss_window import sum_and_read
from ptfast.training.stopping import Stopped


class Abandoned(Exception):  # noqa: N818 - nothing is wrong
    """An evaluation that a signal has cut short, on all ranks."""


def evaluate(
    model: nn.Module,
    task: Task,
    loader: EvalLoader,
    *,
    device: torch.device,
    ranks: Ranks,
    precision: Precision,
    average: Average | None = None,
    flip: bool = False,
    shift: int = 0,
    full_size: int | None = None,
    stop_asked: Callable[[], bool] = lambda: False,
    watched: Watched = lambda batches: batches,
    sharded: bool = False,
    keep: Callable[[dict[str, Table]], None] = lambda tables: None,
) -> dict[str, float]:
    """Figures of `model` over a whole split, each sample counted once, sums kept on the device.

    Args:
        average: averaged weights. Where there are such, the figures are theirs, and those of the model's own
            weights stand beside them as `raw_loss` and the like.
        flip, shift: average outputs over several views of an image, see `ViewAveraged`.
        full_size: samples that every batch is filled up to with stand-ins, which count for nothing.
        stop_asked: whether to give up, asked before every batch.
        watched: goes through the batches, and may give up the wait for one.
        sharded: whether a forward pass takes all ranks, those too whose share is empty.
        keep: called with what metrics give that is no single number, by name; of averaged weights where there
            are such.

    Raises:
        Abandoned: some rank was asked to give up.
    """
    predictor = averaged_over_views(model, flip=flip, shift=shift)
    if full_size is not None:
        predictor = FullSize(predictor, full_size)
    figures_of_weights = partial(
        _evaluate, predictor, model, task, loader, device, ranks, precision, stop_asked, watched, sharded
    )
    if average is None or not average.ready:
        return figures_of_weights(keep=keep)
    with average.swapped():
        figures = figures_of_weights(keep=keep)
    return figures | {f"raw_{name}": value for name, value in figures_of_weights().items()}


@torch.inference_mode()
def _evaluate(
    predictor: nn.Module,
    model: nn.Module,
    task: Task,
    loader: EvalLoader,
    device: torch.device,
    ranks: Ranks,
    precision: Precision,
    stop_asked: Callable[[], bool],
    watched: Watched,
    sharded: bool,
    keep: Callable[[dict[str, Table]], None] = lambda tables: None,
) -> dict[str, float]:
    metrics = task.metrics().to(device)
    loss_sum = torch.zeros((), dtype=devices.sum_dtype(device), device=device)
    num_items: Any = 0
    abandoned = 1
    was_training = predictor.training
    predictor.eval()
    with precision.autocast(), suppress(Stopped):
        # BatchNorm's are the same everywhere; a model may have others.
        broadcast_buffers(list(model.buffers()), ranks)
        for index, (data, num_samples) in enumerate(watched(iter(loader))):
            if stop_asked():
                break
            if num_samples:
                looked = predictor if index else fitting(predictor, model, task, data, " in evaluation")
                loss, count = task.evaluate(looked, data, metrics)
                loss_sum += loss
                num_items += count
            elif sharded:
                task.evaluate(predictor, data, task.metrics().to(device))
        else:
            abandoned = 0
    predictor.train(was_training)
    total_loss, total_items, num_abandoned = sum_and_read([loss_sum, num_items, abandoned], device, ranks)
    if num_abandoned:
        raise Abandoned
    with warnings.catch_warnings():
        # A rank whose share is empty has updated nothing, and gets the sums of the others.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        given = with_tables(metrics)
    keep({name: value for name, value in given.items() if isinstance(value, Table)})
    values = {name: float(value) for name, value in given.items() if not isinstance(value, Table)}
    return task.figures(total_loss / max(total_items, 1), values)
