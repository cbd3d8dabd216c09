"""Build a `Run` from a config: every part once, in the only correct order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.auto_choices import AutoChoices, read_choices
from ptfast.core.clock import Clock, for_device
from ptfast.core.distributed import Ranks, broadcast_object
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, name_of, name_some
from ptfast.core.plain_display import Display
from ptfast.core.protocols import Logger, hooks, takes_own_steps
from ptfast.core.tensors.checkpoint_files import read_checkpoint
from ptfast.core.units import better_mode
from ptfast.data.build_data import Data
from ptfast.models.build_model import remedy
from ptfast.profiling.operator_counting import StepCounter
from ptfast.run import LoopIntervals, Run, RunPlan
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.training.checkpointer import Checkpointer
from ptfast.training.loop.updates import OPTIMIZER_NAME
from ptfast.training.saved_model import add_teacher
from ptfast.training.stages.data_stage import build_loaders, choose_task, load_splits
from ptfast.training.stages.machine_stage import (
    build_seeder,
    choose_micro_batches,
    seed_everything,
    set_up_machine,
)
from ptfast.training.stages.model_stage import build_plain_model, place_model, shape_model
from ptfast.training.stages.optimizer_stage import add_average, add_optimizer, add_schedule
from ptfast.training.stages.partial_run import PartialRun
from ptfast.training.stages.training_plan import build_plan, check_last_batch
from ptfast.training.user_code import constructing

CURVE_POINTS = 100
"""Number of log lines of a run if `log_every` is `auto`."""


def build(
    config: Config,
    *,
    ranks: Ranks,
    folder: Path,
    display: Display,
    logger: Logger | None = None,
    clock: Clock | None = None,
    checkpoint_folder: Path | None = None,
    check_state: bool = True,
    data: Data | None = None,
) -> Run:
    """Build a run on this rank, stage by stage.

    An optimizer built before the model is on its device and in its final form would contain parameters that
    never train. The first rank writes the values chosen for `auto` to `resolved.json`, for resumed runs.

    Args:
        checkpoint_folder: the checkpoint to resume; None starts afresh.
        check_state: whether to hash the checkpoint's files; False if this machine has already done so.
        data: the splits, if they are already loaded and their loader is chosen.
    """
    state = read_checkpoint(checkpoint_folder, check=check_state) if checkpoint_folder is not None else None
    device = resolve_device(config.device, ranks)
    run = PartialRun(
        config=config, folder=folder, device=device, ranks=ranks, display=display, state=state, data=data
    )
    run.clock, run.logger = for_device(clock or Clock(), device), logger or Logger()
    run.choices = _former_choices(run, checkpoint_folder)
    run.checkpointer = Checkpointer(run)
    set_up_machine(run)
    choose_micro_batches(run)
    load_splits(run)
    choose_task(run)
    add_teacher(run)
    seed_everything(config.seed)
    build_plain_model(run)
    run.training_plan = build_plan(config, run.splits, run.model, run.micro_batches, display.note)
    place_model(run)
    shape_model(run)
    if state is not None:
        run.checkpointer.restore_model(state)
    build_loaders(run)
    add_optimizer(run)
    check_last_batch(run.training_plan.batches, run.model, run.micro_batches)
    add_callbacks(run)
    run.plan = plan_run(run)
    add_schedule(run)
    add_average(run)
    check_own_steps(run)
    run.checkpointer.begin(state)
    # The average and the wrapper refer to the run, which would keep the loaded data in memory.
    run.state = run.data = None
    run.counter = StepCounter(run)
    if ranks.is_first:
        run.choices.write(folder)
    return run


def _former_choices(run: PartialRun, checkpoint_folder: Path | None) -> AutoChoices:
    """Read the values chosen for `auto` by the run to resume, which may have begun in another folder."""
    begun_in = run.folder
    if checkpoint_folder is not None and not (begun_in / run_directory.RESOLVED).exists():
        begun_in = checkpoint_folder.parent.parent
    previous = read_choices(begun_in, run.state.facts if run.state is not None else None)
    return AutoChoices(broadcast_object(previous, run.ranks))


def add_callbacks(run: PartialRun) -> None:
    """Build the callbacks, the function that seeds a step, and the advice for a model that does not fit."""
    config, callbacks = run.config, list[Any]()
    for index, target in enumerate(config.callbacks):
        with constructing(f"callbacks.{index}", target.path):
            callbacks.append(target.build())
    run.callbacks += callbacks
    run.seed_step = partial(build_seeder(run.device), config.seed)
    run.remedy = partial(remedy, config.model.target, config.data.target, run.info)


def plan_run(run: PartialRun) -> RunPlan:
    """Plan when the loop logs, evaluates and saves, and its metric; C005 if nothing computes the metric."""
    config, plan, stop, task = run.config, run.training_plan, run.config.stop, run.task
    counts_epochs = plan.batches.size is not None and hooks(run.callbacks, "on_epoch")
    by_time = config.saving.every.unit == "seconds"
    intervals = LoopIntervals(
        plan.every("log_every", config.log_every, times=CURVE_POINTS),
        plan.every("eval.every", config.eval.every),
        () if by_time else plan.every("saving.every", config.saving.every),
        switch_steps=run.freezing.switch_steps if run.freezing is not None else (),
        epoch_steps=plan.batches.every(Duration(1, "epochs"), plan.total_steps) if counts_epochs else (),
    )
    default = "train" if run.splits.val is None else "val"
    best_metric = stop.metric or (task.metric if default == "val" else "loss")
    split, _, metric = best_metric.rpartition("/")
    if split not in run.splits.evals:
        split, metric = default, best_metric
    names = getattr(task.metrics(), "keys", None)
    # Checked only if all metrics are known before an evaluation: callbacks may add some.
    if names is not None and metric != "loss" and not hooks(run.callbacks, "on_evaluation"):
        known = {"loss": 0.0} if split == "train" else task.log_values(0.0, dict.fromkeys(names(), 0.0))
        if metric not in known:
            of_sets = (f"{name}/{each}" for name in run.splits.evals for each in known)
            what, hint = "unknown metric", f"There are: {name_some([*known, *of_sets], 12)}"
            raise ConfigError("C005", what, key="stop.metric", value=best_metric, suggestion=hint)
    mode = task.mode if metric == task.metric else better_mode(metric)
    best_mode = mode if stop.mode == "auto" else stop.mode
    return RunPlan(
        seed=config.seed,
        total_steps=plan.total_steps,
        intervals=intervals,
        best_metric=best_metric,
        followed=(split, metric),
        best_mode=best_mode,
        batch_size=config.batch_size,
        max_time_s=config.run.max_time.seconds if config.run.max_time is not None else None,
        stop=stop,
        saving=config.saving,
        numerics=config.numerics,
        debug=config.debug.mode,
        log_norm=config.gradients.log_norm,
        freezes_statistics=config.optimizer.freeze_backbone_stats,
    )


def check_own_steps(run: PartialRun) -> None:
    """Reject named optimizers without a task that steps them, and keys that a task's own steps ignore."""
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
    gradients, ways = run.config.gradients, ("clip_norm", "clip_value", "clip_adaptive")
    clipped = next((f"gradients.{way}" for way in ways if getattr(gradients, way) is not None), None)
    out_of_reach = {
        "determinism": "Set determinism=same_ranks" if run.config.determinism == "elastic" else None,
        "parallel": "Set parallel=single" if run.ranks.world_size > 1 else None,
        "micro_batches": "Set gradients.accumulate=1" if run.micro_batches > run.ranks.world_size else None,
        clipped or "gradients": f"Set {clipped}=null, and clip in step" if clipped else None,
        "numerics": "Set numerics=stop" if run.config.numerics.mode != "stop" else None,
        "precision": "Set precision=bf16 or fp32" if run.precision.scaler is not None else None,
    }
    for key, hint in out_of_reach.items():
        if hint is not None:
            what = f"{task} takes its own steps, which this cannot change"
            raise ConfigError("C011", what, key=key, suggestion=hint)
