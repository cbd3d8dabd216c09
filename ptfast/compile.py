"""torch.compile, applied in place so that parameter names stay the plain model's."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Literal

from torch import nn

from ptfast.errors import ConfigError


def apply_compile(model: nn.Module, mode: Literal["none", "model"]) -> nn.Module:
    """Compile `model`'s forward and backward; the first steps take longer, by seconds to a minute.

    Fewer, fused kernels read and write memory less often and are launched by less Python.

    Args:
        model: on its device already; changed in place.
        mode: `none` leaves it alone, `model` compiles it as a whole.

    Returns:
        The same module.

    Raises:
        ConfigError: C012 where a tool that compiles for the model's device is missing.
    """
    if mode == "none":
        return model
    missing = _missing_tool({parameter.device.type for parameter in model.parameters()})
    if missing:
        hint = "Install it, or use compile=none"
        raise ConfigError("C012", f"needs {missing}", key="compile", value=mode, suggestion=hint)
    model.compile()
    return model


def _missing_tool(device_types: set[str]) -> str | None:
    if "cuda" in device_types and find_spec("triton") is None:
        return "the package triton"
    compilers = [os.environ.get("CXX"), "c++", "g++", "clang++", "cl"]
    if "mps" not in device_types and not any(shutil.which(name) for name in compilers if name):
        return "a C++ compiler"
    return None
