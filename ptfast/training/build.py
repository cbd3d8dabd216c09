"""From a config to a `Run`: every part built once, in the one order that is right."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.batch_plan import BatchPlan, constant
from ptfast.core.clock import Clock, for_device
from ptfast.core.distributed import Ranks, broadcast_object
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, name_of, name_some
from ptfast.core.protocols import Callback, Task, hooks, takes_own_steps
from ptfast.core.run import Cadence, Display, Freezing, Logger, Resolved, Run, Settings
from ptfast.core.saved_state import State, read_state
from ptfast.core.units import better_mode
from ptfast.data.build_data import Data
from ptfast.models.data_fit import remedy
from ptfast.optim.build_optimizer import build_optimizer, has_momentum, start_momentum
from ptfast.optim.parameters.groups import Grouping, reference_lr, scale_for_batch
from ptfast.profiling.limits.step_counting import StepCounter
from ptfast.report.loggers import NoLogger
from ptfast.techniques.backend.torch_settings import MOST_SHAPES, resolve_device, watch_shapes
from ptfast.techniques.curriculum.growing_sizes import build_batch_sizes
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.gradients.clipping import build_clipper, head_of
from ptfast.techniques.schedule.own_schedules import build_shape
from ptfast.techniques.schedule.scheduled_run import Schedule, build_schedule
from ptfast.training.averaging import build_average
from ptfast.training.course import Course, build_course, check_last_batch, count_steps
from ptfast.training.prepare_data import build_loaders, build_run_task, full_size, load_run_data
from ptfast.training.prepare_machine import BuildContext, prepare_machine
from ptfast.training.prepare_model import build_plain_model, check_fits, place_model, shape_model
from ptfast.training.sequence_batching import build_length_plan, check_takes
from ptfast.training.state import restore_model, restore_training
from ptfast.training.step import OPTIMIZER_NAME
from ptfast.training.step_parts.seeding import build_seeder, seed_everything
from ptfast.training.user_code import constructing

CURVE_POINTS = 100
"""Log lines of a run, where `log_every` is `auto`."""


def build(
    config: Config,
    *,
    ranks: Ranks,
    folder: Path,
    display: Display,
    logger: Logger | None = None,
    clock: Clock | None = None,
    state_folder: Path | None = None,
    check_state: bool = True,
    data: Data | None = None,
) -> Run:
    """Build a run on this rank.

    The order: machine, data, model, its rewrites and place, checkpointed blocks, compiled model or blocks,
    parallel wrap, saved weights, loaders, optimizer, schedule, averaged weights; the rest of the saved state
    comes last. An optimizer built before the model has its final place and form would hold parameters
    that nothing trains, in silence.

    What the config leaves to `auto` is resolved here by the first rank, written to `resolved.json`, and
    taken from there when the run is resumed.

    Args:
        logger: what takes the figures; nothing does if not given.
        state_folder: the state to resume; None starts afresh.
        check_state: hash its files; False where this machine has done so for this load.
        data: the splits, where they have been loaded already and it is known who loads them.
    """
    device = resolve_device(config.device, ranks)
    clock = for_device(clock or Clock(), device)
    state = read_state(state_folder, check=check_state) if state_folder is not None else None
    before = broadcast_object(_resolved_before(folder, state_folder, state), ranks)
    context = prepare_machine(config, device, ranks=ranks, display=display, before=before, state=state)

    data, changed = load_run_data(context, data)
    task = build_run_task(context, data.info)
    seed_everything(config.seed)
    model = build_plain_model(context, data.info)
    check_fits(model, context, task, data)
    course = _build_course(context, data, model)
    place_model(model, context, task, data, data.info)
    shaped = shape_model(model, context, data)
    forward = shaped.wrap()
    if state is not None:
        restore_model(model, state)
    loaders = build_loaders(context, data, task, course, clock.to)
    optimizer = _build_optimizer(context, model, shaped.grouping)
    check_last_batch(course.plan, model, context.micro_batches)
    schedule = _build_schedule(context, course, optimizer)
    callbacks = _build_callbacks(config)
    freezing = shaped.grouping.freezing(course.steps, course.total_steps)
    average = build_average(context, model, data, task, course, loaders.loading, optimizer)
    run = Run(
        settings=_settings(context, data, task, course, callbacks, freezing),
        resolved=context.resolved,
        folder=folder,
        device=device,
        ranks=ranks,
        clock=clock,
        display=display,
        logger=logger or NoLogger(),
        model=model,
        forward=forward,
        wrap=shaped.wrap,
        task=task,
        info=data.info,
        optimizer=optimizer,
        schedule=schedule,
        precision=context.precision,
        clip=build_clipper(
            config.gradients, model.parameters(), head=head_of(model), by_group=shaped.grouping.clip_norms()
        ),
        ema=average,
        compilation=shaped.compilation,
        freezing=freezing,
        train_loader=loaders.train,
        eval_loaders=loaders.evaluation,
        marks=loaders.marks,
        unreadable=data.unreadable,
        seed_step=build_seeder(device),
        callbacks=callbacks,
        data_note=data.note,
        groups_note=shaped.grouping.describe(),
        remedy=partial(remedy, config.model.target, config.data.target, data.info),
    )
    _check_own_steps(run, config.gradients)
    _finish(run, context, changed)
    return run


def _resolved_before(folder: Path, state_folder: Path | None, state: State | None) -> Resolved:
    """Read what `auto` became before: in this run, or in the one whose state is resumed elsewhere."""
    if state_folder is not None and not (folder / run_directory.RESOLVED).exists():
        folder = state_folder.parent.parent
    return Resolved.read(folder, state.facts if state is not None else None)


def _build_course(context: BuildContext, data: Data, model: torch.nn.Module) -> Course:
    """Which samples make up each step, how many steps there are, and what is small at first."""
    config, curriculum, num_samples = context.config, context.config.curriculum, data.info.num_train
    check_takes(model, data)
    sizes, last = constant(config.batch_size), config.dataloader.last
    if curriculum.batch_size_from is not None:
        sizes = build_batch_sizes(
            curriculum.batch_size_from,
            config.batch_size,
            curriculum.over,
            micro_batches=context.micro_batches,
            num_samples=num_samples,
            epochs=config.epochs,
            steps=config.steps,
        )
    plan = build_length_plan(
        config.batching, data, batch_size=config.batch_size, last=last, seed=config.seed
    ) or BatchPlan(num_samples, sizes, last)
    total_steps = count_steps(plan, config.epochs, config.steps)
    return build_course(curriculum, plan, data.info, model, total_steps)


def _build_optimizer(
    context: BuildContext, model: torch.nn.Module, grouping: Grouping
) -> torch.optim.Optimizer:
    section, resolved = context.config.optimizer, context.resolved
    groups = None if grouping.trivial else grouping.parts()
    optimizer, resolved.optimizer = build_optimizer(section.target, model, context.device, groups)
    resolved.lr_scaling = scale_for_batch(optimizer, section, context.config.batch_size)
    if context.precision.scaler is not None:
        start_momentum(optimizer)
    return optimizer


def _build_schedule(context: BuildContext, course: Course, optimizer: torch.optim.Optimizer) -> Schedule:
    section, resolved = context.config.schedule, context.resolved
    schedule = build_schedule(
        build_shape(section.target, reference_lr(optimizer)),
        warmup=section.warmup,
        total_steps=course.total_steps,
        plan=course.plan,
        has_momentum=has_momentum(optimizer),
        extendable=not course.spans_run,
    )
    resolved.momentum, resolved.total_steps = schedule.momentum_note, course.total_steps
    resolved.curriculum = course.notes
    return schedule


def _build_callbacks(config: Config) -> list[Callback]:
    callbacks: list[Any] = []
    for index, target in enumerate(config.callbacks):
        with constructing(f"callbacks.{index}", target.path):
            callbacks.append(target.build())
    return callbacks


def _settings(
    context: BuildContext,
    data: Data,
    task: Task,
    course: Course,
    callbacks: list[Callback],
    freezing: Freezing | None,
) -> Settings:
    """The config's settings of the loop, durations as steps.

    Raises:
        ConfigError: C005 for a figure to follow that no evaluation will give; C011 for a duration that this
            data cannot be counted in.
    """
    config, plan = context.config, course.plan
    stop = config.stop
    metric = stop.metric or (task.metric if data.val is not None else "loss")
    if not hooks(callbacks, "on_evaluation"):
        _check_metric(metric, task, data.val is not None)
    max_time = config.run.max_time
    counts_epochs = plan.size is not None and hooks(callbacks, "on_epoch")
    return Settings(
        seed=config.seed,
        total_steps=course.total_steps,
        batch_size=config.batch_size,
        micro_batches=context.micro_batches,
        cadence=Cadence(
            course.every("log_every", config.log_every, times=CURVE_POINTS),
            course.every("eval.every", config.eval.every),
            course.every("saving.every", config.saving.every),
            switch_steps=freezing.switch_steps if freezing is not None else (),
            epoch_steps=plan.every(Duration(1, "epochs"), course.total_steps) if counts_epochs else (),
        ),
        best_metric=metric,
        best_mode=stop.mode if stop.mode != "auto" else _best_mode(metric, task),
        patience=stop.patience,
        max_time_s=max_time.seconds if max_time is not None else None,
        keep_best=config.saving.best,
        keep_states=config.saving.keep,
        debug=config.debug.mode,
        log_norm=config.gradients.log_norm,
        flip=config.eval.flip,
        shift=config.eval.shift,
        full_size=full_size(config.eval, data.info, context.micro_batch_size),
    )


def _finish(run: Run, context: BuildContext, changed: str) -> None:
    """Attach what watches the steps, restore the rest of the saved state, and write what `auto` became.

    Args:
        changed: how held-out data differs from that of the saved run.
    """
    if context.config.backend.cudnn_benchmark == "auto" and run.resolved.cudnn_benchmark:
        run.watch = partial(watch_shapes, turn_off=partial(_stop_searching, run))
    if context.state is not None:
        restore_training(run, context.state, context.before.total_steps)
        # An average keeps the context, and would keep what was loaded.
        context.state = None
        notes = run.status.resumed_note, changed and f"other held-out data than before: {changed}"
        run.status.resumed_note = "; ".join(filter(None, notes))
    run.counter = StepCounter(run)
    if run.ranks.is_first:
        run.resolved.write(run.folder)


def _check_own_steps(run: Run, gradients: Gradients) -> None:
    """Refuse named optimizers that nobody steps, and what the loop does with gradients that it does not see.

    Raises:
        ConfigError: C011, or C005 for a name without parameters.
    """
    groups, task = run.optimizer.param_groups, name_of(run.task)
    named = [group[OPTIMIZER_NAME] for group in groups if OPTIMIZER_NAME in group]
    if not takes_own_steps(run.task):
        if named:
            what = f"{task} has no method step, which would take the optimizer {named[0]}"
            raise ConfigError("C011", what, key="optimizer.groups", suggestion="Leave out name")
        return
    rest = [p for group in groups if OPTIMIZER_NAME not in group for p in group["params"]]
    if rest:
        names = [name for name, p in run.model.named_parameters() if any(p is other for other in rest)]
        what = f"{task} steps optimizers by name, and none has {name_some(names, 3)}"
        hint = "Name one for each, such as optimizer.groups='[{match: \"critic.*\", name: critic}]'"
        raise ConfigError("C011", what, key="optimizer.groups", suggestion=hint)
    settings, ways = run.settings, ("clip_norm", "clip_value", "clip_adaptive")
    clipped = next((f"gradients.{way}" for way in ways if getattr(gradients, way) is not None), None)
    of_groups = "clip_norm left out of optimizer.groups"
    out_of_reach = {
        "parallel": "parallel=single" if run.ranks.num_ranks > 1 else None,
        "micro_batches": "gradients.accumulate=1" if settings.micro_batches > run.ranks.num_ranks else None,
        clipped or "optimizer.groups": f"{f'{clipped}=null' if clipped else of_groups}, and clip in step"
        if run.clip is not None
        else None,
        "precision": "precision=bf16 or fp32" if run.precision.scaler is not None else None,
    }
    for key, instead in out_of_reach.items():
        if instead is not None:
            what = f"{task} takes its steps itself, which this cannot reach into"
            raise ConfigError("C011", what, key=key, suggestion=f"Set {instead}")


def _check_metric(metric: str, task: Task, has_val: bool) -> None:
    """Refuse a figure to follow that no evaluation will give, as far as that is known before one."""
    names = getattr(task.metrics(), "keys", None)
    if names is None or metric == "loss":
        return
    figures = task.figures(0.0, dict.fromkeys(names(), 0.0)) if has_val else {"loss": 0.0}
    if metric not in figures:
        hint = f"There are: {', '.join(figures)}"
        raise ConfigError("C005", "no such figure", key="stop.metric", value=metric, suggestion=hint)


def _best_mode(metric: str, task: Task) -> str:
    """`max` or `min`: which way `metric` is better."""
    return task.mode if metric == task.metric else better_mode(metric)


def _stop_searching(run: Run) -> None:
    torch.backends.cudnn.benchmark = run.resolved.cudnn_benchmark = False
    run.display.note(
        f"cudnn_benchmark is off from step {run.progress.step}: inputs of more than {MOST_SHAPES} shapes"
    )
    if run.ranks.is_first:
        run.resolved.write(run.folder)
