"""The optimizer of a run with its clipping and schedule, and the average of the weights."""

from __future__ import annotations

import math

import numpy as np

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import Watched
from ptfast.data.loaders.build_loaders import EvaluationLoader, build_eval_loader
from ptfast.data.streams.iterable import IterableSource
from ptfast.optim import averages_itself
from ptfast.optim.build_optimizer import build_optimizer, has_momentum, sparse_parameter, start_momentum
from ptfast.optim.parameter_groups import reference_lr, scale_for_batch
from ptfast.techniques.ema.weight_averages import Average, MovingAverage, ScheduleFree, Swa
from ptfast.techniques.gradients.clipping import build_clipper, head_of
from ptfast.techniques.schedule.scheduled_run import (
    TorchScheduler,
    build_schedule,
    build_shape,
)
from ptfast.training.stages.data_stage import eval_batch_size
from ptfast.training.stages.partial_run import PartialRun

STATISTICS_SAMPLES = 4096
"""Number of training samples for measuring BatchNorm's statistics; more change them little."""


def add_optimizer(run: PartialRun) -> None:
    """Build the optimizer, with learning rates scaled for the batch, clipping and freezing."""
    section, choices, grouping = run.config.optimizer, run.choices, run.grouping
    _check_gradients(run)
    run.optimizer, kernels = build_optimizer(section.target, run.model, run.device, grouping.parts())
    choices.note("optimizer", kernels)
    scaled = scale_for_batch(run.optimizer, section, run.config.batch_size)
    choices.note("lr_scaling", scaled, scaled)
    on_device = run.device.type != "cpu" and run.config.numerics.mode != "stop"
    if run.precision.scaler is not None or on_device:
        start_momentum(run.optimizer)
    run.clip = build_clipper(run.config.gradients, run.model.parameters(), head=head_of(run.model))
    run.freezing = grouping.freezing(run.training_plan.steps, run.training_plan.total_steps)
    freezes = run.freezing is not None or not all(p.requires_grad for p in run.model.parameters())
    if section.freeze_backbone_stats and not freezes:
        what = "changes nothing, because no layer is frozen. Set optimizer.freeze_backbone=1epochs"
        run.display.warn(f"optimizer.freeze_backbone_stats=true {what}")
    choices.rows["parameters"] = grouping.note


def _check_gradients(run: PartialRun) -> None:
    """Reject operations that torch does not support for sparse or complex gradients."""
    gradients, trained = run.config.gradients, run.model.named_parameters()
    sparse = sparse_parameter(run.model)
    complex_one = next((name for name, p in trained if p.requires_grad and p.is_complex()), None)
    scaled = run.config.precision.mode if run.precision.scaler is not None else None
    for key, value, name, hint in (
        ("gradients.clip_value", gradients.clip_value, sparse or complex_one, "Use gradients.clip_norm"),
        ("gradients.clip_adaptive", gradients.clip_adaptive, sparse, "Use gradients.clip_norm"),
        ("precision", scaled, complex_one, "Use precision=bf16 or fp32"),
    ):
        if value is not None and name is not None:
            kind = "sparse" if name == sparse else "complex"
            what = f"does not work with the gradients of {name}, which are {kind}"
            raise ConfigError("C011", what, key=key, value=value, suggestion=hint)


def add_schedule(run: PartialRun) -> None:
    """Build the learning rate schedule."""
    section, choices, plan = run.config.schedule, run.choices, run.training_plan
    shape = build_shape(section.target, reference_lr(run.optimizer), run.plan.best_mode)
    if isinstance(shape, TorchScheduler) and (step := shape.lowest_from(plan.total_steps)) is not None:
        name, per_epoch = section.target.path.rpartition(".")[2], plan.batches.steps_per_epoch
        what = f"{name} counts steps, and is at its lowest from step {step + 1:,} of {plan.total_steps:,}"
        factor = f"multiply it by the {per_epoch:,} steps of an epoch" if per_epoch else "count it in steps"
        run.display.warn(f"schedule: {what}. If a length was meant in epochs, {factor}")
    run.schedule = build_schedule(
        shape,
        warmup=section.warmup,
        total_steps=plan.total_steps,
        plan=plan.batches,
        has_momentum=has_momentum(run.optimizer),
        extendable=not plan.spans_run,
    )
    if run.schedule.on_metric is not None:
        _check_evaluations(run)
    choices.note("momentum", run.schedule.momentum_note)
    choices.note("total_steps", plan.total_steps)
    choices.note("curriculum", plan.notes, "; ".join(plan.notes) or None)


