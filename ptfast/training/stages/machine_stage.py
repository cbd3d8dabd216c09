"""Set up the machine for a run: threads, kernels, precision, random seeds, and micro-batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ptfast.config.checks.rules import check_batch
from ptfast.core.errors import ConfigError, name_some
from ptfast.data.sampling.counter_draws import GOLDEN, finalize
from ptfast.techniques.backend.torch_settings import MOST_SHAPES, apply_backend, watch_shapes
from ptfast.techniques.parallel import rejected_alone
from ptfast.techniques.precision.mixed_precision import build_precision
from ptfast.training.stages.partial_run import PartialRun


def set_up_machine(run: PartialRun, *, trains: bool = True) -> None:
    """Set torch's process-wide switches, before anything runs on the device."""
    config, device, ranks, choices = run.config, run.device, run.ranks, run.choices
    elastic = config.determinism == "elastic"
    if trains and not elastic and choices.began_with("world_size", int) != ranks.world_size:
        # With another world size the bits differ anyway, and one rank's threads and workers are too many.
        for key in ("backend.threads", "dataloader.workers"):
            choices.previous.pop(key, None)
    choices.choose("device", device.type)
    choices.note("world_size", ranks.world_size)
    apply_backend(
        # A single evaluation does not repay cuDNN's search for kernels.
        config.backend if trains else config.backend.model_copy(update={"cudnn_benchmark": False}),
        device=device,
        # Assume as many ranks as possible: the number of threads changes the order of sums.
        local_world_size=config.micro_batches or 1 if elastic else ranks.local_world_size,
        choices=choices,
    )
    run.precision = build_precision(config.precision, device, choices)
    before = choices.began_with("micro_batches", int)
    choices.choose("micro_batches", before or config.micro_batches or config.gradients.accumulate)
    if config.backend.cudnn_benchmark == "auto" and choices.get("backend.cudnn_benchmark"):
        run.watch_batches = partial(watch_shapes, turn_off=partial(_stop_searching, run))


def _stop_searching(run: PartialRun) -> None:
    torch.backends.cudnn.benchmark = False
    reason = f"inputs have more than {MOST_SHAPES} shapes"
    run.choices.choose("backend.cudnn_benchmark", False, reason)
    run.display.note(f"{run.choices.made['backend.cudnn_benchmark']}, from step {run.progress.step} on")
    if run.ranks.is_first:
        run.choices.write(run.folder)


def choose_micro_batches(run: PartialRun) -> None:
    """Resolve the number of micro-batches; a resumed run keeps its number, on any number of ranks."""
    config, ranks, known = run.config, run.ranks, run.choices.began_with("micro_batches", int) or 0
    if known % ranks.world_size:
        what = f"the saved run has this many, which {ranks.world_size} ranks cannot share evenly"
        fitting = [str(number) for number in range(1, known + 1) if known % number == 0]
        hint = f"Resume it on {name_some(fitting)} ranks: only a new run may cut its batches differently"
        raise ConfigError("C010", what, key="micro_batches", value=known, suggestion=hint)
    run.choices.choose("micro_batches", check_batch(config, ranks.world_size, known))
    if not ranks.distributed and (problem := rejected_alone(config.parallel)) is not None:
        raise problem


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, to build a model. Takes about 0.1 ms."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.manual_seed(seed)


def build_seeder(device: torch.device) -> Callable[[int, int, int], None]:
    """Build the function of (seed, step, micro-batch) that reseeds dropout's generator on `device`.

    Cost: about 1.5 us on the CPU; `torch.manual_seed`, which visits every backend, takes 60 times as long.
    """
    seed_cpu, seed_device = torch.default_generator.manual_seed, None
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        seed_device = torch.cuda.default_generators[index].manual_seed
    elif device.type == "mps":
        seed_device = torch.mps._get_default_mps_generator().manual_seed

    def reseed(seed: int, step: int, micro_batch: int) -> None:
        mixed = mix(seed, step, micro_batch)
        seed_cpu(mixed)
        if seed_device is not None:
            seed_device(mixed)

    return reseed


def mix(seed: int, step: int, micro_batch: int) -> int:
    """Return 64 bits mixed from three counters by SplitMix64; torch's CPU generator reads the low half."""
    return finalize(seed * GOLDEN + step * 0xD1B5_4A32_D192_ED03 + micro_batch * 0x8CB9_2BA7_2F3D_8DD7)
