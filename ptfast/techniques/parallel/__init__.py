"""Train one model with several processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal

from ptfast.core.auto_choices import AutoChoices
from ptfast.core.distributed import world
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import Range
from ptfast.core.sections.section import Count, Family, OrAuto, Positive, Section, Unused, WallTime
from ptfast.techniques.debug import Debug
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.rewrites import Rewrites


class Parallel(Section):
    """The processes that train together."""

    strategy: Literal["single", "ddp", "fsdp"] = "single"
    """One process; several with averaged gradients; or several that also shard the weights."""
    nproc: Count | OrAuto = "auto"
    """Processes on this machine; `auto` for one per visible GPU."""
    nnodes: Count = 1
    """Number of machines that train together; the same command is started on each."""
    rdzv: str | None = None
    """HOST:PORT of the rendezvous: one of these machines, and a port that is free on it."""
    timeout: WallTime = Duration(600, "seconds")
    """How long ranks wait for each other before the run fails."""
    max_restarts: Annotated[int, Range(0, 2**31)] = 0
    """Maximum restarts without a new checkpoint, when ranks of one machine were killed or hang."""
    wrap_one_rank: bool = False
    """Use DDP or FSDP and its process group even for a single rank, to test that path on one device."""
    sync_batchnorm: bool = False
    """Compute BatchNorm's statistics over all ranks."""
    gradient_as_bucket_view: bool = True
    """ddp: keep gradients in the buffers that are sent, which saves a copy of them."""
    bucket_mb: Positive = 25.0
    """ddp: megabytes of gradients sent together."""
    unused_parameters: bool = False
    """ddp: check in every step for parameters that do not affect the loss."""
    compression: Literal["none", "bf16", "fp16"] = "none"
    """ddp: the number format in which gradients are sent."""
    blocks: list[str] | Literal["auto"] = "auto"
    """fsdp: parts gathered at a time, as patterns of names such as `layers.*`; `auto` for repeated blocks."""


def keys_of_the_strategy(parallel: Parallel) -> Iterator[PtfastError]:
    """Reject keys that belong to another strategy."""
    for name, off in {"compression": "none", "unused_parameters": False}.items():
        if parallel.strategy != "ddp" and (value := getattr(parallel, name)) != off:
            what = f"belongs to parallel=ddp, not {parallel.strategy}"
            hint = "Use parallel=ddp"
            yield ConfigError("C011", what, key=f"parallel.{name}", value=value, suggestion=hint)
    if parallel.strategy == "single":
        for name in ("nproc", "nnodes", "rdzv"):
            if (value := getattr(parallel, name)) not in (1, "auto", None):
                what, hint = "one process trains under parallel=single", "Use parallel=ddp"
                yield ConfigError("C011", what, key=f"parallel.{name}", value=value, suggestion=hint)


def readable_rendezvous(parallel: Parallel) -> PtfastError | None:
    """Reject a rendezvous that is not HOST:PORT."""
    if parallel.rdzv is None:
        return None
    host, _, port = parallel.rdzv.rpartition(":")
    if host and port.isdecimal() and int(port) < 2**16:
        return None
    hint = "Write parallel.rdzv=node1:29500"
    return ConfigError(
        "C005", "expected HOST:PORT", key="parallel.rdzv", value=parallel.rdzv, suggestion=hint
    )


def synced_over_ranks(parallel: Parallel) -> PtfastError | None:
    """Reject synced BatchNorm under `parallel=single`."""
    return rejected_alone(parallel) if parallel.strategy == "single" else None


def rejected_alone(parallel: Parallel) -> PtfastError | None:
    """Reject synced BatchNorm for a single process; checked again once `auto` is resolved."""
    if not parallel.sync_batchnorm:
        return None
    what = "one process has no other ranks to share statistics with"
    hint = "Use parallel=ddp" if parallel.strategy == "single" else "Set it to false"
    return ConfigError("C011", what, key="parallel.sync_batchnorm", value=True, suggestion=hint)


