"""The hot loop: train for so many steps, look up, evaluate, save, go on."""

from __future__ import annotations

import contextlib
import math
import signal
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.distributed import Ranks, broadcast_buffers, sum_over_ranks
from ptfast.ema import Ema
from ptfast.errors import ConfigError, DataError, NumericsError
from ptfast.optim import apply_lr, build_step
from ptfast.precision import Precision
from ptfast.run import EvalLoader, Run, StepBatch, Task

LOOK_S = 5.0
"""About the longest time that a signal, or the end of `run.max_time`, waits for the ranks to look up."""


def fit(run: Run) -> str:
    """Train `run` from where it stands to its last step.

    Between two moments at which something is due (log, evaluate, save), steps run back to back and the host
    reads nothing from the device, for a few seconds at most.

    Returns:
        `finished`; `stopped` (no more gain); `paused` (`run.max_time` is over); `preempted` or `interrupted`
        (by a signal). The state is saved in every case.

    Raises:
        NumericsError: N001 when the loss is no longer finite.
        DataError: D006 when iterable data ends before the last step.
    """
    progress, cadence, clock = run.progress, run.cadence, run.clock
    batches = run.train_loader.steps(progress.step, run.total_steps)
    trainer = Trainer(run)
    status, look_steps = "finished", 1
    clock.charge("start-up")
    while progress.step < run.total_steps and status == "finished":
        start, start_s = progress.step, progress.train_s
        trainer.train(batches, min(cadence.next_stop(start, run.total_steps), start + look_steps))
        step = progress.step
        loss = trainer.read_loss()
        over = step >= run.total_steps
        reason, look_steps = _look_up(run, (progress.train_s - start_s) / (step - start))
        status = reason or status
        evaluation_due = over or is_due(step, cadence.eval_steps)
        if evaluation_due or is_due(step, cadence.log_steps):
            trainer.log(loss)
        is_best = False
        if evaluation_due:
            is_best = evaluate_and_rank(run)
            if run.patience is not None and progress.evaluations_without_gain >= run.patience and not over:
                status, run.stop_reason = "stopped", f"no gain in {run.patience} evaluations"
        if is_best or over or status != "finished" or is_due(step, cadence.save_steps):
            clock.charge("logging")
            run.save(run, is_best)
            clock.charge("saving")
    if (
        status in ("finished", "stopped", "paused")
        and "test" in run.eval_loaders
        and "test" not in run.figures
    ):
        evaluate_split(run, "test")
    return status


