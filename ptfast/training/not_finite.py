"""What made a step's loss or gradients not finite: the first module, and the samples."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core.distributed import on_all_ranks
from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.core.tensors.trees import tree_leaves
from ptfast.run import Run

NAMED = 5
"""Samples that are named; the others are counted."""


def explain(run: Run, step: int, batch: StepBatch | None) -> None:
    """Warn that `step`, counted from 0, was left out, and of what made it so; called on all ranks.

    This rank's `batch` of it, if it can still be had, goes through a copy of the model once more.

    Cost: a copy of the model, a forward pass and perhaps a backward pass, once a run.
    """
    place, rows = None, list[Tensor | None]()
    if batch is not None and not run.sharded:
        # A model may refuse to be copied, or memory end.
        with contextlib.suppress(Exception):
            place, rows = _look_for_cause(run, step, batch.micro_batches)
    numbers = run.train_loader.sample_numbers(step)
    if place is not None and len(rows) == len(numbers):
        pairs = zip(numbers, rows, strict=True)
        numbers = [own if row is None or len(row) != len(own) else own[row.numpy()] for own, row in pairs]
    mine = sorted({int(number) for own in numbers for number in own})
    found = on_all_ranks((place, mine), run.ranks.num_ranks)
    places = [each for each, _ in found if each is not None]
    samples = sorted({n for each, own in found for n in own if each is not None or not places})
    what = f"step {step + 1} was left out: its loss or gradients are not finite"
    if places:
        what += f", first {places[0]}"
    if samples:
        names = ", ".join(f"{number:,}" for number in samples[:NAMED])
        more = f" and {len(samples) - NAMED:,} more" if len(samples) > NAMED else ""
        what += f"; its samples: {names}{more}"
    run.display.warn(f"{what}. Further ones are counted as skipped_steps")


def _look_for_cause(
    run: Run, step: int, micro_batches: tuple[MicroBatch, ...]
) -> tuple[str | None, list[Tensor | None]]:
    """Where the first number that is not finite appears, and the rows of each micro-batch that have one."""
    model, places, rows = copy.deepcopy(run.model), list[str](), list[Tensor | None]()

    def look(name: str, module: Any, inputs: Any, outputs: Any) -> None:
        if places:
            return
        for what, values in (("in the inputs of", inputs), ("in the output of", outputs)):
            for leaf in tree_leaves(values):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                    places.append(f"{what} {name or 'the model'} ({type(module).__name__})")
                    rows.append((~leaf.detach().reshape(len(leaf), -1).isfinite().all(1)).cpu())
                    return

    for name, module in model.named_modules():
        module.register_forward_hook(partial(look, name))
    first = run.ranks.rank * (run.micro_batches // run.ranks.num_ranks)
    with run.uncompiled():
        for index, (data, num_samples) in enumerate(micro_batches):
            known = len(places)
            if num_samples:
                run.seed_step(run.seed, step, first + index)
                with run.precision.autocast:
                    loss, _ = run.task.loss(model, data)
                if not places and not bool(loss.isfinite()):
                    places.append("in the loss")
                if not places:
                    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
                    grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
                    wrong = [
                        name
                        for (name, _), grad in zip(named, grads, strict=True)
                        if grad is not None and not bool(grad.isfinite().all())
                    ]
                    # Backward comes from the end.
                    places += [f"in the gradient of {wrong[-1]}"] if wrong else []
            if len(rows) <= index:
                none = np.zeros(0, bool)
                rows.append(torch.from_numpy(none) if not num_samples or len(places) == known else None)
    return (places[0] if places else None), rows
