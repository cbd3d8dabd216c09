"""Compute metrics of a model over a whole split, optionally with test-time augmentation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core import devices
from ptfast.core.distributed import broadcast_buffers
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.core.tensors.async_host_copy import AsyncHostCopy, scalars
from ptfast.core.tensors.trees import tree_map
from ptfast.data.loaders.build_loaders import EvaluationLoader
from ptfast.profiling.first_outputs import checking_outputs
from ptfast.run import Run
from ptfast.tasks.added_metrics import MetricTable, with_tables
from ptfast.tasks.ratios import placed, take_kinds
from ptfast.training.loop.first_step import with_output_check
from ptfast.training.loop.loss_accumulator import begin_sums
from ptfast.training.stopping import Stopped, interruptible


class TtaModel(nn.Module):
    """Test-time augmentation: average a model's outputs over images, their mirror images and shifted copies.

    The average is a few tenths of a percentage point more accurate than a single view.

    Args:
        model: takes images (batch, channels, height, width), returns outputs (batch, ...), such as logits;
            outputs with the height and width of the images are mirrored back, pixel by pixel.
        shift: pixels, fewer than an image has on a side; 0 for none. Half of the weight is on images moved up
            and left, and down and right; new pixels are reflected from inside.

    Cost: twice the forward passes of an evaluation for `flip`, times three for `shift`. Source: Krizhevsky,
    Sutskever, Hinton 2012; the weights of Jordan 2024, arXiv:2404.00498.
    """

    def __init__(self, model: nn.Module, *, flip: bool, shift: int = 0) -> None:
        super().__init__()
        self.model, self.training, self._flip, self._shift = model, model.training, flip, shift

    def forward(self, images: Tensor) -> Any:
        if not self._shift:
            return self._over_mirrors(images)
        height, width = images.shape[-2:]
        # All views are made first, each in its own memory: a model may write to its inputs.
        padded = F.pad(images, (self._shift,) * 4, mode="reflect")
        views = [
            padded[..., start : start + height, start : start + width].clone()
            for start in (2 * self._shift, 0)
        ]
        in_place, up, down = (self._over_mirrors(view) for view in (images, *views))
        return tree_map(lambda still, up, down: (still + (up + down) / 2) / 2, in_place, up, down)

    def _over_mirrors(self, images: Tensor) -> Any:
        if not self._flip:
            return self.model(images)
        flipped = images.flip(-1)
        outputs = self.model(images)

        def mean(output: Tensor, mirrored: Tensor) -> Tensor:
            as_large = mirrored.dim() > 2 and mirrored.shape[-2:] == images.shape[-2:]
            return (output + (mirrored.flip(-1) if as_large else mirrored)) / 2

        return tree_map(mean, outputs, self.model(flipped))


def with_tta(run: Run, model: nn.Module | None = None) -> nn.Module:
    """Return the run's model, or `model`, with test-time augmentation if the run evaluates with it."""
    model, (flip, shift) = model or run.model, (run.evaluation.flip, run.evaluation.shift)
    return TtaModel(model, flip=flip, shift=shift) if flip or shift else model


def check_tta(flip: bool, shift: int, info: DataInfo, task: Any, *, targets: str = "auto") -> None:
    """Reject test-time augmentation without images, or without outputs to average.

    `targets=keep` states that augmentation keeps targets valid.
    """
    what = None
    if not (flip or shift):
        return
    if info.kind != "image":
        what = f"only images can be flipped or shifted, but this is {info.kind} data"
    elif info.target_kind == "unknown" and targets == "auto":
        what = "targets that may be coordinates, such as boxes or points, differ between views of an image"
    elif not getattr(task, "has_outputs", True):
        what = "a model that returns its own loss has no outputs to average"
    if what is not None:
        key, value, off = ("eval.flip", "true", "false") if flip else ("eval.shift", shift, 0)
        raise ConfigError("C011", what, key=key, value=value, suggestion=f"Set {key}={off}")
    if shift and info.target_kind in ("mask", "map"):
        what = "pixels shifted out of the image have no outputs"
    elif shift and info.input_shape is not None and shift >= min(info.input_shape[-2:]):
        what = f"the images have {info.input_shape[-2]} x {info.input_shape[-1]} pixels"
    if what is not None:
        raise ConfigError("C011", what, key="eval.shift", value=shift, suggestion="Set eval.shift=0")


