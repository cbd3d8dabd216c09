"""`ptfast train --dry-run --ranks N --device NAME`: what a run would cost on ranks that are not here."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ptfast.config.checks.rules import check_batch
from ptfast.config.schema import Config
from ptfast.core.batch_plan import BatchPlan, constant
from ptfast.core.distributed import Ranks
from ptfast.core.errors import COMMAND_LINE, EXIT_OK, ConfigError, MachineError, name_of
from ptfast.core.protocols import takes_own_steps
from ptfast.core.run import Run
from ptfast.core.tensors.torch_internals import BatchNorm
from ptfast.core.units import duration, num_bytes, short_time
from ptfast.data.loaders import Dataloader
from ptfast.profiling.limits import scaling
from ptfast.profiling.limits.accelerators import Accelerator, find_accelerator
from ptfast.profiling.limits.fake_step import StepCosts, count_step, optimizer_state
from ptfast.profiling.limits.operators import total_flops
from ptfast.profiling.limits.roofline import flop
from ptfast.report.terminal.display import build_display, table
from ptfast.techniques.compile import Compile
from ptfast.techniques.curriculum import Curriculum
from ptfast.techniques.debug import Debug
from ptfast.techniques.parallel import Parallel
from ptfast.techniques.precision import Precision
from ptfast.techniques.repeated_blocks import find_blocks
from ptfast.training.build import build
from ptfast.training.course import check_last_batch, count_steps
from ptfast.training.user_code import naming_user_code

RANKS_OF_A_MACHINE = 8
"""Where `parallel.nproc` does not say it."""
HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TAKES_LESS = "Try gradients.accumulate=2, checkpointing=full or parallel=fsdp"


@dataclass(frozen=True)
class Prediction:
    """A step of a run on many ranks."""

    run: Run
    """The part of one rank, which trains nothing any more."""
    scale: scaling.Scale
    device: Accelerator
    link_bytes_per_s: float
    costs: StepCosts
    held: Mapping[str, int]
    """Bytes that a rank holds, by what they are of."""
    sent: list[scaling.Exchange]
    time: scaling.StepTime
    total_steps: int
    number_format: str
    """Of most products."""


def predict(
    config: Config, num_ranks: int, device_name: str, network_bytes_per_s: float | None = None
) -> Prediction:
    """Predict a step of `config` on so many ranks.

    One rank's part of the run is built on this machine's CPU, where its weights take memory. What follows
    goes by shapes, and by what the device's vendor promises.

    Args:
        num_ranks: 1 or more; a machine has `parallel.nproc` of them, or `RANKS_OF_A_MACHINE`.
        device_name: one that `find_accelerator` knows.
        network_bytes_per_s: of a machine to the others, each way; None for what the vendor says.

    Raises:
        PtfastError: an unknown device, a number format that it lacks, a batch that the ranks cannot share, or
            whatever would stop the real run in being built.
    """
    parallel = config.parallel
    if parallel.strategy == "single":
        parallel = parallel.model_copy(update={"strategy": "ddp", "nproc": "auto"})
    num_local_ranks = min(num_ranks, RANKS_OF_A_MACHINE if parallel.nproc == "auto" else parallel.nproc)
    device = find_accelerator(device_name, num_local_ranks)
    number_format = _number_format(config, device)
    half_type = None if config.precision.mode == "bf16_true" else HALF_TYPES.get(number_format)
    with tempfile.TemporaryDirectory(prefix="ptfast-") as folder:
        own = _share_of_one(config, num_ranks)
        run = build(own, ranks=Ranks(), folder=Path(folder), display=build_display())
        try:
            if takes_own_steps(run.task):
                what = f"{name_of(run.task)} takes its steps itself, which ranks cannot share"
                raise ConfigError("C011", what, key="--ranks", value=num_ranks, place=COMMAND_LINE)
            micro_batches = next(run.train_loader.steps(0, 1)).micro_batches
            blocks = tuple(find_blocks(run.model, parallel.blocks, key="parallel.blocks").values())
            passes, data = len(micro_batches), micro_batches[0].data
            # As `Sharded` has it: beside BatchNorm, weights are gathered in float32.
            has_norms = any(isinstance(module, BatchNorm) for module in run.model.modules())
            gathered_type = None if has_norms else half_type
            scale = scaling.Scale(num_ranks, num_local_ranks, parallel, passes, gathered_type, blocks)
            gathers = scale.sharded and not has_norms
            with naming_user_code(run):
                costs = count_step(run.model, run.task.loss, data, half_type, gathers=gathers)
        finally:
            run.close()
    average = run.ema.state_dict()["averages"].values() if run.ema is not None else ()
    held = scaling.memory_of_rank(run.model, optimizer_state(run.optimizer), average, costs, scale)
    plan = BatchPlan(run.info.num_train, constant(config.batch_size), config.dataloader.last)
    check_last_batch(plan, run.model, num_ranks * scale.passes)
    total_steps = count_steps(plan, config.epochs, config.steps)
    sent, link = scaling.exchanges(run.model, scale), scaling.link_of(device, scale, network_bytes_per_s)
    time = scaling.step_time(costs, held, sent, scale, device, link, rounds=number_format == "tf32")
    return Prediction(run, scale, device, link, costs, held, sent, time, total_steps, number_format)


def show(config: Config, prediction: Prediction) -> int:
    """Print a prediction, and what it assumes."""
    run, scale, device, time = prediction.run, prediction.scale, prediction.device, prediction.time
    num_ranks, local, passes = scale.num_ranks, scale.num_local_ranks, scale.passes
    total_steps = prediction.total_steps
    needed, flops = sum(prediction.held.values()), passes * total_flops(prediction.costs.operators)
    sent = {f"{each.what} by {each.kind}": each.sent_bytes(num_ranks) for each in prediction.sent}
    fits = "" if needed <= device.memory_bytes else f": it does not fit. {TAKES_LESS}"
    waits = f", {short_time(time.waited_s)} of it waiting for other ranks" if sent else ""
    share = config.batch_size // num_ranks // passes
    machines = "1 machine" if num_ranks <= local else f"{-(-num_ranks // local):,} machines"
    rows = [
        ("ranks", f"{num_ranks:,} on {machines} of {local} {device.name}, {scale.strategy}"),
        ("batch", f"{config.batch_size:,}: {num_ranks:,} x {passes} micro-batches of {share} samples"),
        ("parameters", f"{sum(p.numel() for p in run.model.parameters()):,}"),
        ("memory", f"{num_bytes(needed)} on each rank, of {num_bytes(device.memory_bytes)}{fits}"),
        ("", _listed(prediction.held)),
        ("sent", f"{num_bytes(sum(sent.values()))} by each rank in a step" if sent else ""),
        ("", _listed(sent)),
        ("operations", f"{flop(flops)} of each rank in a step" if flops else "not counted"),
        ("step", f"{short_time(time.step_s)}{waits}"),
        ("efficiency", f"{time.efficiency:.0%} of ranks that never wait" if sent else ""),
        ("throughput", f"{config.batch_size / time.step_s:,.0f} samples/s"),
        ("whole run", f"{duration(time.step_s * total_steps)} for {total_steps:,} steps"),
    ]
    table(["predicted", run.data_note], [row for row in rows if row[1]])
    print()
    table(["assumed", device.source], _assumptions(prediction))
    return EXIT_OK


def _listed(sizes: Mapping[str, float]) -> str:
    """Sizes by name, the largest first."""
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {num_bytes(size)}" for name, size in largest)


def _assumptions(prediction: Prediction) -> list[tuple[str, str]]:
    device, scale = prediction.device, prediction.scale
    name = prediction.number_format
    beside = "gradients beside the last backward pass, all but a bucket"
    if scale.sharded:
        beside = "the exchange of a block beside the computing of others"
    step = "as it was taken here" if prediction.costs.is_real else "from shapes, as a CPU computes it"
    rows = [
        ("step", f"{step}, not compiled; batches like the first, at their full size"),
        ("products", f"{scaling.PRODUCTS:.0%} of {flop(device.peak(name))}/s in {name}"),
        ("memory", f"{scaling.MEMORY:.0%} of {device.bytes_per_s / 1e9:,.0f} GB/s, each operator by itself"),
        ("calls", f"{short_time(device.call_s)} for an operator at least"),
    ]
    if prediction.sent:
        rows += [
            (
                "links",
                f"{scaling.LINKS:.0%} of {prediction.link_bytes_per_s / 1e9:,.3g} GB/s each way, no latency",
            ),
            ("all-reduce", "a ring: 2 (n - 1) / n of the bytes; all-gather and reduce-scatter half of that"),
            ("overlap", beside if device.overlaps else "none: the cores that compute send"),
        ]
    return [*rows, ("left out", "the driver's memory and NCCL's, loading, evaluation, ranks that are late")]


def _share_of_one(config: Config, num_ranks: int) -> Config:
    """The run of one of the ranks by itself, plain but for what shapes depend on."""
    first, accumulate = config.curriculum.batch_size_from, config.gradients.accumulate
    micro_batches = check_batch(config.batch_size, config.micro_batches, num_ranks, accumulate, first)
    plain: dict[str, Any] = {
        "device": "cpu",
        "batch_size": config.batch_size // num_ranks,
        "micro_batches": micro_batches // num_ranks,
        "precision": Precision(mode="bf16_true" if config.precision.mode == "bf16_true" else "fp32"),
        "parallel": Parallel(),
        "compile": Compile(),
        "dataloader": Dataloader(kind="plain", last="drop"),
        "curriculum": Curriculum(),
        "debug": Debug(),
        "model": config.model.model_copy(update={"weights": None}),
    }
    return config.model_copy(update=plain)


def _number_format(config: Config, device: Accelerator) -> str:
    """The number format that most products are in on a device.

    Raises:
        MachineError: E005 for one that it lacks.
    """
    mode, known = config.precision.mode, device.flops_per_s
    if mode == "amp":
        return next((name for name in HALF_TYPES if name in known), "fp32")
    name = {"bf16_true": "bf16", "amp_fp16": "fp16"}.get(mode, mode)
    if name not in known:
        what, hint = f"no products in {name} on {device.name}", "Use precision=amp, which takes what there is"
        raise MachineError("E005", what, key="precision", value=mode, suggestion=hint)
    rounds = name == "fp32" and config.precision.matmul_precision in ("high", "medium")
    return "tf32" if rounds and "tf32" in known else name
