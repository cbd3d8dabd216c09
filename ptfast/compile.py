"""torch.compile, applied in place so that parameter names stay the plain model's."""

from __future__ import annotations

from typing import Literal

from torch import nn

from ptfast.devices import lack_of_compiler
from ptfast.errors import MachineError


def apply_compile(model: nn.Module, mode: Literal["none", "model"]) -> nn.Module:
    """Compile `model`'s forward and backward; the first steps take longer, by seconds to a minute.

    Fewer, fused kernels read and write memory less often and are launched by less Python.

    Args:
        model: on its device already; changed in place.
        mode: `none` leaves it alone, `model` compiles it as a whole.

    Returns:
        The same module.

    Raises:
        MachineError: E005 where a tool that compiles for the model's device is missing.
    """
    if mode == "none":
        return model
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    lack = lack_of_compiler(device)
    if lack is not None:
        raise MachineError("E005", lack.what, key="compile", value=mode, suggestion=lack.remedy)
    model.compile()
    return model
