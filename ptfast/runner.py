"""From a config to a `Run`: every part built once, in the one order that is right."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptfast import run_folder
from ptfast.averaging import build_average
from ptfast.backend import MOST_SHAPES, apply_backend, resolve_device, watch_shapes
from ptfast.blocks import find_blocks
from ptfast.checkpointing import apply_checkpointing, apply_memory_budget
from ptfast.compile import Compilation
from ptfast.config.parallel_rules import check_ranks
from ptfast.config.rules import check_batch
from ptfast.config.schema import Config
from ptfast.config.targets import check_constructs
from ptfast.data import (
    Data,
    build_train_loader,
    check_same_data,
    read_info,
)
from ptfast.data.changed import Change, ChangedLoader
from ptfast.data.mix import build_mix
from ptfast.data.transfers import PrefetchedLoader, open_side_stream
from ptfast.distributed import Ranks, broadcast_object, on_first_rank
from ptfast.durations import Duration
from ptfast.errors import ConfigError
from ptfast.flip import check_flip
from ptfast.gradients import build_clipper, head_of
from ptfast.loading import build_course, build_eval_loaders, check_last_batch, first_samples, load_data
from ptfast.logger import NoLogger
from ptfast.models import build_model
from ptfast.models.weights import load_weights
from ptfast.optim import Grouping, build_optimizer, has_momentum, scale_for_batch, start_momentum
from ptfast.parallel import apply_sync_batchnorm, wrap_for_ranks
from ptfast.precision import Precision, apply_half_weights, build_precision
from ptfast.rewrites import apply_channels_last, drop_biases, find_cancelled_biases, resolve_channels_last
from ptfast.run import Cadence, Clock, DataInfo, Run, Task
from ptfast.run_state import build_saver, restore_model, restore_training
from ptfast.saving import read_state
from ptfast.schedule import build_schedule
from ptfast.seeding import build_seeder, seed_everything
from ptfast.tasks import build_task
from ptfast.units import better_mode


def build(
    config: Config,
    *,
    ranks: Ranks,
    folder: Path,
    display: Any,
    logger: Any = None,
    clock: Clock | None = None,
    state_folder: Path | None = None,
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
    """
    device = resolve_device(config.device, ranks)
    resolved = broadcast_object(run_folder.read_json(folder / run_folder.RESOLVED), ranks)
    if resolved.get("num_ranks") != ranks.num_ranks:
        # On other ranks the bits differ anyway; what is meant for one rank's cores would crowd several.
        resolved = {name: value for name, value in resolved.items() if name not in ("threads", "workers")}
    loader = config.dataloader
    benchmark = config.backend.cudnn_benchmark
    if benchmark == "auto" and (resolved.get("device"), resolved.get("cudnn_benchmark")) == ("cuda", False):
        # Shapes had become too many before.
        benchmark = False
    backend = apply_backend(
        threads=_unless_auto(config.backend.threads, resolved, "threads"),
        cudnn_benchmark=benchmark,
        deterministic=config.backend.deterministic,
        device=device,
        num_local_ranks=ranks.num_local_ranks,
    )
    wanted = config.precision
    matmul = _unless_auto(wanted.matmul_precision, resolved, "matmul_precision")
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
    sharded = config.parallel.strategy == "fsdp" and ranks.distributed
    state = read_state(state_folder) if state_folder is not None else None

    with display.status("loading the data"):
        saved_info = read_info(state.facts["info"]) if state is not None else None
        measured = saved_info.extra.get("normalize") if saved_info is not None else None
        data = load_data(config, ranks, measured=measured)
    info = data.info
    if saved_info is not None:
        check_same_data(saved_info, info)
    task = build_task(config.task.name, info, **config.task.build_options())
    check_flip(config.eval.flip, info, task)
    seed_everything(config.seed)
    model = _build_model(config, info, fresh=state is None, display=display)
    course = build_course(config, info, model, micro_batches)
    plan, total_steps = course.plan, course.total_steps
    # Weights are shared out by rows that lie one after another.
    channels_last = False if sharded else resolved.get("channels_last")
    if channels_last is None:
        channels_last = resolve_channels_last(config.rewrites.channels_last, model, info.kind, device)
    if channels_last:
        apply_channels_last(model)
    if precision.half_weights:
        apply_half_weights(model)
    model.to(device)
    looking = {"normalize": config.data.normalize, "device": device, "channels_last": channels_last}
    dropped = resolved.get("dropped_biases", {} if config.rewrites.bias_before_norm else None)
    if dropped is None:
        dropped = on_first_rank(
            lambda: _cancelled_biases(model, task, data, precision, display, **looking), ranks
        )
    drop_biases(model, dropped)
    if state is not None:
        restore_model(model, state)
    if config.parallel.sync_batchnorm:
        apply_sync_batchnorm(model)
    section = config.optimizer
    grouping = Grouping(
        model, decay_1d=section.decay_1d, layer_decay=section.layer_decay, groups=section.groups
    )
    grouping.freeze()
    known, checkpointing = resolved.get("checkpointed"), config.checkpointing
    checkpointed = apply_checkpointing(
        model,
        checkpointing.mode,
        blocks=known or checkpointing.blocks,
        every=1 if known else checkpointing.every,
    )
    apply_memory_budget(checkpointing.memory_budget if checkpointing.mode == "budget" else None)
    dynamic = _unless_auto(config.compile.dynamic, resolved, "compile_dynamic")
    dynamic = info.kind == "text" if dynamic == "auto" else dynamic
    compilation = None
    if config.compile.mode != "none":
        accumulates = micro_batches > ranks.num_ranks
        compilation = Compilation(config.compile.mode, device.type, dynamic=dynamic, accumulates=accumulates)
        compilation.apply(model, config.compile.blocks)
    shards = find_blocks(model, config.parallel.blocks, key="parallel.blocks") if sharded else {}
    wrap = partial(
        wrap_for_ranks, model, ranks, config.parallel, blocks=shards, half_type=precision.half_type
    )
    forward = wrap()

    loading = {
        "normalize": config.data.normalize,
        "device": device,
        "channels_last": channels_last,
        "kind": _unless_auto(loader.kind, resolved, "dataloader"),
        "workers": _unless_auto(loader.workers, resolved, "workers"),
        "prefetch": loader.prefetch,
        "pin": loader.pin,
        "worker_threads": config.backend.worker_threads,
    }
    side = open_side_stream(device) if loader.side_stream else None
    sharding = {"rank": ranks.rank, "num_ranks": ranks.num_ranks}
    train_loader = build_train_loader(
        data,
        task_name=config.task.name,
        batch_size=config.batch_size,
        micro_batches=micro_batches,
        seed=config.seed,
        augment=config.augment.model_dump(include={"crop_padding", "flip"}),
        last=loader.last,
        sizes=plan.sizes,
        **sharding,
        **loading,
    )
    if side is not None:
        train_loader = PrefetchedLoader(train_loader, side)
    mix = build_mix(config.augment.mixup, config.augment.cutmix, config.seed, info=info, task=task)
    changes: list[Change] = [*course.changes, *([mix] if mix is not None else [])]
    if changes:
        first_micro_batch = ranks.rank * (micro_batches // ranks.num_ranks)
        train_loader = ChangedLoader(train_loader, changes, first_micro_batch)
    eval_loaders = build_eval_loaders(
        config, data, micro_batches=micro_batches, side=side, **sharding, **loading
    )

    groups = None if grouping.trivial else grouping.parts()
    optimizer, stepping = build_optimizer(section.target, model, device, groups)
    scaling = scale_for_batch(optimizer, section.lr_scaling, config.batch_size, section.reference_batch)
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
    resolved |= {
        "device": str(device.type),
        "num_ranks": ranks.num_ranks,
        "micro_batches": micro_batches,
        "channels_last": channels_last,
        "dropped_biases": dropped,
        "compile_dynamic": dynamic,
        "dataloader": train_loader.kind,
        "workers": getattr(train_loader, "workers", 0),
        "worker_threads": config.backend.worker_threads,
        "side_stream": side is not None,
        "checkpointed": list(checkpointed),
        "shards": list(shards),
        "optimizer": stepping,
        "lr_scaling": scaling,
        "momentum": schedule.momentum_note,
        "precision": precision.describe(),
        "matmul_precision": precision.matmul,
        "total_steps": total_steps,
        "curriculum": course.notes,
        **backend,
    }

    def steps_of(key: str, duration: Duration) -> int:
        with _naming(key, duration):
            return plan.steps(duration, total_steps)

    def every(key: str, duration: Duration) -> Sequence[int]:
        if plan.size is None and duration == Duration(1, "epochs"):
            # The default, where there are no epochs: ten times a run.
            duration = Duration(math.ceil(total_steps / 10), "steps")
        with _naming(key, duration):
            return plan.every(duration, total_steps)

    freezing = grouping.freezing(steps_of, total_steps)
    average = build_average(
        config,
        model,
        data,
        task,
        precision,
        ranks,
        micro_batches=micro_batches,
        steps_of=steps_of,
        every=every,
        total_steps=total_steps,
        **loading,
    )
    stop, gradients = config.stop, config.gradients
    metric = stop.metric or (task.metric if "val" in eval_loaders else "loss")
    _check_metric(stop.metric, task, "val" in eval_loaders)
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
        train_loader=train_loader,
        eval_loaders=eval_loaders,
        device=device,
        ranks=ranks,
        seed=config.seed,
        seed_step=build_seeder(device),
        total_steps=total_steps,
        batch_size=config.batch_size,
        micro_batches=micro_batches,
        cadence=Cadence(
            every("log_every", config.log_every),
            every("eval.every", config.eval.every),
            every("saving.every", config.saving.every),
            switch_steps=freezing.switch_steps if freezing is not None else (),
        ),
        best_metric=metric,
        best_mode=stop.mode if stop.mode != "auto" else best_mode(metric, task),
        patience=stop.patience,
        max_time_s=config.run.max_time.seconds if config.run.max_time is not None else None,
        keep_best=config.saving.best,
        folder=folder,
        callbacks=[target.build() for target in config.callbacks],
        display=display,
        logger=logger or NoLogger(),
        save=build_saver(config.saving.keep),
        wrap=wrap,
        compilation=compilation,
        freezing=freezing,
        log_norm=gradients.log_norm,
        groups_note=grouping.describe(),
        clock=clock or Clock(),
        resolved=resolved,
        flip=config.eval.flip,
        data_note=data.note,
    )
    if benchmark == "auto" and backend["cudnn_benchmark"]:
        run.watch = partial(watch_shapes, turn_off=partial(_stop_searching, run))
    if state is not None:
        restore_training(run, state)
    if ranks.is_first:
        run_folder.write_json(folder / run_folder.RESOLVED, resolved)
    return run


