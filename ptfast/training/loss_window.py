"""Training figures since the last log line: summed on the device, and read by the host to log them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ptfast.core import devices
from ptfast.core.distributed import Ranks, on_all_ranks, sum_over_ranks
from ptfast.core.errors import NumericsError, PtfastError
from ptfast.core.machine import held_memory_bytes, peak_memory_bytes, processor_time_s
from ptfast.core.protocols import takes_own_steps
from ptfast.data.label_checks import unfit_samples
from ptfast.optim.parameter_groups import reference_lr
from ptfast.run import Run
from ptfast.techniques.gradients.clipping import global_norm
from ptfast.techniques.precision.number_formats import ScaledSteps
from ptfast.training.first_step import FirstStep

LEAST_S = 1.0
"""Time between two looks: over less, a share of busy time says little, and a look is no longer cheap."""
NAMED = 5
"""Parameters without a gradient that are named; the others are counted."""
MOST_SKIPPED = 30
"""Overflowing fp16 steps in a row, each of which halves the scale, after which no scale will help."""


class Usage:
    """Processor time, memory and a GPU's busy time since the last look; 0.1 ms a look on a CPU.

    `warn` receives why a figure cannot be had; it is left out from then on.
    """

    def __init__(self, device_type: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._asked: dict[str, Callable[[], float]] = {"memory_bytes": lambda: held_memory_bytes(device_type)}
        if device_type == "cuda":
            self._asked["gpu_use"] = lambda: torch.cuda.utilization() / 100
        self._look_s, self._cores_s = time.perf_counter(), processor_time_s()

    def look(self) -> dict[str, float]:
        """Figures by name, none too soon after the last; a GPU's busy time takes the package nvidia-ml-py."""
        now_s, before_s = time.perf_counter(), self._look_s
        if now_s - before_s < LEAST_S:
            return {}
        cores_s, cores_before_s = processor_time_s(), self._cores_s
        self._look_s, self._cores_s = now_s, cores_s
        figures = {"cpu_cores": (cores_s - cores_before_s) / (now_s - before_s)}
        for name, ask in [*self._asked.items()]:
            try:
                figures[name] = ask()
            except Exception as error:  # NVML has a class of its own for what MIG and vGPU do not tell
                del self._asked[name]
                if not isinstance(error, ImportError):
                    self._warn(f"{name} is not logged: {type(error).__name__}: {error}")
        return figures


