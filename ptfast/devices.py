"""What the device and the tools of this machine can do. Asks torch, which is imported only for that."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

CPU_INFO = Path("/proc/cpuinfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"}
"""What Linux calls such instructions, the last on Arm."""
COMPILERS = ("g++", "clang++", "c++", "cl")


class Lack(NamedTuple):
    """Something that cannot run here."""

    what: str
    """What is missing, as a clause that goes on from `key=value: `."""
    remedy: str
    """What to do about it, as a sentence without its full stop."""


def sum_dtype(device: torch.device) -> torch.dtype:
    """What sums over many batches are kept in: float64, except on Apple's GPUs, which do not have it."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def device_type(name: str) -> str:
    """`cpu`, `cuda` or `mps`: what a device of that name is, `auto` being a GPU where there is one."""
    if name != "auto":
        return name.partition(":")[0]
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def lack_of_device(name: str) -> Lack | None:
    """Why there is no device `name` (`cuda`, `mps`; any other is there)."""
    if name not in ("cuda", "mps"):
        return None
    import torch

    if torch.cuda.device_count() if name == "cuda" else torch.backends.mps.is_available():
        return None
    return Lack(f"no {'CUDA device' if name == 'cuda' else 'Apple GPU'} is visible", "Use device=cpu")


def lack_of_precision(mode: str, device: str) -> Lack | None:
    """Why a device of that type cannot compute in a precision's `mode`."""
    if mode == "tf32":
        return _lack_of_tf32(device)
    if mode in ("bf16", "bf16_true"):
        return _lack_of_bf16(device)
    if mode == "amp_fp16" and device not in ("cuda", "cpu"):
        return Lack(f"gradient scaling runs on CUDA and on the CPU, not on {device}", "Use precision=amp")
    return None


def lack_of_compiler(device: str) -> Lack | None:
    """Why torch.compile cannot make code for a device of that type."""
    words = os.environ.get("CXX", "").split()
    if device != "mps" and not any(shutil.which(name) for name in (*words[:1], *COMPILERS)):
        return Lack(
            "compiling needs a C++ compiler, and none is installed", "Install g++, or use compile=none"
        )
    if device == "cuda" and not _has_triton():
        what = "compiling needs triton, which is not installed"
        return Lack(what, "Install triton, or use compile=none")
    return None


def lack_of_cuda_graphs(device: str) -> Lack | None:
    """Why steps cannot be recorded in CUDA graphs on a device of that type."""
    if device == "cuda":
        return None
    return Lack(f"CUDA graphs need a CUDA device, and this is {device}", "Use compile=model")


def multiplies_bf16(device: str) -> bool:
    """Whether a device has instructions for bfloat16, without which it is no faster than float32."""
    if device == "cuda":
        import torch

        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "mps":
        import torch

        return torch.backends.mps.is_macos_or_newer(14, 0)
    flags = _cpu_flags()
    return not flags or not flags.isdisjoint(BF16_FLAGS)


def _lack_of_tf32(device: str) -> Lack | None:
    hint = "Use precision=fp32, or precision=amp"
    if device != "cuda":
        return Lack(f"TF32 needs an NVIDIA GPU, and this is {device}", hint)
    import torch

    if torch.version.hip is not None:
        return Lack("TF32 needs an NVIDIA GPU, and this one is AMD's", hint)
    if torch.cuda.get_device_capability() < (8, 0):
        return Lack(f"{torch.cuda.get_device_name()} has no TF32, which came with capability 8.0", hint)
    return None


def _lack_of_bf16(device: str) -> Lack | None:
    if multiplies_bf16(device):
        return None
    if device == "mps":
        return Lack("bf16 needs macOS 14 on an Apple GPU", "Use precision=fp32")
    import torch

    return Lack(f"{torch.cuda.get_device_name()} has no bf16", "Use precision=amp")


def _cpu_flags() -> set[str]:
    """What the CPU can do, in Linux's words; empty where it does not say."""
    try:
        lines = CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    found = (line.partition(":")[2] for line in lines if line.startswith(("flags", "Features")))
    return set(next(found, "").split())


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None
