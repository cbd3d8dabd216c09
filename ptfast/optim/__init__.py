"""Settings of a run's optimizer and of parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import InUnit
from ptfast.core.sections.section import (
    Count,
    Family,
    NotNegative,
    Positive,
    Section,
    TargetSection,
    Unused,
    UpToOne,
)
from ptfast.techniques.ema import Ema
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.parallel import Parallel
from ptfast.techniques.schedule import Schedule


class ParameterGroup(Section):
    """Settings of the parameters whose names match; if entries disagree, the later one wins."""

    match: str
    """Pattern of names, such as `*.bias` or `layers.0.*`; `*` also matches dots, and case matters."""
    lr_scale: Positive | None = None
    """Factor on the learning rate."""
    weight_decay: NotNegative | None = None
    """Weight decay in place of the optimizer's."""
    name: str | None = None
    """Name of their optimizer, such as `critic`, for a task that steps its optimizers itself."""
    trains_from: Annotated[Duration, InUnit("epochs")] | None = None
    """Point of the run at which they start to train."""
    trains_until: Annotated[Duration, InUnit("epochs")] | None = None
    """Point of the run at which they stop training; 0 keeps them frozen throughout."""


class Optimizer(TargetSection):
    """The optimizer, and settings of individual parameters."""

    decay_1d: bool = True
    """Apply weight decay also to norms and biases (parameters of at most one dimension)."""
    layer_decay: UpToOne | None = None
    """Factor on the learning rate for every layer between a parameter and the output, such as 0.75."""
    freeze_backbone: Annotated[Duration, InUnit("epochs")] | None = None
    """How long all layers below the last are frozen, for example `1epochs`; null never freezes them."""
    freeze_backbone_stats: bool = False
    """In frozen layers, let BatchNorm normalize by its running statistics, without updating them."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Settings of parameters by name: a list such as `[{match: "*.bias", lr_scale: 64}]`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with the batch size, relative to `reference_batch`."""
    reference_batch: Count | None = None
    """The batch size for which learning rate and weight decay are given."""


def one_way_of_clipping(gradients: Gradients) -> Iterator[PtfastError]:
    """Reject more than one way of clipping gradients."""
    names = ("clip_norm", "clip_value", "clip_adaptive")
    ways = [(f"gradients.{name}", value) for name in names if (value := getattr(gradients, name))]
    for key, value in ways[1:]:
        what, hint = f"contradicts {ways[0][0]}={ways[0][1]:g}", "Set one of the two to null"
        yield ConfigError("C011", what, key=key, value=value, suggestion=hint)


def keys_that_fit_together(optimizer: Optimizer) -> Iterator[PtfastError]:
    """Reject keys of the optimizer that contradict one another."""
    kwargs, rule = optimizer.target.kwargs, optimizer.lr_scaling
    if kwargs.get("nesterov") is True and kwargs.get("momentum") == 0:
        what, hint = "Nesterov needs a momentum", "Set optimizer.momentum=0.9, or optimizer.nesterov=false"
        yield ConfigError("C011", what, key="optimizer.nesterov", value=True, suggestion=hint)
    if rule != "none" and optimizer.reference_batch is None:
        what, hint = "there is no batch size to scale from", "Set optimizer.reference_batch=256, say"
        yield ConfigError("C011", what, key="optimizer.lr_scaling", value=rule, suggestion=hint)
    if kwargs.get("differentiable") is True:
        what = "is for losses that are differentiated through the optimizer, which training is not"
        yield ConfigError("C011", what, key="optimizer.differentiable", value=True, suggestion="Leave it out")
    if kwargs.get("fused") is True and kwargs.get("foreach") is True:
        what, hint = "contradicts optimizer.fused=true", "Leave one of the two out"
        yield ConfigError("C011", what, key="optimizer.foreach", value=True, suggestion=hint)


def sharded_parameters(optimizer: Optimizer, parallel: Parallel) -> Iterator[PtfastError]:
    """Reject optimizers and freezing that do not work on sharded weights."""
    if parallel.strategy != "fsdp":
        return
    from torch.optim import Adafactor

    path, kind = optimizer.target.path, optimizer.target.resolve()
    backbone = optimizer.freeze_backbone
    waits = backbone is not None and bool(backbone.value)
    ends = [end for group in optimizer.groups for end in (group.trains_from, group.trains_until)]
    # Parameters that are frozen throughout (`trains_until` of 0) never switch.
    switching = waits or any(end is not None and end.value for end in ends)
    if getattr(kind, "needs_whole_layers", False):
        what = "needs whole layers, and under parallel=fsdp each rank has only a part of each"
        hint = "Use parallel=ddp, or an element-wise optimizer such as optimizer=adamw"
        yield ConfigError("C011", what, key="optimizer", value=path, suggestion=hint)
    if kind is Adafactor:
        what = "torch's Adafactor does not support the sharded weights of parallel=fsdp"
        yield ConfigError("C011", what, key="optimizer", value=path, suggestion="Use optimizer=adamw")
    if switching:
        what = "parallel=fsdp shards weights once, by what trains at the start"
        key, hint = "optimizer.groups", "Freeze throughout with trains_until: 0, or use parallel=ddp"
        if waits:
            key, hint = "optimizer.freeze_backbone", "Set it to null, or use parallel=ddp"
        yield ConfigError("C011", what, key=key, value=backbone, suggestion=hint)


def averages_itself(optimizer: object) -> bool:
    """Return True for a schedule-free optimizer, whose `eval` and `train` swap its weights."""
    return hasattr(optimizer, "eval") and hasattr(optimizer, "train")


def no_schedule_with_schedule_free(
    optimizer: Optimizer, schedule: Schedule, ema: Ema, parallel: Parallel
) -> Iterator[PtfastError]:
    """Reject schedules, weight averages and sharded weights with a schedule-free optimizer."""
    if not averages_itself(optimizer.target.resolve()):
        return
    path = schedule.target.path
    if not path.endswith(".Constant"):
        what = "a schedule-free optimizer averages its weights in place of a schedule"
        hint = "Use schedule=constant, with schedule.warmup=5%"
        yield ConfigError("C011", what, key="schedule", value=path.rpartition(".")[2], suggestion=hint)
    if ema.decay is not None or ema.swa_start is not None:
        what = "a schedule-free optimizer keeps an average of its own"
        yield ConfigError("C011", what, key="ema", suggestion="Use ema=none")
    if parallel.strategy == "fsdp":
        what = "needs whole weights, and under parallel=fsdp each rank has only a part of each"
        key, hint = "optimizer", "Use parallel=ddp"
        yield ConfigError("C011", what, key=key, value=optimizer.target.path, suggestion=hint)


FAMILY = Family(
    rules=(no_schedule_with_schedule_free, one_way_of_clipping, keys_that_fit_together, sharded_parameters),
    unused=(Unused.unless("optimizer.lr_scaling", ("linear", "sqrt"), "optimizer.reference_batch"),),
)