class Trainer:
    """Takes optimizer steps; holds what they share, so that a step looks nothing up twice."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        self.base_lrs = [group["initial_lr"] for group in run.optimizer.param_groups]
        self.dtype = (
            torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        )
        self.take_step = build_step(run.optimizer)
        self.weights: dict[int, Tensor] = {}
        self.counts_samples = getattr(run.task, "counts_samples", False)
        self.first_micro_batch = run.ranks.rank * (run.micro_batches // run.ranks.num_ranks)
        # A resumed window was summed over all ranks; one of them carries it on.
        restored = (run.progress.window_loss, run.progress.window_items) if run.ranks.is_first else (0.0, 0.0)
        self.loss_sum = torch.tensor(restored[0], device=run.device, dtype=self.dtype)
        self.num_items: Any = int(restored[1])
        self.logged_samples, self.logged_s, self.logged_step = run.progress.samples, run.progress.train_s, -1

    def train(self, batches: Iterator[StepBatch], last_step: int) -> None:
        """Take optimizer steps up to `last_step`, or up to a signal."""
        run, progress, optimizer = self.run, self.run.progress, self.run.optimizer
        scaler, clip, ema, callbacks = run.precision.scaler, run.clip, run.ema, run.callbacks
        factors = run.schedule.lr_factors(progress.step, last_step)
        momenta = run.schedule.momenta(progress.step, last_step)
        first_step, take_step = progress.step, self.take_step
        run.forward.train()
        for index, batch in enumerate(islice(batches, last_step - first_step)):
            apply_lr(optimizer, self.base_lrs, factors[index], momenta[index] if momenta else None)
            self._accumulate_gradients(batch, first_step + index)
            if clip is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                clip()
            if scaler is None:
                take_step()
            else:
                scaler.step(optimizer)
                scaler.update()
            for parameter in self.parameters:
                parameter.grad = None
            if ema is not None:
                ema.update()
            progress.step += 1
            progress.samples += batch.num_samples
            for callback in callbacks:
                callback.on_step(run, progress.step)
            if run.stop_signal is not None and not run.ranks.distributed:
                break
        else:
            if progress.step < last_step:
                raise _data_ended(run)

    def _accumulate_gradients(self, batch: StepBatch, step: int) -> None:
        """Forward and backward of this rank's micro-batches: the gradient of the mean loss of the step."""
        run, loss_of, precision = self.run, self.run.task.loss, self.run.precision
        weight = self._item_weight(batch)
        last = len(batch.micro_batches) - 1
        for index, (data, num_samples) in enumerate(batch.micro_batches):
            run.seed_step(run.seed, step, self.first_micro_batch + index)
            # Gradients cross the ranks once, with the last micro-batch.
            with run.forward.no_sync() if run.ranks.distributed and index < last else _nothing:
                if precision.enabled:
                    with precision.autocast():
                        loss, count = loss_of(run.forward, data)
                else:
                    loss, count = loss_of(run.forward, data)
                # The stand-in of an empty share keeps the collectives in step and counts for nothing.
                loss.backward(weight if num_samples else weight * 0)
            if num_samples:
                self.loss_sum += loss.detach()
                self.num_items += count

    def _item_weight(self, batch: StepBatch) -> Tensor:
        """What one item's loss weighs: one over the items of the step, times the ranks DDP averages over.

        Scaling by the number of micro-batches instead is wrong wherever they differ in size.
        """
        run = self.run
        num_items: Any = batch.num_samples
        if not self.counts_samples:
            num_items = sum(run.task.count(data, n) for data, n in batch.micro_batches if n)
            if run.ranks.distributed:
                num_items = sum_over_ranks(torch.zeros((), device=run.device) + num_items, run.ranks)
        if isinstance(num_items, Tensor):
            weight = run.ranks.num_ranks / num_items.clamp(min=1).to(self.dtype)
        elif (weight := self.weights.get(num_items)) is None:
            value = run.ranks.num_ranks / max(num_items, 1)
            weight = self.weights[num_items] = torch.tensor(value, device=run.device, dtype=self.dtype)
        return weight if run.precision.scaler is None else run.precision.scaler.scale(weight)

    def read_loss(self) -> float:
        """Mean item loss since the last log line, over all ranks. Makes the host wait for the device.

        Raises:
            NumericsError: N001 when it is not finite, or when fp16 gradients overflow at every scale.
        """
        run, progress = self.run, self.run.progress
        progress.window_loss, progress.window_items = sum_and_read(
            [self.loss_sum, self.num_items], run.device, run.ranks
        )
        progress.train_s += run.clock.charge("training")
        loss = progress.window_loss / max(progress.window_items, 1)
        scale = run.precision.scaler.get_scale() if run.precision.scaler is not None else 1.0
        if math.isfinite(loss) and scale > 1e-6:
            return loss
        what = (
            f"the loss is {loss} by step {progress.step}"
            if not math.isfinite(loss)
            else "every fp16 gradient overflows"
        )
        lr = run.optimizer.param_groups[0]["lr"]
        hint = (
            f"Lower optimizer.lr (now at {lr:.3g}), clip with gradients.clip_norm=1, look with debug=anomaly"
        )
        raise NumericsError("N001", what, suggestion=hint)

    def log(self, loss: float) -> None:
        """Write one line of training figures and open the next window."""
        run, progress = self.run, self.run.progress
        if self.logged_step == progress.step:
            return
        seconds = progress.train_s - self.logged_s
        figures = {
            "loss": loss,
            "lr": run.optimizer.param_groups[0]["lr"],
            "samples_per_s": (progress.samples - self.logged_samples) / seconds if seconds > 0 else 0.0,
        }
        run.logger.log({"step": progress.step, "epoch": round(run.epoch, 4), "split": "train", **figures})
        run.display.progress(progress.step, run.epoch, figures)
        run.figures["train"] = figures
        progress.epoch_loss += progress.window_loss
        progress.epoch_items += progress.window_items
        progress.window_loss = progress.window_items = 0.0
        self.loss_sum.zero_()
        self.num_items = 0
        self.logged_samples, self.logged_s, self.logged_step = (
            progress.samples,
            progress.train_s,
            progress.step,
        )
        run.clock.charge("logging")


_nothing = contextlib.nullcontext()


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums over many batches are kept in: float64, except on Apple's GPUs, which do not have it."""
    return torch.float32 if device.type == "mps" else torch.float64


