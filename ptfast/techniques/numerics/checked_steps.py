"""Steps whose loss or gradients are not finite: found on the device, and left out on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ptfast.core.distributed import Ranks, sum_over_ranks
from ptfast.core.resolved import Progress
from ptfast.core.tensors.dtensors import is_sharded, local_part

READ_AT_ONCE = ("cpu",)
"""Devices whose numbers the host reads without a wait."""


class CheckedSteps:
    """Takes the steps of an optimizer, except those whose loss or gradients are not finite.

    Weights, state and step counts of the optimizer stay in a step that is left out. If the optimizer takes
    `found_inf`, as fused ones and ours do, the device decides and the host never waits.

    Args:
        build_step: makes the function that steps `optimizer`, given the tensor that is 1 to skip, or None.
        progress: of the run, whose counts are carried on.

    Cost: a read of the gradients a step, and a sum of one number over several ranks. 5 us on a CPU.
    """

    scale = 1.0
    """Of the gradients."""
    cause = "loss or gradients were not finite"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        build_step: Callable[[torch.optim.Optimizer, Tensor | None], Callable[[], object]],
        parameters: Sequence[Tensor],
        device: torch.device,
        ranks: Ranks,
        progress: Progress,
        limit: int,
    ) -> None:
        self._parameters, self._ranks, self.limit = parameters, ranks, limit
        takes_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
        at_once = device.type in READ_AT_ONCE
        self._special = any(is_sharded(each) or each.is_complex() for each in parameters)
        # On CUDA the kernel of `check` takes no bfloat16: PyTorch issue 127176.
        self._has_halves = not at_once and any(each.dtype == torch.bfloat16 for each in parameters)
        self.on_device = not at_once and takes_flag and not is_sharded(parameters[0])
        self.waits = not at_once and not self.on_device
        self._found, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._step = build_step(optimizer, self._found if self.on_device else None)
        self._yes = torch.ones((), device=device, dtype=torch.bool)
        self.skipped: Tensor | None = None
        """True if the last step was left out, on the device; None if the host knows that it was taken."""
        zero = torch.zeros((), device=device, dtype=torch.int64) if self.on_device else 0
        self._step_number, self._last = progress.step, zero
        self._in_a_row: Tensor | int = zero
        self._skipped_steps: Tensor | int = zero + progress.skipped_steps

    @property
    def counts(self) -> tuple[Tensor | int, ...]:
        """Steps left out in a row and, twice, in all; the last one, from 1. The same on all ranks."""
        return self._in_a_row, self._skipped_steps, self._skipped_steps, self._last

    def check(self, loss_sum: Tensor) -> None:
        """Look at the gradients and the sum of the losses, before clipping, which would hide infinities."""
        parts = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._special or any(part.is_sparse for part in parts):
            parts = [local_part(part._values() if part.is_sparse else part) for part in parts]
            parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
        if self._has_halves:
            halves = [part for part in parts if part.dtype == torch.bfloat16 and part.numel()]
            norms = torch._foreach_norm(halves, math.inf) if halves else []
            parts = [*(part for part in parts if part.dtype != torch.bfloat16), *(n.float() for n in norms)]
        # Nothing is scaled: one kernel for all tells if there is a number that is not finite.
        torch._amp_foreach_non_finite_check_and_unscale_([*parts, loss_sum], self._found, self._one)
        if self._ranks.distributed:
            # Torch's kernels skip a step at exactly 1.
            sum_over_ranks(self._found, self._ranks).clamp_(max=1)

    def take(self) -> None:
        """Take the step, or leave it out."""
        self._step_number += 1
        if self.on_device:
            self._step()
            left_out = self.skipped = self._found > 0
        elif self._found.item():
            self.skipped, left_out = self._yes, 1
        else:
            self._step()
            self.skipped, self._in_a_row = None, 0
            return
        self._last = self._last + (self._step_number - self._last) * left_out
        self._in_a_row = (self._in_a_row + 1) * left_out
        self._skipped_steps = self._skipped_steps + left_out
        self._found.zero_()


class KeptBuffers:
    """Puts back the saved buffers of a model, such as BatchNorm's statistics, after a step that is left out.

    Those that are not saved with the model are constants, or are made anew.

    Cost: two copies of these buffers a step, in a few kernels.
    """

    def __init__(self, model: nn.Module) -> None:
        saved = model.state_dict(keep_vars=True)
        names = (name for name, buffer in model.named_buffers() if name in saved and buffer.numel())
        split = (name.rpartition(".") for name in names)
        self._places = [(model.get_submodule(owner), name) for owner, _, name in split]
        self._kept: dict[torch.dtype, Tensor] = {}

    def keep(self) -> None:
        """Copy the buffers, before a step."""
        if self._places:
            self._kept = _flat(self._buffers())

    @torch.no_grad()
    def put_back(self, skipped: Tensor) -> None:
        """Put the copies back if the step was `skipped`: 0-d, on the device."""
        buffers = self._buffers()
        for dtype, after in _flat(buffers).items():
            own = [buffer for buffer in buffers if buffer.dtype == dtype]
            parts = torch.where(skipped, self._kept[dtype], after).split([each.numel() for each in own])
            torch._foreach_copy_(own, [part.view_as(each) for part, each in zip(parts, own, strict=True)])

    def _buffers(self) -> list[Tensor]:
        return [getattr(module, name) for module, name in self._places]


def _flat(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """All elements in a row, by type: a copy."""
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return {kind: torch.cat([t.reshape(-1) for t in tensors if t.dtype == kind]) for kind in kinds}
