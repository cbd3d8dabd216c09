"""From a plain model to the form that trains: rewritten, placed, checkpointed, compiled, wrapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks, on_first_rank
from ptfast.core.protocols import DataInfo, Task
from ptfast.core.saved_state import State
from ptfast.core.sections.targets import check_constructs
from ptfast.data.build_data import Data
from ptfast.models.build_model import build_model
from ptfast.models.warm_start import load_weights
from ptfast.optim.build_optimizer import Grouping
from ptfast.techniques.checkpointing.activation_checkpointing import apply_checkpointing, apply_memory_budget
from ptfast.techniques.compile.compilation import Compilation
from ptfast.techniques.parallel.wrapping import apply_sync_batchnorm, wrap_for_ranks
from ptfast.techniques.precision.number_formats import Precision, apply_half_weights
from ptfast.techniques.repeated_blocks import find_blocks
from ptfast.techniques.rewrites.model_rewrites import (
    apply_channels_last,
    drop_biases,
    find_cancelled_biases,
    resolve_channels_last,
)
from ptfast.training.prepare_data import first_samples, unless_auto
from ptfast.training.sequence_batching import has_many_lengths
from ptfast.training.state import restore_model
from ptfast.training.user_code import constructing


@dataclass(frozen=True)
class Shaped:
    """A model in the form that trains."""

    wrap: Callable[[], Any]
    """Makes of it what the loop calls; again where freezing changes what ranks exchange."""
    grouping: Grouping
    """What the config asks of its parameters."""
    compilation: Compilation | None
    channels_last: bool
    facts: dict[str, Any]
    """What `auto` became, for `resolved.json`."""


def build_plain_model(config: Config, info: DataInfo, *, fresh: bool, display: Any) -> nn.Module:
    """The model as its own code makes it, on the CPU.

    Args:
        fresh: whether it starts from the weights that the config names; else they are restored later.
    """
    check_constructs(config.model.target, asdict(info))
    weights = config.model.weights
    with display.status("building the model"), constructing("model", config.model.target.path):
        model = build_model(config.model.target, info, pretrained=fresh and weights == "pretrained")
    if fresh and weights and weights != "pretrained":
        for note in load_weights(model, weights, replace_head=config.model.replace_head):
            display.note(note)
    return model


def shape_model(
    model: nn.Module,
    config: Config,
    *,
    task: Task,
    data: Data,
    device: torch.device,
    precision: Precision,
    ranks: Ranks,
    micro_batches: int,
    resolved: dict[str, Any],
    state: State | None,
    display: Any,
) -> Shaped:
    """Bring `model` into the form that trains, in place.

    The order: rewrites, number format, device, saved weights, BatchNorm over ranks, frozen parameters,
    checkpointed blocks, compiled blocks or model. Wrapping for ranks comes last, by `Shaped.wrap`.

    Args:
        data: of which a few samples are looked at where biases may be dropped.
        resolved: what `auto` became when the run was begun; empty for a new one.
        state: whose weights the model takes; None for its own.
    """
    sharded = config.parallel.strategy == "fsdp" and ranks.distributed
    # Weights are shared out by rows that lie one after another.
    channels_last = False if sharded else resolved.get("channels_last")
    if channels_last is None:
        channels_last = resolve_channels_last(config.rewrites.channels_last, model, data.info.kind, device)
    if channels_last:
        apply_channels_last(model)
    if precision.half_weights:
        apply_half_weights(model)
    model.to(device)
    looking = {"normalize": config.data.normalize, "device": device, "channels_last": channels_last}
    dropped = resolved.get("dropped_biases", {} if config.rewrites.bias_before_norm else None)
    if dropped is None:
        dropped = on_first_rank(
            lambda: _cancelled_biases(model, task, data, precision, display, **looking), ranks
        )
    drop_biases(model, dropped)
    if state is not None:
        restore_model(model, state)
    if config.parallel.sync_batchnorm:
        apply_sync_batchnorm(model)
    section = config.optimizer
    grouping = Grouping(
        model,
        decay_1d=section.decay_1d,
        layer_decay=section.layer_decay,
        groups=section.groups,
        dropped=[f"{name}.bias" for name in dropped],
    )
    grouping.freeze()
    known, checkpointing = resolved.get("checkpointed"), config.checkpointing
    checkpointed = apply_checkpointing(
        model,
        checkpointing.mode,
        blocks=known or checkpointing.blocks,
        every=1 if known else checkpointing.every,
    )
    apply_memory_budget(checkpointing.memory_budget if checkpointing.mode == "budget" else None)
    dynamic = unless_auto(config.compile.dynamic, resolved, "compile_dynamic")
    dynamic = has_many_lengths(data, config) if dynamic == "auto" else dynamic
    compilation = None
    if config.compile.mode != "none":
        accumulates = micro_batches > ranks.num_ranks
        compilation = Compilation(config.compile.mode, device.type, dynamic=dynamic, accumulates=accumulates)
        compilation.apply(model, config.compile.blocks)
    shards = find_blocks(model, config.parallel.blocks, key="parallel.blocks") if sharded else {}
    wrap = partial(
        wrap_for_ranks, model, ranks, config.parallel, blocks=shards, half_type=precision.half_type
    )
    facts = {
        "channels_last": channels_last,
        "dropped_biases": dropped,
        "checkpointed": list(checkpointed),
        "compile_dynamic": dynamic,
        "shards": list(shards),
    }
    return Shaped(wrap, grouping, compilation, channels_last, facts)


def _cancelled_biases(
    model: nn.Module, task: Task, data: Data, precision: Precision, display: Any, **looking: Any
) -> dict[str, str]:
    """Biases that a BatchNorm subtracts, found on a few samples; none where the model cannot be looked at."""

    def forward() -> object:
        with precision.autocast():
            return task.loss(model, first_samples(data, **looking))

    try:
        return find_cancelled_biases(model, forward)
    except Exception as error:
        # What is wrong with the model or the data, training will say; iterable data is not there to look at.
        display.note(f"biases before a BatchNorm are kept: {type(error).__name__}: {error}")
        return {}
