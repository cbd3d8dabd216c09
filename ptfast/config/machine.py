"""What this machine cannot run: ranks without a GPU each, float16, compiling without a compiler."""

from __future__ import annotations

import os
import shutil
import sys

from ptfast.config.problem import Problem
from ptfast.config.schema import Config

_COMPILERS = ("g++", "clang++", "c++")


def machine_problems(config: Config) -> list[Problem]:
    """C012 for each thing in `config` that cannot run here. Imports torch only where it is needed to tell."""
    problems = [_too_many_ranks(config), _no_fp16(config), _no_compiler(config)]
    return [problem for problem in problems if problem is not None]


def _too_many_ranks(config: Config) -> Problem | None:
    parallel = config.parallel
    if parallel.strategy == "single" or parallel.nproc == "auto" or config.device not in ("auto", "cuda"):
        return None
    import torch

    num_gpus = torch.cuda.device_count()
    if parallel.nproc <= num_gpus or (config.device == "auto" and num_gpus == 0):
        return None
    what = f"more ranks than GPUs, this machine has {num_gpus}"
    hint = f"Use at most parallel.nproc={num_gpus}" if num_gpus else "Use device=cpu"
    return Problem("C012", what, key="parallel.nproc", value=parallel.nproc, suggestion=hint)


def _no_fp16(config: Config) -> Problem | None:
    if config.precision.mode != "amp_fp16":
        return None
    device = _device_type(config.device)
    reason = why_no_fp16(device)
    if reason is None:
        return None
    hint = "Use precision=amp, which is bf16 on the CPU" if device == "cpu" else "Use precision=fp32"
    what = f"float16 autocast does not run on {device} here ({reason})"
    return Problem("C012", what, key="precision", value="amp_fp16", suggestion=hint)


def why_no_fp16(device_type: str) -> str | None:
    """The reason why a small convolution and linear layer do not train in float16 here, or None."""
    import torch
    from torch import nn

    try:
        with torch.random.fork_rng(devices=[]):
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)).to(device_type)
            images_nchw = torch.ones(2, 3, 8, 8, device=device_type)
        with torch.autocast(device_type, dtype=torch.float16):
            output = model(images_nchw)
        if output.dtype is not torch.float16:
            return f"it computes in {str(output.dtype).removeprefix('torch.')}"
        output.float().sum().backward()
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None if finite else "its gradients are not finite"


def _no_compiler(config: Config) -> Problem | None:
    if config.compile.mode == "none":
        return None
    cxx = os.environ.get("CXX")
    candidates = (*([cxx.split()[0]] if cxx and cxx.strip() else []), *_COMPILERS)
    if not any(shutil.which(candidate) for candidate in candidates):
        missing, package = "a C++ compiler, and none is installed", "g++"
    elif _device_type(config.device) == "cuda" and not _has_triton():
        missing, package = "triton, which is not installed", "triton"
    else:
        return None
    return Problem(
        "C012",
        f"compiling needs {missing}",
        key="compile",
        value=config.compile.mode,
        suggestion=f"Install {package}, or use compile=none",
    )


def _has_triton() -> bool:
    import importlib.util

    return "triton" in sys.modules or importlib.util.find_spec("triton") is not None


def _device_type(device: str) -> str:
    if device != "auto":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