class Abandoned(Exception):  # noqa: N818 - nothing is wrong
    """A signal stopped an evaluation early, on all ranks."""


def evaluate(
    run: Run,
    loader: EvaluationLoader,
    *,
    keep: Callable[[dict[str, MetricTable]], None] = lambda tables: None,
    num_batches: int | None = None,
) -> dict[str, float]:
    """Evaluate a run's model over a whole split; each sample counts once, sums stay on the device.

    If the run averages its weights, the average is evaluated; metrics of the model's own weights are added
    as `raw_loss` and so on.

    Args:
        keep: called with metric results that are not single numbers, by name; of the average if there is one.
        num_batches: number of batches to evaluate; None for all.

    Raises `Abandoned` if a rank received a signal.
    """

    @torch.inference_mode()
    def evaluated(keep: Callable[[dict[str, MetricTable]], None]) -> dict[str, float]:
        return _evaluate_weights(run, islice(loader, num_batches), keep)

    with run.uncompiled():
        if run.ema is None:
            return evaluated(keep)
        try:
            run.ema.finalize(partial(interruptible, run))
        except Stopped:
            raise Abandoned from None
        if not run.ema.ready:
            return evaluated(keep)
        with run.ema.swapped():
            averaged = evaluated(keep)
        raw = evaluated(lambda tables: None)
        return averaged | {f"raw_{name}": value for name, value in raw.items()}


def _evaluate_weights(
    run: Run, batches: Iterator[Any], keep: Callable[[dict[str, MetricTable]], None]
) -> dict[str, float]:
    """Evaluate the weights that the model has now."""
    task, device = run.task, run.device
    metrics = placed(task.metrics(), device)
    loss_sum, num_items, abandoned = _sum_losses(run, batches, metrics)
    if abandoned and not run.ranks.distributed:
        raise Abandoned
    sums = begin_sums([loss_sum, num_items, abandoned], device, run.ranks)
    if run.ranks.distributed and sums.read()[2]:
        raise Abandoned
    with warnings.catch_warnings():
        # A rank without samples has updated nothing, and receives the sums of the others.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        results = with_tables(metrics)
    keep({name: value for name, value in results.items() if isinstance(value, MetricTable)})
    values = {name: value for name, value in results.items() if not isinstance(value, MetricTable)}
    on_device = {n: v.reshape(()) for n, v in values.items() if isinstance(v, Tensor) and v.is_cuda}
    if on_device:
        # Copy all values together: the host waits once.
        copy = AsyncHostCopy(scalars(on_device.values(), device, loss_sum.dtype))
        values |= zip(on_device, copy.read(), strict=True)
    total_loss, total_items, _ = sums.read()
    return task.log_values(
        total_loss / (total_items or 1), {name: float(value) for name, value in values.items()}
    )


def _sum_losses(run: Run, batches: Iterator[Any], metrics: Any) -> tuple[Tensor, Any, bool]:
    """Update `metrics` with all batches; return the loss sum, the item count, and if a signal came."""
    task, device, predictor = run.task, run.device, with_tta(run)
    loss_sum = torch.zeros((), dtype=devices.sum_dtype(device), device=device)
    num_items: Any = 0
    abandoned, was_training = True, predictor.training
    predictor.eval()
    with run.precision.autocast, suppress(Stopped):
        # BatchNorm's buffers are the same on every rank; a model may have others.
        broadcast_buffers(list(run.model.buffers()), run.ranks)
        # Ranks with shards of the weights must make every forward pass together.
        for index, (data, num_samples) in enumerate(interruptible(run, batches, together=run.sharded)):
            if run.stop_signal is not None and not run.sharded:
                break
            if num_samples:
                forward: Any = predictor
                if index == 0:
                    forward = checking_outputs(predictor, run)
                    forward = with_output_check(forward, run.model, task, data, " in evaluation")
                loss, count = task.evaluate(forward, data, metrics)
                loss_sum += loss
                num_items += count
            elif run.sharded or index == 0:
                task.evaluate(predictor, data, spare := placed(task.metrics(), device))
                if index == 0:
                    take_kinds(metrics, spare)
        else:
            abandoned = False
    predictor.train(was_training)
    return loss_sum, num_items, abandoned
