"""torch.compile, applied in place so that parameter names stay the plain model's."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from ptfast.errors import ConfigError


def apply_compile(model: nn.Module, mode: Literal["none", "model"], device: torch.device) -> nn.Module:
    """Compile `model`'s forward and backward; the first steps take longer, by seconds to a minute.

    Fewer, fused kernels read and write memory less often and are launched by less Python.

    Args:
        model: changed in place.
        mode: `none` leaves it alone, `model` compiles it as a whole.
        device: where the model runs.

    Returns:
        The same module.

    Raises:
        ConfigError: C012 where the tools that compile for `device` are missing.
    """
    if mode == "none":
        return model
    missing = _missing_tool(device)
    if missing:
        hint = "Install it, or use compile=none"
        raise ConfigError("C012", f"needs {missing}", key="compile", value=mode, suggestion=hint)
    model.compile()
    return model


def _missing_tool(device: torch.device) -> str | None:
    if device.type == "cuda" and find_spec("triton") is None:
        return "the package triton"
    compilers = [os.environ.get("CXX"), "c++", "g++", "clang++", "cl"]
    if device.type != "mps" and not any(shutil.which(name) for name in compilers if name):
        return "a C++ compiler"
    return None
