"""Find the cause of a non-finite loss or gradient: the first module, and the samples."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptfast.core.distributed import on_all_ranks
from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.core.tensors.trees import tree_leaves
from ptfast.run import Run
from ptfast.techniques.parallel.sync_batchnorm import SyncedBatchNorm

NAMED = 5
"""Number of samples to name; the rest are counted."""


def explain(run: Run, step: int, batch: StepBatch | None) -> None:
    """Warn that `step`, counted from 0, was skipped, and name the cause; called on all ranks.

    If this rank's `batch` of the step is still available, a copy of the model runs on it again.

    Cost: a copy of the model, a forward pass and perhaps a backward pass, once per run.
    """
    cause = None
    # Layers that exchange statistics in their forward pass would wait for ranks that stop at a cause.
    synced = any(isinstance(each, (SyncedBatchNorm, nn.SyncBatchNorm)) for each in run.model.modules())
    if batch is not None and not run.sharded and not synced:
        # The model may not support copying, or memory may run out.
        with contextlib.suppress(Exception):
            cause = _find_cause(run, step, batch.micro_batches)
    numbers = run.train_loader.sample_numbers(step)
    if cause is not None and numbers:
        numbers = [own := numbers[cause.micro_batch]]
        if cause.rows is not None and len(cause.rows) == len(own):
            numbers = [own[cause.rows.cpu().numpy()]]
    mine = None if cause is None else cause.place, [int(number) for own in numbers for number in own]
    found = on_all_ranks(mine, run.ranks.world_size)
    places = [place for place, _ in found if place is not None]
    samples = sorted({n for place, own in found for n in own if place is not None or not places})
    what = f"step {step + 1} was skipped: its loss or gradients are not finite"
    if places:
        what += f", first {places[0]}"
    if samples:
        names = ", ".join(f"{number:,}" for number in samples[:NAMED])
        more = f" and {len(samples) - NAMED:,} more" if len(samples) > NAMED else ""
        what += f"; samples {names}{more}"
    run.display.warn(f"{what}. Further skipped steps are counted in skipped_steps")


class _Cause(NamedTuple):
    place: str
    micro_batch: int
    """Index among the micro-batches that have samples."""
    rows: Tensor | None = None
    """True for each sample with a non-finite number; None for all samples."""


def _find_cause(run: Run, step: int, micro_batches: tuple[MicroBatch, ...]) -> _Cause | None:
    """Return where the first non-finite number appears in this rank's part of a step."""
    model, number, found = copy.deepcopy(run.model), -1, list[_Cause]()

    def note(name: str, module: Any, inputs: Any, outputs: Any) -> None:
        for what, values in (("inputs", inputs), ("output", outputs)):
            for leaf in () if found else tree_leaves(values):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                    rows = ~leaf.detach().reshape(len(leaf), -1).isfinite().all(1)
                    place = f"in the {what} of {name or 'the model'} ({type(module).__name__})"
                    found.append(_Cause(place, number, rows))

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note, name))
    first = run.ranks.rank * (run.micro_batches // run.ranks.world_size)
    for index, (data, num_samples) in enumerate(micro_batches):
        if not num_samples:
            continue
        number += 1
        run.seed_step(step, first + index)
        with run.uncompiled(), run.precision.autocast:
            loss, _ = run.task.loss(model, data)
        if not found and not bool(loss.isfinite()):
            found.append(_Cause("in the loss", number))
        if not found:
            names, weights = zip(
                *((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True
            )
            grads = torch.autograd.grad(loss, weights, allow_unused=True)
            for name, grad in zip(names, grads, strict=True):
                if grad is not None and not bool(grad.isfinite().all()):
                    # Keep the last one: the backward pass starts at the end of the model.
                    found[:] = [_Cause(f"in the gradient of {name}", number)]
        if found:
            return found[0]
    return None
