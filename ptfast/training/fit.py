"""The loop of a run: train some steps, log, evaluate, save, repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ptfast.core.distributed import broadcast_object
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import StepBatch, hooks
from ptfast.run import Run
from ptfast.tasks.added_metrics import MetricTable, write_tables
from ptfast.training.checkpointer import callback_states
from ptfast.training.evaluate import Abandoned, evaluate
from ptfast.training.loop.loss_accumulator import PendingLog
from ptfast.training.loop.step import Trainer
from ptfast.training.loop.votes import StopReason, Votes, agree_to_stop
from ptfast.training.stopping import Stopped, interruptible
from ptfast.training.user_code import check_metrics


def fit(run: Run) -> str:
    """Train `run` from its current step to its last.

    Between steps that log, evaluate or save, the host reads no values from the device.

    Returns:
        `finished`; `stopped` (no more improvement); `paused` (reached `run.max_time`); `preempted` or
            `interrupted` (by a signal). The checkpoint is saved; an evaluation cut short is repeated.

    Raises:
        PtfastError: N001 if the loss is no longer finite; D006 if the data ends before the last step.
    """
    try:
        return _fit_or_stop(run).value
    except BaseException:
        run.checkpointer.writer.leave()
        raise
    finally:
        # Afterward Python collects the garbage of the whole run.
        run.clock.to("closing")
        run.collector.release()


def _fit_or_stop(run: Run) -> StopReason:
    try:
        return _fit(run)
    except Stopped:
        # A signal ended an evaluation or a callback that did not return.
        reason = agree_to_stop(run)
        _save(run, finalize_averages=False, ends=True)
        return reason or StopReason.SIGNAL
    except Exception:
        if not run.ranks.distributed:
            # Log the last line before the error; if its loss is not finite, that is the cause.
            with suppress(RuntimeError):  # raised by a device that has failed
                run.flush()
        raise


def _fit(run: Run) -> StopReason:
    """Train a segment, log, evaluate, save, and repeat."""
    progress, writer = run.progress, run.checkpointer.writer
    run.call_back("on_start")
    callback_states(run)
    trainer, votes = Trainer(run), Votes(run)
    batches = _start(run, trainer)
    stop, data_comes = _no_gain(run), True
    while stop is None and (progress.step < run.total_steps or progress.evaluation_due):
        is_kept = False
        if not progress.evaluation_due:
            batches = _apply_freezing(run, trainer, batches)
            segment = _train_segment(run, trainer, batches, votes.max_steps)
            data_comes = segment.data_comes
            stop = votes.exchange(segment.step_s, defers=trainer.losses.defers)
            _report(run, trainer, segment)
        if progress.evaluation_due and stop in (None, StopReason.MAX_TIME):
            try:
                is_kept = _evaluate_and_rank(run)
            except Abandoned:
                stop, data_comes = agree_to_stop(run), False
            if stop is None and progress.step < run.total_steps:
                stop = _no_gain(run)
        ends = progress.step >= run.total_steps or stop is not None
        is_scheduled = ends or writer.is_due or progress.step in run.plan.intervals.save_steps
        if is_kept or is_scheduled:
            _save(run, finalize_averages=data_comes, ends=ends, best_only=not is_scheduled)
    stop = _test(run, stop or StopReason.LAST_STEP)
    run.call_back("on_end", stop.value)
    return stop


def _test(run: Run, stop: StopReason) -> StopReason:
    """Evaluate `test` at the end of a run that was not stopped by a signal; a signal can stop it now."""
    by_signal = stop in (StopReason.SIGNAL, StopReason.CTRL_C)
    if not by_signal and "test" in run.eval_loaders and "test" not in run.metrics:
        try:
            evaluate_splits(run, ["test"])
        except Abandoned:
            return agree_to_stop(run) or stop
    return stop


def _apply_freezing(run: Run, trainer: Trainer, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """Freeze and thaw parameters that are due before the next step."""
    if not trainer.freeze_and_thaw():
        return batches
    with run.clock.gathering("warm_up"):
        return trainer.warm_up(batches)


def _start(run: Run, trainer: Trainer) -> Iterator[StepBatch]:
    """Start loading, compile the model if asked, and return the batches to train on."""
    clock, compilation, counter = run.clock, run.compilation, run.counter
    if compilation is not None:
        run.display.note("compiling the first step ...")
    batches = clock.waiting(run.train_loader.steps(run.progress.step, run.total_steps))
    batches = interruptible(run, batches)
    with clock.gathering("warm_up"):
        batches = trainer.warm_up(batches)
    if compilation is not None:
        run.display.note(compilation.start(clock.seconds["warm_up"]))
        with counter.uncompiled(batches) as counted:
            batches = batches if counted is None else trainer.warm_up(counted)
    return batches if run.watch_batches is None else run.watch_batches(batches)


class Segment(NamedTuple):
    """Consecutive steps after which the host logs, evaluates or saves."""

    steps: int
    log: PendingLog
    """The metrics since the last log line."""
    step_s: float
    data_comes: bool
    """False if a signal interrupted the wait for a batch."""


def _train_segment(run: Run, trainer: Trainer, batches: Iterator[StepBatch], max_steps: int) -> Segment:
    """Train until the next log, evaluation or save is due, for at most `max_steps` steps."""
    progress, clock, counter, losses, data_comes = run.progress, run.clock, run.counter, trainer.losses, True
    start, start_s, samples, began = progress.step, clock.elapsed_s(), progress.samples, clock.moment()
    end = min(run.plan.intervals.next_stop(start, run.total_steps), start + max_steps)
    # The first step of a process and counted steps do not represent the training speed.
    is_first, aside = start == trainer.first_step, None
    if is_first:
        aside = clock.gathering("warm_up")
    elif counter.due(start):
        end, aside = start + 1, counter.counting(batches)
    with aside or nullcontext() as given:
        try:
            trainer.train(given or batches, end)
        except Stopped:
            data_comes = False
        log, steps = losses.begin_log(), progress.step - start
        losses.flush()
        losses.unread = log
        if aside is not None or not losses.defers:
            losses.receive(log)
        if is_first and steps:
            trainer.first_checks.check_evaluation()
    trainer.first_checks.switches.check()
    if aside is None:
        log.timed = steps, progress.samples - samples, began, clock.moment()
    step_s = (clock.elapsed_s() - start_s) / max(1, steps)
    # A host that does not wait may be ahead of the device.
    return Segment(steps, log, max(step_s, losses.step_s if losses.defers else 0.0), data_comes)


def _report(run: Run, trainer: Trainer, segment: Segment) -> None:
    """Call back at the end of an epoch, note if an evaluation is due, and log or show metrics."""
    progress, intervals = run.progress, run.plan.intervals
    step, took_any = progress.step, segment.steps > 0
    if took_any and step in intervals.epoch_steps:
        run.call_back("on_epoch", round(run.epoch))
    progress.evaluation_due = took_any and (step >= run.total_steps or step in intervals.eval_steps)
    logs = progress.evaluation_due or (took_any and step in intervals.log_steps)
    trainer.losses.report(segment.log, logs=logs)
    if logs and run.compilation is not None:
        num_steps = run.total_steps - trainer.first_step
        if advice := run.compilation.complaint(segment.step_s, num_steps):
            run.display.warn(advice)


def _save(run: Run, *, finalize_averages: bool, ends: bool, best_only: bool = False) -> None:
    """Save a checkpoint; averages may be finalized first, and a run that `ends` waits for the disk."""
    run.flush()
    booked = run.clock.seconds
    run.clock.to("saving")
    # If the run is killed after this checkpoint, its log must already contain all earlier lines.
    run.logger.flush()
    before_s, step = booked["saving"], run.progress.step
    if run.ema is not None and finalize_averages:
        with run.uncompiled(), suppress(Stopped):
            run.ema.finalize(partial(interruptible, run))

    def tell(folder: Path) -> None:
        with suppress(Stopped):
            run.call_back("on_save", step, folder)

    # A callback expects the checkpoint of the step at which it is called, unless the config says otherwise.
    writer = run.checkpointer.writer
    callback_waits = writer.background == "auto" and bool(hooks(run.callbacks, "on_save"))
    run.checkpointer.save(background=not (ends or callback_waits), best_only=best_only, tell=tell)
    run.clock.to(None)
    if not ends:
        writer.longest_stall_s = max(writer.longest_stall_s, booked["saving"] - before_s)


def try_out(run: Run) -> None:
    """Evaluate one batch of every split and save a checkpoint: all work of a run besides training."""
    for loader in run.eval_loaders.values():
        evaluate(run, loader, num_batches=1)
    run.checkpointer.save()


def evaluate_splits(run: Run, splits: Sequence[str]) -> None:
    """Evaluate splits, call the callbacks, and log; nothing is logged if a signal interrupts a split."""
    step, clock = run.progress.step, run.clock
    found: dict[str, tuple[dict[str, float], dict[str, MetricTable]]] = {}
    for split in splits:
        clock.to("evaluation")
        tables: dict[str, MetricTable] = {}
        found[split] = evaluate(run, run.eval_loaders[split], keep=tables.update), tables
    run.flush()  # the device has finished the training before it
    for split, (metrics, tables) in found.items():
        # Metrics may differ between ranks in their last bits: all use those of the first.
        metrics = broadcast_object(metrics, run.ranks)
        if hooks(run.callbacks, "on_evaluation"):
            run.call_back("on_evaluation", step, split, metrics)
            metrics = broadcast_object(check_metrics(metrics, run), run.ranks)
        run.metrics[split] = metrics
        clock.to("logging")
        place = {"step": step, "epoch": round(run.epoch, 4), "split": split}
        run.logger.log({**place, **run.evaluated_weights, **metrics})
        if tables and run.ranks.is_first:
            write_tables(run.folder, split, step, tables, run.info.class_names)
        if split == "test":
            run.display.evaluation(step, run.epoch, split, metrics, False, **run.evaluated_weights)


def _evaluate_and_rank(run: Run) -> bool:
    """Evaluate held-out data, or without it use the training loss; return True if the checkpoint is kept.

    If the evaluation fails, a checkpoint is saved before the error is raised.
    """
    progress, splits = run.progress, [split for split in run.eval_loaders if split != "test"]
    try:
        evaluate_splits(run, splits)
        sets = [(split, item) for split in splits if split != "val" for item in run.metrics[split].items()]
        metrics = {"loss": progress.epoch_loss / (progress.epoch_items or 1)}
        metrics = run.metrics.get("val", metrics) if "val" in splits else metrics
        progress.epoch_loss = progress.epoch_items = 0.0
        progress.evaluation_due = False
        return _rank(run, metrics | {f"{split}/{name}": value for split, (name, value) in sets})
    except Abandoned:
        raise
    except Exception:
        if not run.sharded:
            run.flush()
            run.checkpointer.save()
        raise


def _rank(run: Run, metrics: dict[str, float]) -> bool:
    """Compare an evaluation with the best so far; return True if its checkpoint is to be kept."""
    progress, metric = run.progress, run.plan.best_metric
    if metric not in metrics:
        hint = f"There are: {', '.join(metrics)}"
        raise ConfigError("C005", "unknown metric", key="stop.metric", value=metric, suggestion=hint)
    value, previous = metrics[metric], progress.best_value
    # NaN is never the best, because no value would beat it.
    is_best = not math.isnan(value) and (
        previous is None or (value > previous if run.plan.best_mode == "max" else value < previous)
    )
    if is_best:
        progress.best_value, progress.best_step, progress.evaluations_without_gain = value, progress.step, 0
        run.best_metrics = metrics
    else:
        progress.evaluations_without_gain += 1
    for split in (name for name in run.eval_loaders if name != "test"):
        marked, shown = is_best and split == run.plan.followed[0], run.metrics[split]
        run.display.evaluation(progress.step, run.epoch, split, shown, marked, **run.evaluated_weights)
    # A longer run would not evaluate at the last step of this one.
    is_due = progress.step > run.schedule.warmup_steps and progress.step in run.plan.intervals.eval_steps
    if run.schedule.on_metric is not None and is_due and (change := run.schedule.on_metric.follow(value)):
        run.display.note(f"schedule: {change} after {metric}={value:g}")
    if math.isnan(value):
        return False
    others = [(found, step) for found, step in progress.best_states if step != progress.step]
    # The sort is stable: among equal values, the earliest step ranks first.
    sign = -1 if run.plan.best_mode == "max" else 1
    ranked = sorted([*others, (value, progress.step)], key=lambda each: sign * each[0])
    progress.best_states = ranked[: int(run.plan.saving.best)]
    return progress.step in [step for _, step in progress.best_states]


def _no_gain(run: Run) -> StopReason | None:
    """Return the reason to stop if the last evaluations have not improved."""
    patience = run.plan.stop.patience
    if patience is None or run.progress.evaluations_without_gain < patience:
        return None
    run.stop_reason = f"no improvement in {patience} evaluations"
    return StopReason.NO_GAIN
