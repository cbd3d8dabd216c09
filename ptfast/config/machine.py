"""What this machine cannot run: a device, ranks without a GPU each, float16, compiling without a compiler."""

from __future__ import annotations

import os
import shutil
import sys

from ptfast.config.problem import Problem
from ptfast.config.schema import Config

_COMPILERS = ("g++", "clang++", "c++")


def machine_problems(config: Config) -> list[Problem]:
    """C012 for each thing in `config` that cannot run here. Imports torch only where it is needed to tell."""
    problems = [_too_many_ranks(config), _no_device(config), _no_fp16(config), _no_compiler(config)]
    return [problem for problem in problems if problem is not None]


def _no_device(config: Config) -> Problem | None:
    if config.device not in ("cuda", "mps"):
        return None
    import torch

    if torch.cuda.device_count() if config.device == "cuda" else torch.backends.mps.is_available():
        return None
    kind = "CUDA device" if config.device == "cuda" else "Apple GPU"
    return Problem(
        "C012", f"no {kind} is visible", key="device", value=config.device, suggestion="Use device=cpu"
    )


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
    if device == "cuda":
        return None
    what, hint = f"needs a CUDA device, not {device}", "Use precision=amp, which is bf16 there"
    return Problem("C012", what, key="precision", value="amp_fp16", suggestion=hint)


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
