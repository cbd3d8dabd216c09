"""The number formats of weights, activations and products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Family, Section


class Precision(Section):
    """The number format of forward and backward."""

    mode: Literal["fp32", "tf32", "amp", "bf16", "amp_fp16", "bf16_true"] = "fp32"
    """`amp` chooses by device: native bfloat16, else float16 with a gradient scaler on CUDA, else float32."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matrix products, as in `torch.set_float32_matmul_precision`."""
    tf32_convolutions: bool = True
    """Let cuDNN round inputs of float32 convolutions to TF32, which is torch's default."""
    float8: bool = False
    """Multiply in float8 in linear layers, with torchao; needs bfloat16."""


def float8_under_bf16(precision: Precision) -> PtfastError | None:
    """Reject float8 products unless the mode computes in bfloat16."""
    if not precision.float8 or precision.mode in ("amp", "bf16", "bf16_true"):
        return None
    what = f"its products are bfloat16, but precision={precision.mode} computes in another format"
    return ConfigError("C011", what, key="precision.float8", value=True, suggestion="Use precision=bf16")


def formats_of_the_device(precision: Precision, device: str) -> Iterator[PtfastError]:
    """Reject number formats that the device does not support."""
    # fp32 and amp run anywhere, so there is no need to import torch.
    if precision.mode not in ("fp32", "amp"):
        lack = devices.check_precision(precision.mode, devices.usable_type(device))
        if problem := devices.cannot_run(lack, "precision", precision.mode):
            yield problem
    if precision.float8:
        lack = devices.check_float8(devices.usable_type(device))
        if problem := devices.cannot_run(lack, "precision.float8", True):
            yield problem


FAMILY = Family(rules=(float8_under_bf16,), machine_rules=(formats_of_the_device,))