def sum_and_read(values: Sequence[Tensor | float], device: torch.device, ranks: Ranks) -> list[float]:
    """Scalars of this rank, summed over all ranks. Makes the host wait for the device."""
    dtype = sum_dtype(device)
    scalars = [torch.as_tensor(value).to(device, dtype) for value in values]
    return sum_over_ranks(torch.stack(scalars), ranks).tolist()


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    task: Task,
    loader: EvalLoader,
    *,
    device: torch.device,
    ranks: Ranks,
    precision: Precision,
    ema: Ema | None = None,
) -> dict[str, float]:
    """Figures of `model` over a whole split, each sample counted once, sums kept on the device.

    With averaged weights (`ema`) it is those that are evaluated.
    """
    metrics = task.metrics().to(device)
    loss_sum = torch.zeros((), dtype=sum_dtype(device), device=device)
    num_items: Any = 0
    was_training = model.training
    model.eval()
    with ema.swapped() if ema is not None else _nothing, precision.autocast():
        # Averaged statistics differ between the ranks as much as the newest do.
        broadcast_buffers(list(model.buffers()), ranks)
        for data, num_samples in loader:
            if num_samples:
                loss, count = task.evaluate(model, data, metrics)
                loss_sum += loss
                num_items += count
    model.train(was_training)
    total_loss, total_items = sum_and_read([loss_sum, num_items], device, ranks)
    with warnings.catch_warnings():
        # A rank whose share is empty has updated nothing, and gets the sums of the others.
        warnings.filterwarnings("ignore", "The ``compute`` method of metric")
        values = {name: float(value) for name, value in metrics.compute().items()}
    return task.figures(total_loss / max(total_items, 1), values)


def evaluate_split(run: Run, split: str) -> dict[str, float]:
    """Evaluate a split, log it, tell the callbacks."""
    step = run.progress.step
    run.clock.charge("logging")
    figures = evaluate(
        run.model,
        run.task,
        run.eval_loaders[split],
        device=run.device,
        ranks=run.ranks,
        precision=run.precision,
        ema=run.ema,
    )
    run.figures[split] = figures
    run.logger.log({"step": step, "epoch": round(run.epoch, 4), "split": split, **figures})
    for callback in run.callbacks:
        callback.on_evaluation(run, step, split, figures)
    run.clock.charge("evaluation")
    if split != "val":
        run.display.evaluation(step, run.epoch, split, figures, False)
    return figures


def evaluate_and_rank(run: Run) -> bool:
    """Evaluate `val`, or take the training loss where nothing is held out; say whether it is the best so far.

    Raises:
        ConfigError: C005 when the figure that `best` should follow does not exist.
    """
    progress = run.progress
    if "val" in run.eval_loaders:
        figures = evaluate_split(run, "val")
    else:
        figures = {"loss": progress.epoch_loss / max(progress.epoch_items, 1)}
    progress.epoch_loss = progress.epoch_items = 0.0
    if run.best_metric not in figures:
        hint = f"There are: {', '.join(figures)}"
        raise ConfigError("C005", "no such figure", key="stop.metric", value=run.best_metric, suggestion=hint)
    value, previous = figures[run.best_metric], progress.best_value
    # Not a number is never the best: nothing would beat it.
    is_best = not math.isnan(value) and (
        previous is None or (value > previous if run.best_mode == "max" else value < previous)
    )
    if is_best:
        progress.best_value, progress.best_step, progress.evaluations_without_gain = value, progress.step, 0
        run.best_figures = figures
    else:
        progress.evaluations_without_gain += 1
    if "val" in run.eval_loaders:
        run.display.evaluation(progress.step, run.epoch, "val", figures, is_best)
    return is_best and run.keep_best


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after `step`."""
    return every > 0 and step % every == 0


def _look_up(run: Run, seconds_per_step: float) -> tuple[str | None, int]:
    """Why to stop after this step, if at all, and after how many more to look up again.

    All ranks agree on both, so that none waits for one that has left.
    """
    late = run.max_time_s is not None and run.clock.elapsed_s() > run.max_time_s
    code = float(run.stop_signal or 0) or (0.5 if late else 0.0)
    if run.ranks.distributed:
        votes = torch.zeros(run.ranks.num_ranks + 1, device=run.device, dtype=sum_dtype(run.device))
        votes[run.ranks.rank], votes[-1] = code, seconds_per_step
        *codes, seconds = sum_over_ranks(votes, run.ranks).tolist()
        code, seconds_per_step = max(codes), seconds / run.ranks.num_ranks
    look_steps = max(1, int(LOOK_S / max(seconds_per_step, 1e-6)))
    if not code or run.progress.step >= run.total_steps:
        return None, look_steps
    run.stop_reason = "run.max_time is over" if code == 0.5 else signal.Signals(int(code)).name
    return {0.5: "paused", float(signal.SIGINT): "interrupted"}.get(code, "preempted"), look_steps


def _data_ended(run: Run) -> DataError:
    what = f"the data ended after step {run.progress.step} of {run.total_steps}"
    return DataError(
        "D006", what, key="steps", value=run.total_steps, suggestion="Set steps to what the data has"
    )
