"""What this machine cannot run: devices, number formats, compiling, and more ranks than it has GPUs."""

from __future__ import annotations

from ptfast.config.schema import Config
from ptfast.core import devices
from ptfast.core.sections.problem import Problem


def machine_problems(config: Config) -> list[Problem]:
    """What in `config` cannot run here, each an E005, or C012 for ranks that go beyond the GPUs.

    Imports torch only where it is needed to tell.
    """
    problems = [_no_device(config), _too_many_ranks(config), _no_precision(config), _no_compiler(config)]
    problems += [_no_nvtx(config), _nothing_to_pin_for(config), _no_thread(config), _no_nvjpeg(config)]
    return [problem for problem in problems if problem is not None]


def _no_device(config: Config) -> Problem | None:
    return _problem(devices.lack_of_device(config.device), "device", config.device)


def _too_many_ranks(config: Config) -> Problem | None:
    parallel = config.parallel
    if parallel.strategy == "single" or parallel.nproc == "auto" or config.device not in ("auto", "cuda"):
        return None
    import torch

    num_gpus = torch.cuda.device_count()
    if parallel.nproc <= num_gpus or num_gpus == 0:
        return None
    what = f"more ranks than GPUs, this machine has {num_gpus}"
    hint = f"Use at most parallel.nproc={num_gpus}"
    return Problem("C012", what, key="parallel.nproc", value=parallel.nproc, suggestion=hint)


def _no_precision(config: Config) -> Problem | None:
    mode = config.precision.mode
    if mode in ("fp32", "amp"):
        # They run anywhere: torch need not be imported to tell.
        return None
    return _problem(devices.lack_of_precision(mode, _device_of(config)), "precision", mode)


def _no_compiler(config: Config) -> Problem | None:
    mode = config.compile.mode
    if mode == "none":
        return None
    device = _device_of(config)
    lack = devices.lack_of_compiler(device)
    if lack is None and mode == "reduce_overhead":
        lack = devices.lack_of_cuda_graphs(device)
    return _problem(lack, "compile", mode)


def _no_nvtx(config: Config) -> Problem | None:
    if config.debug.mode != "nvtx" or _device_of(config) == "cuda":
        return None
    what, hint = "marks are for a CUDA device, and none is used", "Use debug=profiler"
    return Problem("E005", what, key="debug", value="nvtx", suggestion=hint)


def _nothing_to_pin_for(config: Config) -> Problem | None:
    if config.dataloader.pin is not True or _device_of(config) == "cuda":
        return None
    what, hint = "memory is pinned for copies to a CUDA device, and none is used", "Use dataloader.pin=auto"
    return Problem("E005", what, key="dataloader.pin", value=True, suggestion=hint)


def _no_nvjpeg(config: Config) -> Problem | None:
    if config.data.target.kwargs.get("decoder") != "nvjpeg" or _device_of(config) == "cuda":
        return None
    what, hint = "nvJPEG decodes on a CUDA device, and none is used", "Use data.decoder=cpu"
    return Problem("E005", what, key="data.decoder", value="nvjpeg", suggestion=hint)


def _no_thread(config: Config) -> Problem | None:
    if not config.dataloader.read_ahead or _device_of(config) == "cpu":
        return None
    what, hint = "a thread reads ahead for a CPU", "Use dataloader.side_stream=true, which does it for a GPU"
    return Problem("C011", what, key="dataloader.read_ahead", value="true", suggestion=hint)


def _device_of(config: Config) -> str:
    # What is not there has been said already, and torch would only fail on being asked more about it.
    there = devices.lack_of_device(config.device) is None
    return devices.device_type(config.device) if there else "cpu"


def _problem(lack: devices.Lack | None, key: str, value: str) -> Problem | None:
    if lack is None or lack.runs:
        return None
    return Problem("E005", lack.what, key=key, value=value, suggestion=lack.remedy)