class LossWindow:
    """The open log line: item losses and gradients since the last one, kept on the device until it is due.

    A window that was open when the run was saved is resumed. `first_look` knows what made a loss that is not
    finite from the start.
    """

    def __init__(
        self,
        run: Run,
        dtype: torch.dtype,
        parameters: Sequence[Tensor],
        scaled: ScaledSteps | None,
        first_look: FirstStep,
    ) -> None:
        self._run, self._parameters, self._scaled, self._first_look = run, parameters, scaled, first_look
        # A resumed window was summed over all ranks; one of them carries it on.
        progress = run.progress
        restored = (progress.window_loss, progress.window_items) if run.ranks.is_first else (0.0, 0.0)
        self.loss_sum = torch.tensor(restored[0], device=run.device, dtype=dtype)
        self.num_items: Tensor | int = int(restored[1])
        self._before = self.sums()
        self._norm: Tensor | None = None
        self._read_norm = math.nan
        self._unreached: set[str] | None = None
        self._named_unreached = False
        self._logged_step, self._logged = -1, self._timed()
        self._usage = Usage(run.device.type, run.display.warn)

    def add(self, loss: Tensor, num_items: Tensor | int) -> None:
        """Add the losses of a micro-batch; the host does not wait."""
        self.loss_sum += loss
        self.num_items = self.num_items + num_items

    def leave_out(self, skipped: Tensor) -> None:
        """Take back what the last step added if fp16 skipped it because its gradients overflowed."""
        loss_before, items_before = self._before
        self.loss_sum = torch.where(skipped, loss_before, self.loss_sum)
        self.num_items = torch.where(skipped, items_before, self.num_items)
        self._before = self.sums()

    def sums(self) -> tuple[Tensor, Tensor | int]:
        """Loss and items of this rank so far."""
        return self.loss_sum.clone(), self.num_items

    def put_back(self, sums: tuple[Tensor, Tensor | int]) -> None:
        """Reset the sums to what `sums` returned."""
        self.loss_sum, self.num_items = sums
        self._before = self.sums()

    def clear(self) -> None:
        """Open the next window."""
        self.put_back((self.loss_sum.zero_(), 0))

    def inspect_gradients(self) -> None:
        """Keep the norm of the gradients, and the names of parameters without one; the host does not wait."""
        run = self._run
        if takes_own_steps(run.task):
            return  # it leaves no gradients to look at
        if run.ranks.distributed:
            run.forward.check_gradients()
        if run.log_norm:
            norm = global_norm([p.grad for p in self._parameters if p.grad is not None])
            self._norm = norm if self._scaled is None else norm / self._scaled.scale
        if not self._named_unreached:
            named = run.model.named_parameters()
            missing = {name for name, p in named if p.requires_grad and p.grad is None}
            self._unreached = missing if self._unreached is None else self._unreached & missing

    def read(self) -> float:
        """Mean item loss since the last log line, over all ranks. Makes the host wait for the device.

        N001 if it is not finite or fp16 gradients overflow step after step; C017 or D005 for a known cause.
        """
        run, progress = self._run, self._run.progress
        run.clock.to("logging")
        # Every rank has the same norm, and `sum_and_read` adds them up.
        norms = [] if self._norm is None else [self._norm / run.ranks.num_ranks]
        sums = sum_and_read([self.loss_sum, self.num_items, *norms], run.device, run.ranks)
        progress.window_loss, progress.window_items, self._read_norm = (*sums, math.nan)[:3]
        skipped_in_a_row = 0
        if self._scaled is not None:
            skipped_in_a_row = int(self._scaled.in_a_row)
            self._scaled.note(progress)
        loss = progress.window_loss / max(progress.window_items, 1)
        if not math.isfinite(loss) or skipped_in_a_row >= MOST_SKIPPED:
            raise self._diagnosis(loss, skipped_in_a_row)
        return loss if progress.window_items or not skipped_in_a_row else math.nan

    def _diagnosis(self, loss: float, skipped_in_a_row: int) -> PtfastError:
        """The error for a loss that is not finite: the samples or the part of the model that made it so."""
        run, step = self._run, self._run.progress.step
        what = f"the loss is {loss} by step {step}"
        if skipped_in_a_row >= MOST_SKIPPED:
            what = f"fp16 gradients overflowed in {skipped_in_a_row} steps in a row, by step {step}"
        else:
            mine = run.train_loader.not_finite(max(0, self._logged_step), step)
            found = {sample for each in on_all_ranks(mine, run.ranks.num_ranks) for sample in each}
            if found:
                return unfit_samples(sorted(found), f", and {what}")
        if max(skipped_in_a_row, 1) == step and (error := self._first_look.not_finite()) is not None:
            return error
        lr = reference_lr(run.optimizer)
        hint = f"Lower optimizer.lr (now at {lr:.3g}), clip with gradients.clip_norm=1 or try debug=anomaly"
        return NumericsError("N001", what, suggestion=hint)

    def show(self, loss: float) -> None:
        """Show figures of the open window on the terminal, not in the log; `loss` is from `read`."""
        run = self._run
        run.display.progress(run.progress.step, run.epoch, self._figures(loss)[0])

    def log(self, loss: float) -> None:
        """Write one line of training figures and open the next window; `loss` is from `read`."""
        run, progress = self._run, self._run.progress
        if self._logged_step == progress.step:
            return
        figures, resources = self._figures(loss)
        if skipped := progress.skipped_steps - progress.skipped_logged:
            figures["skipped_steps"] = skipped
            progress.skipped_logged = progress.skipped_steps
        # The norm of a skipped step has overflowed.
        if math.isfinite(self._read_norm):
            figures["grad_norm"] = self._read_norm
        if run.ranks.is_first:
            resources |= self._usage.look()
            resources["peak_memory_bytes"] = peak_memory_bytes(run.device.type)
            if run.resolved.padding_share is not None:
                resources["padding_share"] = run.resolved.padding_share
        place = {"step": progress.step, "epoch": round(run.epoch, 4), "split": "train"}
        run.logger.log(place | figures | resources)
        run.display.progress(progress.step, run.epoch, figures)
        run.figures["train"] = figures
        if self._unreached and not self._named_unreached:
            names = sorted(self._unreached)
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            what = "get no gradient, and so neither updates nor weight decay"
            run.display.note(f"{', '.join(names[:NAMED])}{more} {what}")
        self._named_unreached = True
        progress.epoch_loss += progress.window_loss
        progress.epoch_items += progress.window_items
        progress.window_loss = progress.window_items = 0.0
        self.clear()
        self._logged_step, self._logged = progress.step, self._timed()
        run.clock.to(None)

    def _figures(self, loss: float) -> tuple[dict[str, float], dict[str, float]]:
        """Figures to show, and more to log. Speed is that since the last log line, warm-up left out."""
        figures, more = {"loss": loss, "lr": reference_lr(self._run.optimizer)}, {}
        steps, samples, seconds = (
            now - before for before, now in zip(self._logged, self._timed(), strict=True)
        )
        if steps and seconds > 0:
            figures["samples_per_s"], more["step_s"] = samples / seconds, seconds / steps
        return figures, more

    def _timed(self) -> tuple[int, int, float]:
        progress = self._run.progress
        return progress.timed_steps, progress.timed_samples, progress.timed_s


def sum_and_read(values: Sequence[Tensor | float], device: torch.device, ranks: Ranks) -> list[float]:
    """Scalars of this rank, summed over all ranks. Makes the host wait for the device."""
    dtype = devices.sum_dtype(device)
    scalars = [torch.as_tensor(value).to(device, dtype) for value in values]
    return sum_over_ranks(torch.stack(scalars), ranks).tolist()