def _check_evaluations(run: PartialRun) -> None:
    """Reject a schedule that steps on a metric if nothing is evaluated."""
    name, steps = run.config.schedule.target.path.rpartition(".")[2], run.plan.intervals.eval_steps
    if run.splits.val is None:
        what = "steps on an evaluation metric, but no samples are held out for evaluation"
        hint = "Set data.val=10%, or use schedule=multistep"
        raise ConfigError("C011", what, key="schedule", value=name, suggestion=hint)
    if not steps or steps[0] >= run.total_steps:
        run.display.warn(f"schedule: {name} changes nothing, as no evaluation precedes the last step")
    if run.config.eval.every.unit == "percent":
        run.schedule.of_length = None


def add_average(run: PartialRun) -> None:
    """Build the average of the weights that evaluations use in their place, if any."""
    run.ema = _build_average(run)
    run.choices.rows["average"] = run.ema and run.ema.note


def _build_average(run: PartialRun) -> Average | None:
    section, model, plan, optimizer = run.config.ema, run.model, run.training_plan, run.optimizer
    if section.decay is not None:
        reach, total = 1 / (1 - section.decay), plan.total_steps
        if reach > total and not section.warmup:
            what = f"averages over {reach:,.0f} steps, but the run has {total:,}: it stays near its start"
            fits = 1 - 10.0 ** (1 - int(math.log10(max(total, 1))))
            hint = f"Set ema.decay={fits:g}" if fits > 0 else "Use ema=none"
            run.display.warn(f"ema.decay={section.decay:g} {what}. {hint}, or ema.warmup=true")
        return MovingAverage(model, section.decay, warmup=section.warmup)
    # Some optimizers keep their own average.
    if section.swa_start is None and not averages_itself(optimizer):
        return None
    samples = _build_statistics_loader(run)

    def forward(watched: Watched) -> None:
        assert samples is not None
        with run.precision.autocast:
            for inputs, _ in watched(iter(samples)):
                run.task.loss(model, inputs)

    measure = forward if samples is not None else None
    if section.swa_start is None:
        return ScheduleFree(model, optimizer, measure, ranks=_measuring(run))
    start_step = plan.steps("ema.swa_start", section.swa_start)
    steps = [step for step in plan.every("ema.swa_every", section.swa_every) if step >= start_step]
    if not steps:
        span = f"from {start_step:,} to {plan.total_steps:,}"
        what = f"no step {span} is averaged by ema.swa_every={section.swa_every}"
        hint = "Start earlier, or average more often, such as ema.swa_every=10steps"
        raise ConfigError("C011", what, key="ema.swa_start", value=section.swa_start, suggestion=hint)
    return Swa(
        model,
        steps,
        measure,
        ranks=_measuring(run),
        extendable="percent" not in (section.swa_start.unit, section.swa_every.unit),
    )


def _measuring(run: PartialRun) -> Ranks:
    """Return the ranks that measure the statistics of averaged weights: one if bits must not differ."""
    return Ranks() if run.config.determinism == "elastic" else run.ranks


def _build_statistics_loader(run: PartialRun) -> EvaluationLoader | None:
    """Build a loader of a few thousand training samples in random order, the same number on each rank."""
    data, ranks, batch_size = run.splits, _measuring(run), eval_batch_size(run)
    if isinstance(data.train, IterableSource):
        return None
    size = len(data.train)
    share = min(STATISTICS_SAMPLES, size) // ranks.world_size
    # BatchNorm rejects a batch of one sample.
    share -= share % batch_size == 1
    if share < 2:
        return None
    # Datasets read from folders are sorted by class: a batch in that order would have a single class.
    picked = np.random.default_rng(run.config.seed).permutation(size)[: share * ranks.world_size]
    return build_eval_loader(
        data.train.take(picked),
        data.info,
        run.loader_options,
        batch_size=batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
