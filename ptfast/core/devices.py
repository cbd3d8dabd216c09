"""Checks of this machine's devices and tools. Imports torch only in the checks that need it.

`Unsupported` is an error before training, or a warning if `runs`; `auto` selects the fastest supported value.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ptfast.core.errors import MachineError

if TYPE_CHECKING:
    import torch

CPU_INFO = Path(os.environ.get("PTFAST_CPUINFO", "/proc/cpuinfo"))
"""The file in which Linux describes the CPU; tests set the variable to emulate another machine."""
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16", "arm_bf16"}
"""Names of bfloat16 instructions in Linux and torch; the last two are Arm's."""
FP16_FLAGS = {"avx512_fp16", "amx_fp16", "asimdhp", "arm_fp16_arith"}
"""Names of float16 instructions."""
COMPILERS = ("g++", "clang++", "c++", "cl")


class Unsupported(NamedTuple):
    """A requirement of a switch, to run or to run fast, that this machine does not meet.

    Args:
        what: the missing requirement, as a clause that follows `key=value: `.
        remedy: a sentence without its full stop.
        runs: the switch still runs, but slower: a warning instead of an error.
    """

    what: str
    remedy: str
    runs: bool = False


def cannot_run(lack: Unsupported | None, key: str, value: Any) -> MachineError | None:
    """Return an E005 for `lack`, or None if nothing is missing or the run is only slower."""
    if lack is None or lack.runs:
        return None
    return MachineError("E005", lack.what, key=key, value=value, suggestion=lack.remedy)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over many batches: float64, or float32 on Apple GPUs, which lack float64."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64


def device_type(name: str) -> str:
    """Return the type of a device: `cpu`, `cuda` or `mps`; `auto` is a GPU if there is one."""
    if name != "auto":
        return name.partition(":")[0]
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def usable_type(name: str) -> str:
    """Return `device_type(name)`, or `cpu` if there is no such device (another check reports that)."""
    return device_type(name) if check_device(name) is None else "cpu"


def check_device(name: str) -> Unsupported | None:
    """Return the reason why `cuda` or `mps` is not available; None for other names."""
    if name not in ("cuda", "mps"):
        return None
    import torch

    if torch.cuda.device_count() if name == "cuda" else torch.backends.mps.is_available():
        return None
    return Unsupported(f"no {'CUDA device' if name == 'cuda' else 'Apple GPU'} is visible", "Use device=cpu")


def check_precision(mode: str, device: str) -> Unsupported | None:
    """Return the reason why a device lacks native support for a precision `mode`; None if it has it."""
    if mode == "tf32":
        return _check_gpu("TF32", device, (8, 0), "Use precision=fp32, or precision=amp")
    if mode in ("bf16", "bf16_true"):
        return _check_bf16(device)
    if mode == "amp_fp16" and device not in ("cuda", "cpu"):
        return Unsupported(
            f"gradient scaling runs on CUDA and on the CPU, not on {device}", "Use precision=amp"
        )
    if mode == "amp_fp16" and device == "cpu" and _cpu_flags().isdisjoint(FP16_FLAGS):
        return Unsupported("this CPU has no float16 instructions", "Use precision=amp", runs=True)
    return None


def check_compiler(device: str) -> Unsupported | None:
    """Return the reason why torch.compile cannot generate code for this device type."""
    words = os.environ.get("CXX", "").split()
    if device != "mps" and not any(shutil.which(name) for name in (*words[:1], *COMPILERS)):
        return Unsupported(
            "compiling needs a C++ compiler, and none is installed", "Install g++, or use compile=none"
        )
    if device == "cuda" and not find_spec("triton"):
        what = "compiling needs triton, which is not installed"
        return Unsupported(what, "Install triton, or use compile=none")
    return None


def check_float8(device: str) -> Unsupported | None:
    """Return the reason why this device type has no float8 matrix multiplication."""
    return _check_gpu("float8", device, (8, 9), "Use precision=bf16 alone", on_amd=True)


def multiplies_bf16(device: str) -> bool:
    """Return True if the device multiplies bfloat16 faster than float32."""
    if device == "cuda":
        import torch

        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "mps":
        import torch

        return torch.backends.mps.is_macos_or_newer(14, 0)
    flags = _cpu_flags()
    if "avx512_fp16" in flags and "GenuineIntel" in cpu_facts("vendor_id"):
        # Without AMX, which virtual machines may hide, bfloat16 runs on AVX-512 at half the speed of float32.
        return "amx_bf16" in flags
    # If the flags are unknown, use float32: choosing bfloat16 wrongly would cost more.
    return not flags.isdisjoint(BF16_FLAGS)


def cpu_facts(*names: str) -> list[str]:
    """Return the values of the first of `names` that Linux lists, one per processor; empty elsewhere."""
    try:
        lines = CPU_INFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    facts = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
    return next(
        filter(None, ([value for key, value in facts if key == name and value] for name in names)), []
    )


def _check_gpu(
    what: str, device: str, capability: tuple[int, int], hint: str, *, on_amd: bool = False
) -> Unsupported | None:
    """Return the reason why a device lacks a format that needs this compute capability of NVIDIA's GPUs."""
    if device != "cuda":
        return Unsupported(f"{what} needs an NVIDIA GPU, and this is {device}", hint)
    import torch

    if torch.version.hip is not None:
        return None if on_amd else Unsupported(f"{what} needs an NVIDIA GPU, and this one is AMD's", hint)
    if torch.cuda.get_device_capability() < capability:
        came = f"has no {what}, which came with capability {'.'.join(map(str, capability))}"
        return Unsupported(f"{torch.cuda.get_device_name()} {came}", hint)
    return None


def _check_bf16(device: str) -> Unsupported | None:
    if multiplies_bf16(device):
        return None
    if device == "mps":
        return Unsupported("bf16 needs macOS 14 on an Apple GPU", "Use precision=fp32")
    if device == "cpu":
        return Unsupported(
            "bf16 is no faster on this CPU", "Use precision=amp, which is fp32 here", runs=True
        )
    import torch

    name, hint = torch.cuda.get_device_name(), "Use precision=amp, which is fp16 here"
    return Unsupported(
        f"{name} has no bf16", hint, runs=torch.cuda.is_bf16_supported(including_emulation=True)
    )


def _cpu_flags() -> set[str]:
    """Return the CPU's flags as Linux names them, or as torch does on other systems."""
    if flags := cpu_facts("flags", "Features"):
        return set(flags[0].split())
    import torch

    # Needs torch 2.10 or newer.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return {name for name, has in capabilities.items() if has is True}
