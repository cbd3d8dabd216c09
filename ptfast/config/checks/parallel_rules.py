"""What contradicts itself in how processes train together."""

from __future__ import annotations

from collections.abc import Iterator

from ptfast.config.schema import Config
from ptfast.core.sections.problem import Problem
from ptfast.optim import ParameterGroup

_OF_DDP = {"compression": "none", "static_graph": False, "unused_parameters": False}
"""Keys that only `ddp` follows, with what they are when off."""
_WHOLE_LAYERS = ("lars.Lars", "lamb.Lamb", "nvlamb.Nvlamb", "novograd.Novograd", "muon.Muon")
"""Our optimizers that look at a whole layer, of which a rank under fsdp has a part."""
_WHOLE_MODEL = ("pointwise", "model", "reduce_overhead", "max_autotune")
"""What `compile` takes as one piece."""


def parallel_problems(config: Config) -> Iterator[Problem]:
    """C011 for each switch of `parallel` that its strategy, or another switch, rules out."""
    parallel = config.parallel
    if parallel.strategy != "ddp":
        for name, off in _OF_DDP.items():
            if (value := getattr(parallel, name)) != off:
                what, hint = f"belongs to parallel=ddp, not {parallel.strategy}", "Use parallel=ddp"
                yield Problem("C011", what, key=f"parallel.{name}", value=value, suggestion=hint)
    if parallel.strategy == "single" and parallel.sync_batchnorm:
        yield _without_ranks("Use parallel=ddp")
    if parallel.strategy == "single":
        for name in ("nproc", "nnodes"):
            if (value := getattr(parallel, name)) not in (1, "auto"):
                what = "one process trains under parallel=single"
                yield Problem(
                    "C011", what, key=f"parallel.{name}", value=value, suggestion="Use parallel=ddp"
                )
    if parallel.static_graph:
        yield from _static_graph(config)
    if parallel.compression == "powersgd" and config.precision.mode == "amp_fp16":
        yield _powersgd_scaled()
    switching = any(_trains_in_part(group) for group in config.optimizer.groups)
    if switching and parallel.compression == "powersgd":
        what = "remembers what it has not sent, by buckets that change with what is frozen"
        hint = "Use parallel.compression=bf16, or freeze throughout with trains_until: 0"
        yield Problem("C011", what, key="parallel.compression", value="powersgd", suggestion=hint)
    if parallel.strategy == "fsdp":
        yield from _fsdp(config, switching)


def check_ranks(config: Config, num_ranks: int, micro_batches: int, *, scales: bool) -> None:
    """Refuse what the ranks, the parts of a batch and the precision rule out that `auto` became.

    Args:
        scales: whether fp16 gradients are scaled, so that they may overflow.

    Raises:
        ConfigError: C011.
    """
    parallel = config.parallel
    if parallel.sync_batchnorm and num_ranks == 1:
        raise _without_ranks("Set it to false").error(None)
    if parallel.static_graph and micro_batches > num_ranks:
        raise _static_graph_accumulating().error(None)
    if parallel.compression == "powersgd" and scales:
        raise _powersgd_scaled().error(None)


def _without_ranks(suggestion: str) -> Problem:
    what = "there are no ranks to take statistics over"
    return Problem("C011", what, key="parallel.sync_batchnorm", value=True, suggestion=suggestion)


def _powersgd_scaled() -> Problem:
    what = "remembers what it has lost, which an fp16 gradient that overflows would make infinite for good"
    hint = "Use precision=bf16, or parallel.compression=fp16"
    return Problem("C011", what, key="parallel.compression", value="powersgd", suggestion=hint)


def _static_graph_accumulating() -> Problem:
    what = "DDP records its graph in a step of one backward pass"
    hint = "Use gradients.accumulate=1, one micro-batch a rank"
    return Problem("C011", what, key="parallel.static_graph", value=True, suggestion=hint)


def _trains_in_part(group: ParameterGroup) -> bool:
    """Whether what the entry is about trains in a part of the run only."""
    begins, ends = group.trains_from, group.trains_until
    return bool(begins is not None and begins.value) or bool(ends is not None and ends.value)


def _static_graph(config: Config) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.unused_parameters:
        what = "contradicts parallel.static_graph=true, which learns them in the first step"
        hint = "Set one of the two to false"
        yield Problem("C011", what, key="parallel.unused_parameters", value=True, suggestion=hint)
    ranks = None if parallel.nproc == "auto" else parallel.nproc * parallel.nnodes
    if config.gradients.accumulate > 1 or (ranks and config.micro_batches and config.micro_batches > ranks):
        yield _static_graph_accumulating()


def _fsdp(config: Config, switching: bool) -> Iterator[Problem]:
    path = config.optimizer.target.path
    if path.startswith("ptfast.optim.") and path.endswith(_WHOLE_LAYERS):
        what = "goes by whole layers, of which each rank has a part under parallel=fsdp"
        hint = "Use parallel=ddp, or an optimizer that goes by elements, such as optimizer=adamw"
        yield Problem("C011", what, key="optimizer", value=path, suggestion=hint)
    if path == "torch.optim.Adafactor":
        what = "torch has no Adafactor for weights that are shared out, as under parallel=fsdp"
        yield Problem("C011", what, key="optimizer", value=path, suggestion="Use optimizer=adamw")
    if config.gradients.clip_adaptive is not None:
        what = "goes by whole units, of which each rank has a part under parallel=fsdp"
        value, hint = config.gradients.clip_adaptive, "Use gradients.clip_norm, or parallel=ddp"
        yield Problem("C011", what, key="gradients.clip_adaptive", value=value, suggestion=hint)
    if switching:
        what = "parallel=fsdp shares weights out once, as they train at the start"
        hint = "Freeze throughout with trains_until: 0, or use parallel=ddp"
        yield Problem("C011", what, key="optimizer.groups", suggestion=hint)
    if config.debug.mode == "gradcheck":
        what = "checks a copy of the model, which parallel=fsdp has shared out"
        yield Problem("C011", what, key="debug", value="gradcheck", suggestion="Use parallel=ddp")
    if config.rewrites.channels_last is True:
        what = "parallel=fsdp shares out weights by rows, which have to lie one after another"
        hint = "Use rewrites.channels_last=auto, which leaves them so"
        yield Problem("C011", what, key="rewrites.channels_last", value=True, suggestion=hint)
    if config.compile.mode in _WHOLE_MODEL:
        what = "parallel=fsdp gathers weights between blocks, where a whole model cannot be compiled"
        yield Problem("C011", what, key="compile", value=config.compile.mode, suggestion="Use compile=blocks")
