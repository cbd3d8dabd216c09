"""From a config to a `Run`: every part built once, in the one order that is right."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from ptfast.config.checks.parallel_rules import check_ranks
from ptfast.config.checks.rules import check_batch
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.clock import Clock, for_device
from ptfast.core.distributed import Ranks, broadcast_object
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import Cadence, Run, Task, hooks
from ptfast.core.saved_state import read_state
from ptfast.core.units import better_mode
from ptfast.data.build_data import Data, check_same_data, read_info
from ptfast.optim.build_optimizer import build_optimizer, has_momentum, scale_for_batch, start_momentum
from ptfast.report.loggers import NoLogger
from ptfast.tasks.build_task import build_task
from ptfast.techniques.backend.torch_settings import MOST_SHAPES, apply_backend, resolve_device, watch_shapes
from ptfast.techniques.gradients.clipping import build_clipper, head_of
from ptfast.techniques.precision.number_formats import build_precision
from ptfast.techniques.schedule.lr_schedules import build_schedule
from ptfast.training.averaging import build_average
from ptfast.training.pad_batches import check_full_size
from ptfast.training.prepare_data import (
    build_choice,
    build_course,
    build_loaders,
    check_last_batch,
    full_size,
    load_data,
    unless_auto,
)
from ptfast.training.prepare_model import build_plain_model, shape_model
from ptfast.training.seeding import build_seeder, seed_everything
from ptfast.training.state import build_saver, restore_training
from ptfast.training.test_time_flip import check_flip
from ptfast.training.user_code import constructing


def build(
    config: Config,
    *,
    ranks: Ranks,
    folder: Path,
    display: Any,
    logger: Any = None,
    clock: Clock | None = None,
    state_folder: Path | None = None,
    data: Data | None = None,
) -> Run:
    """Build a run on this rank.

    The order: data, model, rewrites, device and memory format, checkpointed blocks, compiled model or
    blocks, parallel wrap, optimizer and averaged weights, schedule; the saved state comes last. An optimizer
    built before the model has its final place and form would hold parameters that nothing trains, in silence.

    What the config leaves to `auto` is resolved here by the first rank, written to `resolved.json`, and
    taken from there when the run is resumed.

    Args:
        logger: what takes the figures; nothing does if not given.
        state_folder: the state to go on from; None starts afresh.
        data: the splits, where they have been loaded already and it is known who loads them.
    """
    device = resolve_device(config.device, ranks)
    clock = for_device(clock or Clock(), device)
    resolved = broadcast_object(run_directory.read_json(folder / run_directory.RESOLVED), ranks)
    if resolved.get("num_ranks") != ranks.num_ranks:
        # On other ranks the bits differ anyway; what is meant for one rank's cores would crowd several.
        resolved = {name: value for name, value in resolved.items() if name not in ("threads", "workers")}
    benchmark = config.backend.cudnn_benchmark
    if benchmark == "auto" and (resolved.get("device"), resolved.get("cudnn_benchmark")) == ("cuda", False):
        # Shapes had become too many before.
        benchmark = False
    backend = apply_backend(
        threads=unless_auto(config.backend.threads, resolved, "threads"),
        cudnn_benchmark=benchmark,
        deterministic=config.backend.deterministic,
        device=device,
        num_local_ranks=ranks.num_local_ranks,
    )
    wanted = config.precision
    matmul = unless_auto(wanted.matmul_precision, resolved, "matmul_precision")
    precision = build_precision(wanted.mode, device, matmul, ranks)
    # A resumed run keeps its micro-batches, whatever its ranks would give now.
    known, accumulate = resolved.get("micro_batches"), config.gradients.accumulate
    micro_batches = check_batch(
        config.batch_size,
        known or config.micro_batches,
        ranks.num_ranks,
        1 if known else accumulate,
        config.curriculum.batch_size_from,
    )
    check_ranks(config, ranks.num_ranks, micro_batches, scales=precision.scaler is not None)
    state = read_state(state_folder) if state_folder is not None else None

    with display.status("loading the data"):
        saved_info = read_info(state.facts["info"]) if state is not None else None
        measured = saved_info.extra.get("normalize") if saved_info is not None else None
        data = data or load_data(
            config,
            ranks,
            build_choice(config, micro_batches, device, resolved, ranks.num_ranks),
            measured=measured,
        )
    info = data.info
    changed = check_same_data(saved_info, info) if saved_info is not None else ""
    task = build_task(config.task.name, info, **config.task.build_options())
    check_flip(config.eval.flip, info, task, targets=config.augment.targets)
    check_full_size(config.eval.last, task)
    seed_everything(config.seed)
    model = build_plain_model(config, info, fresh=state is None, display=display)
    course = build_course(config, data, model, micro_batches)
    plan, total_steps = course.plan, course.total_steps
    shared: dict[str, Any] = {"micro_batches": micro_batches, "ranks": ranks, "device": device}
    shaped = shape_model(
        model,
        config,
        task=task,
        data=data,
        precision=precision,
        resolved=resolved,
        state=state,
        display=display,
        **shared,
    )
    forward, grouping = shaped.wrap(), shaped.grouping
    loaders = build_loaders(
        config, data, task, course, channels_last=shaped.channels_last, tell=clock.to, **shared
    )

    groups = None if grouping.trivial else grouping.parts()
    optimizer, stepping = build_optimizer(config.optimizer.target, model, device, groups)
    scaling = scale_for_batch(
        optimizer, config.optimizer.lr_scaling, config.batch_size, config.optimizer.reference_batch
    )
    if precision.scaler is not None:
        start_momentum(optimizer)
    check_last_batch(plan, model, micro_batches)
    schedule = build_schedule(
        config.schedule.target.build(),
        warmup=config.schedule.warmup,
        total_steps=total_steps,
        plan=plan,
        has_momentum=has_momentum(optimizer),
    )
    schedule.extendable = schedule.extendable and not course.spans_run
    named = config.task.name != "auto"
    resolved |= {
        "task": config.task.name if named else info.task,
        "task_reason": "" if named else info.task_reason,
        "device": str(device.type),
        "num_ranks": ranks.num_ranks,
        "micro_batches": micro_batches,
        "optimizer": stepping,
        "lr_scaling": scaling,
        "momentum": schedule.momentum_note,
        "precision": precision.describe(),
        "matmul_precision": precision.matmul,
        "total_steps": total_steps,
        "curriculum": course.notes,
        **shaped.facts,
        **loaders.facts,
        **backend,
    }

    callbacks: list[Any] = []
    for index, target in enumerate(config.callbacks):
        with constructing(f"callbacks.{index}", target.path):
            callbacks.append(target.build())
    freezing = grouping.freezing(course.steps, total_steps)
    average = build_average(
        config,
        model,
        data,
        task,
        precision,
        ranks,
        micro_batches=micro_batches,
        steps_of=course.steps,
        every=course.every,
        total_steps=total_steps,
        **loaders.loading,
    )
    stop, gradients = config.stop, config.gradients
    metric = stop.metric or (task.metric if "val" in loaders.evaluation else "loss")
    if not hooks(callbacks, "on_evaluation"):
        _check_metric(stop.metric, task, "val" in loaders.evaluation)
    run = Run(
        model=model,
        forward=forward,
        task=task,
        info=info,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        clip=build_clipper(
            gradients.clip_norm,
            gradients.clip_value,
            model.parameters(),
            clip_adaptive=gradients.clip_adaptive,
            head=head_of(model) if gradients.clip_adaptive is not None else (),
            by_group=grouping.clip_norms(),
        ),
        ema=average,
        train_loader=loaders.train,
        eval_loaders=loaders.evaluation,
        device=device,
        ranks=ranks,
        seed=config.seed,
        seed_step=build_seeder(device),
        total_steps=total_steps,
        batch_size=config.batch_size,
        micro_batches=micro_batches,
        cadence=Cadence(
            course.every("log_every", config.log_every),
            course.every("eval.every", config.eval.every),
            course.every("saving.every", config.saving.every),
            switch_steps=freezing.switch_steps if freezing is not None else (),
            epoch_steps=plan.every(Duration(1, "epochs"), total_steps)
            if plan.size is not None and hooks(callbacks, "on_epoch")
            else (),
        ),
        best_metric=metric,
        best_mode=stop.mode if stop.mode != "auto" else best_mode(metric, task),
        patience=stop.patience,
        max_time_s=config.run.max_time.seconds if config.run.max_time is not None else None,
        keep_best=config.saving.best,
        folder=folder,
        callbacks=callbacks,
        display=display,
        logger=logger or NoLogger(),
        save=build_saver(config.saving.keep),
        wrap=shaped.wrap,
        compilation=shaped.compilation,
        freezing=freezing,
        marks=loaders.marks,
        debug=config.debug.mode,
        log_norm=gradients.log_norm,
        groups_note=grouping.describe(),
        clock=clock,
        resolved=resolved,
        flip=config.eval.flip,
        full_size=full_size(config, info, micro_batches),
        data_note=data.note,
        unreadable=data.unreadable,
    )
    if benchmark == "auto" and backend["cudnn_benchmark"]:
        run.watch = partial(watch_shapes, turn_off=partial(_stop_searching, run))
    if state is not None:
        restore_training(run, state)
        notes = [run.resumed_note, changed and f"other held-out data than before: {changed}"]
        run.resumed_note = "; ".join(filter(None, notes))
    if ranks.is_first:
        run_directory.write_json(folder / run_directory.RESOLVED, resolved)
    return run


def _stop_searching(run: Run) -> None:
    torch.backends.cudnn.benchmark = run.resolved["cudnn_benchmark"] = False
    run.display.note(
        f"cudnn_benchmark is off from step {run.progress.step}: inputs of more than {MOST_SHAPES} shapes"
    )
    if run.ranks.is_first:
        run_directory.write_json(run.folder / run_directory.RESOLVED, run.resolved)


def _check_metric(metric: str | None, task: Task, has_val: bool) -> None:
    """Refuse a figure to follow that no evaluation will give, as far as it can be told before one."""
    names = getattr(task.metrics(), "keys", None) if metric else None
    if names is None:
        return
    figures = task.figures(0.0, dict.fromkeys(names(), 0.0)) if has_val else {"loss": 0.0}
    if metric not in figures:
        hint = f"There are: {', '.join(figures)}"
        raise ConfigError("C005", "no such figure", key="stop.metric", value=metric, suggestion=hint)


def best_mode(metric: str, task: Task) -> str:
    """Whether `metric` is better when larger (`max`) or smaller (`min`)."""
    return task.mode if metric == task.metric else better_mode(metric)