def whole_under_fsdp(
    parallel: Parallel, gradients: Gradients, debug: Debug, rewrites: Rewrites
) -> Iterator[PtfastError]:
    """Reject settings that need whole layers, which fsdp shards."""
    if parallel.strategy != "fsdp":
        return
    if gradients.clip_adaptive is not None:
        what = "needs whole units, but under parallel=fsdp each rank has only a part of each"
        value, hint = gradients.clip_adaptive, "Use gradients.clip_norm, or parallel=ddp"
        yield ConfigError("C011", what, key="gradients.clip_adaptive", value=value, suggestion=hint)
    if debug.mode == "gradcheck":
        what = "checks a copy of the model, which parallel=fsdp has sharded"
        yield ConfigError("C011", what, key="debug", value="gradcheck", suggestion="Use parallel=ddp")
    if rewrites.channels_last is True:
        what = "parallel=fsdp shards weights by rows, which must be contiguous"
        hint = "Use rewrites.channels_last=auto, which leaves them contiguous"
        yield ConfigError("C011", what, key="rewrites.channels_last", value=True, suggestion=hint)
    if rewrites.chunked_loss:
        what = "needs the last layer's weights, which parallel=fsdp gathers only for its forward pass"
        hint = "Use parallel=ddp"
        yield ConfigError("C011", what, key="rewrites.chunked_loss", value=True, suggestion=hint)


def the_same_on_any_ranks(
    determinism: str, parallel: Parallel, micro_batches: int | None
) -> Iterator[PtfastError]:
    """Reject settings that depend on the world size under `determinism=elastic`."""
    if determinism != "elastic":
        return
    if micro_batches is None:
        what, hint = "needs a fixed number of micro-batches, which ranks share", "Set e.g. micro_batches=4"
        yield ConfigError("C011", what, key="determinism", value="elastic", suggestion=hint)
    for key, off in {"strategy": "ddp", "sync_batchnorm": False, "compression": "none"}.items():
        value = getattr(parallel, key)
        if value not in (off, "single"):
            what = "depends on the world size, but determinism=elastic must not"
            hint = f"Use parallel.{key}={str(off).lower()}" if key != "strategy" else "Use parallel=ddp"
            yield ConfigError("C011", what, key=f"parallel.{key}", value=value, suggestion=hint)


def gpus_for_ranks(parallel: Parallel, device: str) -> PtfastError | None:
    """Reject more ranks than GPUs, if there are GPUs."""
    if parallel.strategy == "single" or parallel.nproc == "auto" or device not in ("auto", "cuda"):
        return None
    if world(meets=True) is not None:
        # Each rank may have been started with only its own GPU visible.
        return None
    import torch

    num_gpus = torch.cuda.device_count()
    if parallel.nproc <= num_gpus or num_gpus == 0:
        return None
    what = f"more ranks than GPUs: this machine has {num_gpus}"
    hint = f"Use at most parallel.nproc={num_gpus}"
    return ConfigError("C012", what, key="parallel.nproc", value=parallel.nproc, suggestion=hint)


def panel(parallel: Parallel, choices: AutoChoices) -> dict[str, object]:
    """Describe how the ranks train together; no row for one process."""
    if choices.get("world_size") == 1 and not parallel.wrap_one_rank:
        asked = parallel.strategy
        alone = f"one process: {asked} has no effect"
        return {"parallel": None if asked == "single" else alone}
    if parallel.strategy == "fsdp":
        num_parts = len(choices.get("shards")) + 1
        words = [f"fsdp, weights in {num_parts} part{'s' * (num_parts > 1)}"]
    else:
        words = [f"ddp, buckets of {parallel.bucket_mb:g} MB"]
        words += ["copied gradients"] * (not parallel.gradient_as_bucket_view)
        words += ["unused parameters"] * parallel.unused_parameters
        words += [f"{parallel.compression} gradients"] * (parallel.compression != "none")
    return {"parallel": ", ".join(words + ["synced BatchNorm"] * parallel.sync_batchnorm)}


_FREE = (
    *("strategy", "nproc", "nnodes", "rdzv", "timeout", "max_restarts", "blocks"),
    *("wrap_one_rank", "gradient_as_bucket_view", "bucket_mb", "unused_parameters"),
)

FAMILY = Family(
    rules=(
        keys_of_the_strategy,
        readable_rendezvous,
        synced_over_ranks,
        whole_under_fsdp,
        the_same_on_any_ranks,
    ),
    machine_rules=(gpus_for_ranks,),
    unused=(
        Unused.unless(
            "parallel.strategy", ("ddp",), "parallel.bucket_mb", "parallel.gradient_as_bucket_view"
        ),
        Unused.unless("parallel.strategy", ("fsdp",), "parallel.blocks"),
        Unused.unless(
            "parallel.strategy", ("ddp", "fsdp"), "parallel.wrap_one_rank", "parallel.max_restarts"
        ),
        Unused(
            ("parallel.rdzv",),
            lambda parallel: parallel.nnodes > 1 or bool(os.environ.get("PET_NNODES")),
            "to parallel.nnodes=1",
            "parallel.nnodes=2",
        ),
    ),
    free_keys=tuple(f"parallel.{name}" for name in _FREE),
    panel=panel,
)
