"""Mixed precision: which autocast and which gradient scaler a run uses on its device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from ptfast.errors import ConfigError

Mode = Literal["fp32", "amp", "bf16", "amp_fp16"]


@dataclass(frozen=True)
class Precision:
    """What a run computes in.

    Enter `autocast()` around one micro-batch's forward pass and loss, and leave it before backward. Weights
    that autocast has converted are cached only until it is left, so they never go stale after an optimizer
    step.
    """

    enabled: bool
    """Whether there is an autocast to enter at all."""
    scaler: torch.amp.GradScaler | None
    """Scales the loss so that fp16 gradients do not underflow; None where the type needs none."""
    context: AbstractContextManager[object]
    note: str

    def autocast(self) -> AbstractContextManager[object]:
        """The one autocast context of the run: made once, entered again and again, never inside itself."""
        return self.context

    def describe(self) -> str:
        """One line for the panel, e.g. `bf16 autocast`."""
        return self.note


def build_precision(mode: Mode, device: torch.device) -> Precision:
    """Resolve a precision option on `device`.

    Half-width types halve memory traffic and run on matrix units: 1.5 to 3 times the speed on a GPU that has
    them, 2 times on a CPU with native bf16.

    Args:
        mode: `fp32`; `bf16` autocast; `amp_fp16`, fp16 autocast with a gradient scaler; or `amp`: `amp_fp16`
            on CUDA and `bf16` elsewhere, where fp16 is slow or its scaler is missing.
        device: where the model is.

    Raises:
        ConfigError: C012 where the device cannot run `mode`.
    """
    if mode == "fp32":
        return Precision(False, None, nullcontext(), "fp32")
    if mode == "amp_fp16" and device.type != "cuda":
        hint = "Use precision=bf16, or precision=amp to have it chosen"
        what = f"needs a CUDA device, not {device.type}"
        raise ConfigError("C012", what, key="precision", value=mode, suggestion=hint)
    if mode == "amp_fp16" or (mode == "amp" and device.type == "cuda"):
        context = torch.autocast(device.type, dtype=torch.float16)
        scaler = torch.amp.GradScaler(device.type)
        return Precision(True, scaler, context, "fp16 autocast with gradient scaling")
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        what = f"{torch.cuda.get_device_name(device)} has no bf16"
        raise ConfigError("C012", what, key="precision", value=mode, suggestion="Use precision=amp")
    context = torch.autocast(device.type, dtype=torch.bfloat16)
    note = "bf16 autocast" if mode == "bf16" else f"bf16 autocast (amp on {device.type})"
    return Precision(True, None, context, note)