@contextlib.contextmanager
def _naming(key: str, duration: Duration) -> Iterator[None]:
    """Say of a duration that cannot be counted which key it belongs to."""
    try:
        yield
    except ValueError as error:
        raise ConfigError("C011", str(error), key=key, value=duration) from error


def _stop_searching(run: Run) -> None:
    torch.backends.cudnn.benchmark = run.resolved["cudnn_benchmark"] = False
    run.display.note(
        f"cudnn_benchmark is off from step {run.progress.step}: inputs of more than {MOST_SHAPES} shapes"
    )
    if run.ranks.is_first:
        run_folder.write_json(run.folder / run_folder.RESOLVED, run.resolved)


def _unless_auto(wanted: Any, resolved: dict[str, Any], name: str) -> Any:
    """What the config says, and where it says `auto`, what that was resolved to before, if it was."""
    return resolved.get(name, wanted) if wanted == "auto" else wanted


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


def _build_model(config: Config, info: DataInfo, *, fresh: bool, display: Any) -> nn.Module:
    check_constructs(config.model.target, asdict(info))
    weights = config.model.weights
    with display.status("building the model"):
        model = build_model(config.model.target, info, pretrained=fresh and weights == "pretrained")
    if fresh and weights and weights != "pretrained":
        for note in load_weights(model, weights, replace_head=config.model.replace_head):
            display.note(note)
    return model


def _cancelled_biases(
    model: nn.Module, task: Task, data: Data, precision: Precision, display: Any, **looking: Any
) -> dict[str, str]:
    """Biases that a BatchNorm subtracts, found on a few samples; none where the model cannot be looked at."""

    def forward() -> object:
        with precision.autocast():
            return task.loss(model, first_samples(data, **looking))

    try:
        return find_cancelled_biases(model, forward)
    except Exception as error:
        # What is wrong with the model or the data, training will say; iterable data is not there to look at.
        display.note(f"biases before a BatchNorm are kept: {type(error).__name__}: {error}")
        return {}
