"""The training loop of a script, and its evaluation."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.measure.eject.parts.script_images import Split, evaluation_batch, load_data, training_batch
from ptfast.measure.eject.parts.script_order import shuffled, step_seed

DEVICE = "cpu"
TOTAL_STEPS = 100
BATCH_SIZE = 64
MICRO_BATCHES = 1
DROP_LAST = False
LOG_STEPS = 50
EVAL_STEPS = 50
EVAL_BATCH_SIZE = 256
AUTOCAST: torch.dtype | None = None
TASK = "classification"
LABEL_SMOOTHING = 0.0
CLIP_NORM: float | None = None
CLIP_VALUE: float | None = None


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train `model` for TOTAL_STEPS; return the mean losses of every LOG_STEPS."""
    splits = load_data()
    base_lrs = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    loss_sum, num_items = torch.zeros((), device=DEVICE), 0
    model.train()
    for step, epoch, indices in batches(len(splits["train"])):
        batch_loss, batch_items = backward(model, splits["train"], step, epoch, indices)
        if CLIP_NORM is not None:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        if CLIP_VALUE is not None:
            nn.utils.clip_grad_value_(model.parameters(), CLIP_VALUE)
        for group, base_lr in zip(optimizer.param_groups, base_lrs):  # noqa: B905
            group["lr"] = base_lr * lr_factor(step)
            if PHASE_MOMENTA:
                set_momentum(group, momentum(step))
        optimizer.step()
        optimizer.zero_grad()
        loss_sum += batch_loss
        num_items += batch_items
        if (step + 1) % LOG_STEPS == 0:
            losses.append(loss_sum.item() / num_items)
            print(f"step {step + 1:,} of {TOTAL_STEPS:,}, epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
            loss_sum.zero_()
            num_items = 0
        if "val" in splits and ((step + 1) % EVAL_STEPS == 0 or step + 1 == TOTAL_STEPS):
            print(f"step {step + 1:,}, validation: {evaluate(model, splits['val'])}", flush=True)
    if "test" in splits:
        print(f"test: {evaluate(model, splits['test'])}")
    return losses


def batches(size: int) -> Any:
    """Yield each step, its epoch and the indices of its samples, of `size` shuffled anew in every epoch."""
    step = 0
    for epoch in count():
        order = shuffled(epoch, size)
        if DROP_LAST:
            order = order[: size // BATCH_SIZE * BATCH_SIZE]
        for start in range(0, len(order), BATCH_SIZE):
            yield step, epoch, order[start : start + BATCH_SIZE]
            step += 1
            if step == TOTAL_STEPS:
                return


def backward(
    model: nn.Module, split: Split, step: int, epoch: int, indices: np.ndarray
) -> tuple[Tensor, int]:
    """Add the gradient of the mean loss of a batch; return the sum of its losses, and of how many items."""
    if MICRO_BATCHES == 1:
        inputs, targets = training_batch(split, indices, epoch)
        torch.manual_seed(step_seed(step))
        loss = summed_loss(model, inputs, targets)
        (loss / targets.numel()).backward()
        return loss.detach(), targets.numel()
    losses = torch.zeros((), device=DEVICE)
    cuts = [part * len(indices) // MICRO_BATCHES for part in range(MICRO_BATCHES + 1)]
    parts = [training_batch(split, indices[cuts[k] : cuts[k + 1]], epoch) for k in range(MICRO_BATCHES)]
    num_items = sum(targets.numel() for _, targets in parts)
    for micro_batch, (inputs, targets) in enumerate(parts):
        torch.manual_seed(step_seed(step, micro_batch))
        loss = summed_loss(model, inputs, targets)
        (loss / num_items).backward()
        losses += loss.detach()
    return losses, num_items


def summed_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of a batch, summed over its items."""
    if AUTOCAST is not None:
        with torch.autocast(DEVICE, AUTOCAST):
            return cross_entropy(model(inputs), targets, LABEL_SMOOTHING)
    return cross_entropy(model(inputs), targets, LABEL_SMOOTHING)


def cross_entropy(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Summed over all targets."""
    if TASK == "language_modelling":
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    return F.cross_entropy(outputs, targets, reduction="sum", label_smoothing=label_smoothing)


def set_momentum(group: dict[str, Any], value: float) -> None:
    """Set SGD's momentum, or beta1 of Adam's family."""
    if "momentum" in group:
        group["momentum"] = value
    else:
        group["betas"] = (value, *group["betas"][1:])


@torch.inference_mode()
def evaluate(model: nn.Module, split: Split) -> str:
    """Loss and accuracy of a split."""
    model.eval()
    loss_sum, hits, num_items = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE), 0
    for start in range(0, len(split), EVAL_BATCH_SIZE):
        inputs, targets = evaluation_batch(split, start, min(start + EVAL_BATCH_SIZE, len(split)))
        with torch.autocast(DEVICE, AUTOCAST, enabled=AUTOCAST is not None):
            outputs = model(inputs)
            loss_sum += cross_entropy(outputs, targets)
        hits += (outputs.argmax(-1) == targets).sum()
        num_items += targets.numel()
    model.train()
    return f"loss {loss_sum.item() / num_items:.4f}, accuracy {hits.item() / num_items:.4f}"


SCHEDULE = "constant"
WARMUP_STEPS = 0
DELAY_STEPS = 0
SPAN_STEPS = 1
MILESTONES: tuple[int, ...] = ()
GAMMA = 0.1
END_FACTOR = 0.0
POWER = 1.0
PHASE_ENDS: tuple[float, ...] = (0.0,)
PHASE_FACTORS: tuple[float, ...] = (1.0, 1.0)
PHASE_MOMENTA: tuple[float, ...] = ()
ANNEAL = "linear"


def lr_factor(step: int) -> float:
    """Factor on the learning rate of a step, counted from 0."""
    if not WARMUP_STEPS:
        return shape(step)
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS * shape(max(step - DELAY_STEPS, 0))
    return shape(step - DELAY_STEPS)


def shape(step: int) -> float:
    """The schedule without its warm-up."""
    if SCHEDULE in ("step", "multistep"):
        return GAMMA ** bisect_right(MILESTONES, step)
    if SCHEDULE == "onecycle":
        return phased(step, PHASE_FACTORS)
    if SCHEDULE == "constant":
        return 1.0
    left = max(1 - step / SPAN_STEPS, 0.0)
    if SCHEDULE == "cosine":
        return END_FACTOR + (1 - END_FACTOR) * (1 - math.cos(math.pi * left)) / 2
    if SCHEDULE == "polynomial":
        return END_FACTOR + (1 - END_FACTOR) * left**POWER
    return END_FACTOR + (1 - END_FACTOR) * left


def momentum(step: int) -> float:
    """Momentum of a step: low where the rate is high."""
    if WARMUP_STEPS:
        step = max(step - DELAY_STEPS, 0)
    return phased(step, PHASE_MOMENTA)


def phased(step: int, values: Sequence[float]) -> float:
    """From each of `values` to the next, which is reached at the end of a phase."""
    step = min(step, SPAN_STEPS - 1)
    phase = bisect_left(PHASE_ENDS, step, hi=len(PHASE_ENDS) - 1)
    start = (0.0, *PHASE_ENDS)[phase]
    length = PHASE_ENDS[phase] - start
    done = (step - start) / length if length else 1.0
    first, last = values[phase], values[phase + 1]
    if ANNEAL == "cosine":
        return last + (first - last) / 2 * (1 + math.cos(math.pi * done))
    return first + (last - first) * done
