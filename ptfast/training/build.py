"""From a config to a `Run`: every part built once, in the one order that is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.clock import Clock, for_device
from ptfast.core.distributed import Ranks, broadcast_object
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, name_of, name_some
from ptfast.core.plain_display import Display
from ptfast.core.protocols import Callback, Logger, Task, hooks, takes_own_steps
from ptfast.core.resolved import Resolved
from ptfast.core.saved_state import read_state
from ptfast.core.units import better_mode
from ptfast.data.build_data import Data
from ptfast.data.sampling.counter_draws import GOLDEN, finalise
from ptfast.models.build_model import remedy
from ptfast.optim.parameter_groups import Freezing
from ptfast.profiling.operator_counting import StepCounter
from ptfast.run import Cadence, Run, Settings
from ptfast.techniques.backend.torch_settings import MOST_SHAPES, resolve_device, watch_shapes
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.gradients.clipping import build_clipper, head_of
from ptfast.training.stages.data_stage import build_loaders, choose_task, full_size, load_splits
from ptfast.training.stages.machine_stage import BuildContext, set_up_machine
from ptfast.training.stages.model_stage import build_plain_model, check_fits, place_model, shape_model
from ptfast.training.stages.optimizer_stage import add_average, add_optimizer, add_schedule
from ptfast.training.stages.training_plan import build_plan, check_last_batch
from ptfast.training.state import restore_model, restore_training
from ptfast.training.step import OPTIMIZER_NAME
from ptfast.training.user_code import constructing

Seeder = Callable[[int, int, int], None]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, for building a model. Takes about 0.1 ms."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.manual_seed(seed)


def build_seeder(device: torch.device) -> Seeder:
    """Build the function that reseeds the generators that dropout on `device` draws from.

    Cost: about 1.5 us on the CPU; `torch.manual_seed`, which visits every backend, takes 60 times that.
    """
    seed_cpu = torch.default_generator.manual_seed
    on_device = _device_generator(device)
    if on_device is None:

        def seed_one(seed: int, step: int, micro_batch: int) -> None:
            seed_cpu(mix(seed, step, micro_batch))

        return seed_one
    seed_device = on_device.manual_seed

    def seed_both(seed: int, step: int, micro_batch: int) -> None:
        mixed = mix(seed, step, micro_batch)
        seed_cpu(mixed)
        seed_device(mixed)

    return seed_both


def mix(seed: int, step: int, micro_batch: int) -> int:
    """64 well-mixed bits of three counters (by SplitMix64).

    Every bit matters in the low half too: torch's CPU generator reads only that.
    """
    return finalise(seed * GOLDEN + step * 0xD1B5_4A32_D192_ED03 + micro_batch * 0x8CB9_2BA7_2F3D_8DD7)


def _device_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else None


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
    """Build a run on this rank, stage by stage.

    An optimizer built before the model has its final place and form would hold parameters that nothing
    trains, in silence. The saved weights come before the optimizer, the rest of the saved state last.

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
    begun_in = folder
    if state_folder is not None and not (folder / run_directory.RESOLVED).exists():
        # What `auto` became in the run whose state is resumed elsewhere.
        begun_in = state_folder.parent.parent
    before = Resolved.read(begun_in, state.facts if state is not None else None)
    before = broadcast_object(before, ranks)
    context = set_up_machine(config, device, ranks=ranks, display=display, before=before, state=state)
    context.data = data
    changed = load_splits(context)
    choose_task(context)
    seed_everything(config.seed)
    build_plain_model(context)
    check_fits(context)
    context.plan = plan = build_plan(config, context.splits, context.model, context.micro_batches)
    place_model(context)
    shape_model(context)
    if state is not None:
        restore_model(context.model, state)
    build_loaders(context, clock.to)
    add_optimizer(context)
    check_last_batch(plan.batches, context.model, context.micro_batches)
    add_schedule(context)
    callbacks: list[Any] = []
    for index, target in enumerate(config.callbacks):
        with constructing(f"callbacks.{index}", target.path):
            callbacks.append(target.build())
    freezing = context.grouping.freezing(plan.steps, plan.total_steps)
    add_average(context)
    run = Run(
        settings=_settings(context, callbacks, freezing),
        resolved=context.resolved,
        folder=folder,
        device=device,
        ranks=ranks,
        clock=clock,
        display=display,
        logger=logger or Logger(),
        model=context.model,
        forward=context.forward,
        wrap=context.wrap,
        task=context.task,
        info=context.info,
        optimizer=context.optimizer,
        schedule=context.schedule,
        precision=context.precision,
        clip=build_clipper(
            config.gradients,
            context.model.parameters(),
            head=head_of(context.model),
            by_group=context.grouping.clip_norms(),
        ),
        ema=context.average,
        compilation=context.compilation,
        freezing=freezing,
        train_loader=context.train_loader,
        eval_loaders=context.eval_loaders,
        marks=getattr(context.train_loader.batches, "marks", None),
        unreadable=context.splits.unreadable,
        seed_step=build_seeder(device),
        callbacks=callbacks,
        data_note=context.splits.note,
        groups_note=context.grouping.describe(),
        remedy=partial(remedy, config.model.target, config.data.target, context.info),
    )
    _check_own_steps(run, config.gradients)
    _finish(run, context, changed)
    return run


