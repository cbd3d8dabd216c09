"""Training metrics since the last log line: summed on the device, and copied to the host when due."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptfast.core import devices
from ptfast.core.distributed import Ranks, on_all_ranks, sum_over_ranks
from ptfast.core.errors import NumericsError, PtfastError, name_some
from ptfast.core.machine import peak_memory_bytes, processor_time_s, reserved_memory_bytes
from ptfast.core.protocols import StepBatch, takes_own_steps
from ptfast.core.tensors.async_host_copy import AsyncHostCopy, scalars
from ptfast.data.label_checks import unfit_samples
from ptfast.optim.parameter_groups import reference_lr
from ptfast.profiling.not_finite import explain
from ptfast.run import Run
from ptfast.techniques.gradients.clipping import global_norm
from ptfast.techniques.parallel.ordered_sums import OrderedSums
from ptfast.training.loop.first_step import FirstStep

LEAST_S = 1.0
"""Minimum time between two measurements: over less time, utilization means little."""
RECENT, FEWEST = 50, 10
"""Number of log lines that a loss is compared with, and the minimum."""
FAR, LEAST_SPREAD = 8.0, 0.01
"""Median absolute deviations above the median that make a spike, and its minimum relative to the median."""


class Usage:
    """CPU time, memory and GPU utilization since the last measurement. Cost: 0.1 ms on a CPU.

    `warn` receives the reason if a metric is unavailable; that metric is not logged from then on.
    """

    def __init__(self, device_type: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._asked: dict[str, Callable[[], float]] = {
            "memory_bytes": lambda: reserved_memory_bytes(device_type)
        }
        if device_type == "cuda":
            self._asked["gpu_use"] = lambda: torch.cuda.utilization() / 100
        self._read_s, self._cores_s = time.perf_counter(), processor_time_s()

    def measure(self) -> dict[str, float]:
        """Return metrics by name; empty if just read. GPU utilization needs the package nvidia-ml-py."""
        now_s, before_s = time.perf_counter(), self._read_s
        if now_s - before_s < LEAST_S:
            return {}
        cores_s, cores_before_s = processor_time_s(), self._cores_s
        self._read_s, self._cores_s = now_s, cores_s
        metrics = {"cpu_cores": (cores_s - cores_before_s) / (now_s - before_s)}
        for name, ask in [*self._asked.items()]:
            try:
                metrics[name] = ask()
            except Exception as error:  # NVML has its own exception for values missing under MIG and vGPU
                del self._asked[name]
                if not isinstance(error, ImportError):
                    self._warn(f"{name} is not logged: {type(error).__name__}: {error}")
        return metrics


@dataclass
class PendingLog:
    """The open window after `step`: values known to the host, and values still being copied."""

    step: int
    epoch: float
    lr: float
    sums: AsyncHostCopy
    """Loss, items, gradient norm if it is logged; counts of skipped steps if steps may be skipped."""
    since: int
    """The step of the last log line; -1 before the first."""
    has_norm: bool
    timed: tuple[int, int, Any, Any] | None = None
    """Steps and samples of its last segment, with its begin and end on the clock, if its time counts."""
    resources: dict[str, float] = field(default_factory=dict)
    logs: bool = False
    """Whether it closes the window: its metrics are logged, not only shown."""
    loss: float | None = None
    """Mean loss of the items, once it is read."""
    norm: float = math.nan
    error: PtfastError | None = None


class LossAccumulator:
    """The open log line: item losses and gradients since the last line, kept on the device until it is due.

    A window that was open when the run was saved is resumed.

    On CUDA the host never waits for a metric while it trains: `begin_log` copies them without blocking, and
    `flush` reads and logs them when the next log begins, or before they are needed. On other devices they are
    read at once.
    """

    update: Any
    """The update of the weights (`updates.PlainUpdate`), which may skip steps; set before the first step."""

    def __init__(self, run: Run, parameters: Sequence[Tensor], first_checks: FirstStep) -> None:
        self._run, self._parameters, self._first_checks = run, parameters, first_checks
        self.inspected_step = -1
        """The step, counted from 0, whose gradients are inspected."""
        # Sums of float32 losses in float64 are exact, so the order of addition does not matter.
        exact = isinstance(run.forward, OrderedSums)
        is_double = any(p.dtype == torch.float64 for p in parameters)
        dtype = devices.sum_dtype(run.device) if exact else torch.float64 if is_double else torch.float32
        # A resumed window was summed over all ranks; one of them continues it.
        progress = run.progress
        restored = (progress.window_loss, progress.window_items) if run.ranks.is_first else (0.0, 0.0)
        self.loss_sum = torch.tensor(restored[0], device=run.device, dtype=dtype)
        whole = restored[1] == int(restored[1])
        self.num_items: Tensor | float = int(restored[1]) if whole else restored[1]
        self._before: tuple[Tensor | float, Tensor | float] = self.sums()
        self._norm: Tensor | None = None
        self.unread: PendingLog | None = None
        """The log that the next `flush` reports."""
        self.defers = run.device.type == "cuda"
        self.step_s = 0.0
        """Seconds per step in the newest log that was timed and read."""
        run.flush = self.flush
        self._unreached: set[str] | None = None
        self._named_unreached = self._explained = False
        self._logged_step, self._logged = -1, self._timed()
        self._usage = Usage(run.device.type, run.display.warn)

    def add(self, loss: Tensor, num_items: Tensor | float) -> None:
        """Add the losses of a micro-batch; the host does not wait."""
        self.loss_sum += loss
        self.num_items = self.num_items + num_items

    def leave_out(self, skipped: Tensor) -> None:
        """Undo the last step's additions if it was skipped; call after every step, or one with `remember`."""
        loss_before, items_before = self._before
        self.loss_sum = torch.where(skipped, loss_before, self.loss_sum)
        self.num_items = torch.where(skipped, items_before, self.num_items)
        self._before = self.sums()

    def remember(self) -> None:
        """Save the sums before a step, if the host need not wait for them."""
        self._before = self.loss_sum.item(), self.num_items

    def sums(self) -> tuple[Tensor, Tensor | float]:
        """Return loss and items of this rank so far."""
        return self.loss_sum.clone(), self.num_items

    def put_back(self, sums: tuple[Tensor, Tensor | float]) -> None:
        """Reset the sums to a result of `sums`."""
        self.loss_sum, self.num_items = sums
        self._before = self.sums()

    def clear(self) -> None:
        """Open the next window."""
        self.put_back((self.loss_sum.zero_(), 0))

    def inspect_gradients(self) -> None:
        """Record the gradient norm and the names of parameters without gradients; the host does not wait."""
        run = self._run
        # A task that takes its own steps leaves no gradients to inspect.
        if run.progress.step != self.inspected_step or takes_own_steps(run.task):
            return
        if run.ranks.distributed:
            run.forward.check_gradients()
        if run.plan.log_norm:
            norm = global_norm([p.grad for p in self._parameters if p.grad is not None])
            self._norm = self.update.unscaled(norm)
        if not self._named_unreached:
            named = run.model.named_parameters()
            missing = {name for name, p in named if p.requires_grad and p.grad is None}
            self._unreached = missing if self._unreached is None else self._unreached & missing

    def read(self) -> float:
        """Return the mean item loss of the open window over all ranks. Waits; raises as `receive`."""
        return self.receive(self.begin_log())

    def begin_log(self) -> PendingLog:
        """Start reading the open window; the host does not wait."""
        run, progress = self._run, self._run.progress
        run.clock.to("logging")
        # All ranks have the same norm, which `begin_sums` would add up: only the first contributes.
        norms = [] if self._norm is None else [self._norm * run.ranks.is_first]
        values = [self.loss_sum, self.num_items, *norms]
        sums = begin_sums(values, run.device, run.ranks, self.update.counts)
        lr = reference_lr(run.optimizer)
        return PendingLog(progress.step, run.epoch, lr, sums, self._logged_step, bool(norms))

    def receive(self, log: PendingLog) -> float:
        """Read the metrics of `log` into the run's progress, and return the mean item loss.

        N001 if it is not finite or fp16 gradients overflow step after step; C017 or D005 for a known cause.
        """
        progress = self._run.progress
        if log.error is not None:
            raise log.error
        if log.loss is not None:
            return log.loss
        progress.window_loss, progress.window_items, *others = log.sums.read()
        if log.has_norm:
            log.norm = others.pop(0)
        skipped_in_a_row = 0
        if others:
            before = progress.skipped_steps
            skipped_in_a_row, progress.skipped_before, progress.skipped_steps, *last = map(int, others)
            if last and progress.skipped_steps > before:
                self.explain(last[0])
        loss = progress.window_loss / (progress.window_items or 1)
        if not math.isfinite(loss) or skipped_in_a_row >= self.update.limit:
            log.error = self._diagnosis(log, loss, skipped_in_a_row)
            raise log.error
        log.loss = loss if progress.window_items or not skipped_in_a_row else math.nan
        return log.loss

    def explain(self, step: int, batch: StepBatch | None = None) -> None:
        """Explain why `step`, counted from 1, was skipped, for the first skipped step only; on all ranks."""
        if not self._explained:
            self._explained = True
            explain(self._run, step - 1, batch or self._run.train_loader.batch_at(step - 1))

    def _diagnosis(self, log: PendingLog, loss: float, skipped_in_a_row: int) -> PtfastError:
        """Return the error for a loss that is not finite, with the samples or part of the model at fault."""
        run, step = self._run, log.step
        what = f"the loss is {loss} by step {step}"
        if skipped_in_a_row >= self.update.limit:
            what = f"{self.update.cause} in {skipped_in_a_row} steps in a row, by step {step}"
        else:
            mine = run.train_loader.not_finite(max(0, log.since), step)
            found = {sample for each in on_all_ranks(mine, run.ranks.world_size) for sample in each}
            if found:
                return unfit_samples(sorted(found), f", and {what}")
        first = max(skipped_in_a_row, 1) == step and not self.update.explains_skips
        if first and (error := self._first_checks.not_finite()) is not None:
            return error
        hint = (
            f"Lower optimizer.lr (now at {log.lr:.3g}), clip with gradients.clip_norm=1 or try debug=anomaly"
        )
        return NumericsError("N001", what, suggestion=hint)

    def report(self, log: PendingLog, *, logs: bool) -> None:
        """Show `log`, in the next `flush` if it is still being copied; if it `logs`, open the next window."""
        run = self._run
        self.unread, log.logs = log, logs
        if logs:
            self.clear()
            self._logged_step = log.step
        if logs and run.ranks.is_first:
            log.resources |= self._usage.measure()
            for part in run.stateful.values():
                log.resources |= getattr(part, "log_values", dict)()
            log.resources["peak_memory_bytes"] = peak_memory_bytes(run.device.type)
            if (share := run.choices.get("padding_share")) is not None:
                log.resources["padding_share"] = share
        if log.loss is not None:
            self.flush()
        if logs:
            self._name_unreached()
            run.clock.to(None)

    def flush(self) -> None:
        """Read and report metrics that are still being copied; raises as `receive`."""
        if (log := self.unread) is None:
            return
        run, progress = self._run, self._run.progress
        run.clock.to("logging")
        loss = self.receive(log)
        self.unread = None
        if log.timed is not None:
            steps, samples, begin, end = log.timed
            seconds = run.clock.between(begin, end)
            progress.timed_steps += steps
            progress.timed_samples += samples
            progress.timed_s += seconds
            self.step_s = seconds / max(steps, 1)
        metrics, more = {"loss": loss, "lr": log.lr}, {}
        # Speed is measured since the last log line, without warm-up.
        steps, samples, seconds = (
            now - before for before, now in zip(self._logged, self._timed(), strict=True)
        )
        if steps and seconds > 0:
            metrics["samples_per_s"], more["step_s"] = samples / seconds, seconds / steps
        if not log.logs:
            run.display.progress(log.step, log.epoch, metrics)
            return
        if skipped := progress.skipped_steps - progress.skipped_logged:
            metrics["skipped_steps"] = skipped
            progress.skipped_logged = progress.skipped_steps
        # The norm of a skipped step has overflowed.
        if math.isfinite(log.norm):
            metrics["grad_norm"] = log.norm
        place = {"step": log.step, "epoch": round(log.epoch, 4), "split": "train"}
        run.logger.log(place | metrics | more | log.resources)
        run.display.progress(log.step, log.epoch, metrics)
        run.metrics["train"] = metrics
        progress.epoch_loss += progress.window_loss
        progress.epoch_items += progress.window_items
        progress.window_loss = progress.window_items = 0.0
        self._logged = self._timed()
        if math.isfinite(loss):
            self._note_spike(log.step, loss)
            progress.recent_losses = [*progress.recent_losses, loss][-RECENT:]

    def _note_spike(self, step: int, loss: float) -> None:
        """Count losses far above earlier ones (consecutive lines count once); report the largest so far."""
        run, progress = self._run, self._run.progress
        before = progress.recent_losses
        if (usual := spike_above(before, loss)) is None or spike_above(before[:-1], before[-1]) is not None:
            return
        progress.loss_spikes += 1
        largest = progress.largest_spike
        if largest is None or loss - usual > largest["loss"] - largest["usual"]:
            progress.largest_spike = {"step": step, "loss": loss, "usual": usual}
            hint = "" if run.clip is not None else "; gradients.clip_norm=1 limits the effect of one batch"
            what = f"the loss has a spike at step {step}: {loss:.4g}, the usual is {usual:.4g}{hint}"
            run.display.warn(what)

    def _name_unreached(self) -> None:
        """Note, with the first line, which parameters get no gradient."""
        if self._unreached and not self._named_unreached:
            what = "get no gradient, so they have neither updates nor weight decay"
            self._run.display.note(f"{name_some(sorted(self._unreached))} {what}")
        self._named_unreached = True

    def _timed(self) -> tuple[int, int, float]:
        progress = self._run.progress
        return progress.timed_steps, progress.timed_samples, progress.timed_s


def spike_above(before: Sequence[float], loss: float) -> float | None:
    """Return the usual loss, a median, if `loss` lies far above earlier ones; None if it does not."""
    if len(before) < FEWEST:
        return None
    usual = statistics.median(before)
    spread = statistics.median(abs(each - usual) for each in before)
    return usual if loss > usual + FAR * max(spread, LEAST_SPREAD * abs(usual)) else None


def begin_sums(
    values: Sequence[Tensor | float],
    device: torch.device,
    ranks: Ranks,
    alike: Sequence[Tensor | int] = (),
) -> AsyncHostCopy:
    """Start to sum scalars over all ranks, except those equal on all (`alike`); the host does not wait."""
    dtype = devices.sum_dtype(device)
    sums = sum_over_ranks(scalars(values, device, dtype), ranks)
    return AsyncHostCopy(torch.cat([sums, scalars(alike, device, dtype)]) if alike else sums)