def _settings(context: BuildContext, callbacks: list[Callback], freezing: Freezing | None) -> Settings:
    """The config's settings of the loop, durations as steps."""
    config, plan, task, stop = context.config, context.plan, context.task, context.config.stop
    has_val = context.splits.val is not None
    metric = stop.metric or (task.metric if has_val else "loss")
    mode = stop.mode
    if mode == "auto":
        mode = task.mode if metric == task.metric else better_mode(metric)
    if not hooks(callbacks, "on_evaluation"):
        _check_metric(metric, task, has_val)
    max_time = config.run.max_time
    counts_epochs = plan.batches.size is not None and hooks(callbacks, "on_epoch")
    return Settings(
        seed=config.seed,
        total_steps=plan.total_steps,
        batch_size=config.batch_size,
        micro_batches=context.micro_batches,
        cadence=Cadence(
            plan.every("log_every", config.log_every, times=CURVE_POINTS),
            plan.every("eval.every", config.eval.every),
            plan.every("saving.every", config.saving.every),
            switch_steps=freezing.switch_steps if freezing is not None else (),
            epoch_steps=plan.batches.every(Duration(1, "epochs"), plan.total_steps) if counts_epochs else (),
        ),
        best_metric=metric,
        best_mode=mode,
        patience=stop.patience,
        max_time_s=max_time.seconds if max_time is not None else None,
        keep_best=config.saving.best,
        keep_states=config.saving.keep,
        debug=config.debug.mode,
        log_norm=config.gradients.log_norm,
        flip=config.eval.flip,
        shift=config.eval.shift,
        full_size=full_size(context),
    )


def _finish(run: Run, context: BuildContext, changed: str) -> None:
    """Attach what watches the steps, restore the rest of the saved state, and write what `auto` became."""
    if context.config.backend.cudnn_benchmark == "auto" and run.resolved.cudnn_benchmark:
        run.watch = partial(watch_shapes, turn_off=partial(_stop_searching, run))
    if context.state is not None:
        restore_training(run, context.state, context.before.total_steps)
        notes = run.status.resumed_note, changed and f"other held-out data than before: {changed}"
        run.status.resumed_note = "; ".join(filter(None, notes))
    # The run's average and its wrapping keep the context, which would keep what was loaded.
    context.state = context.data = None
    run.counter = StepCounter(run)
    if run.ranks.is_first:
        run.resolved.write(run.folder)


def _check_own_steps(run: Run, gradients: Gradients) -> None:
    """Refuse named optimizers that nobody steps, and switches that need gradients the loop does not see."""
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


def _stop_searching(run: Run) -> None:
    torch.backends.cudnn.benchmark = run.resolved.cudnn_benchmark = False
    run.display.note(
        f"cudnn_benchmark is off from step {run.progress.step}: inputs of more than {MOST_SHAPES} shapes"
    )
    if run.ranks.is_first:
        run.resolved.write(run.folder)
