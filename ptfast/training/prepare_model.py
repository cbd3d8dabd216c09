"""From a plain model to the form that trains: rewritten, placed, checkpointed, compiled, wrapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn

from ptfast.core.distributed import on_first_rank
from ptfast.core.protocols import DataInfo, Task
from ptfast.core.sections.targets import check_constructs
from ptfast.data.build_data import Data
from ptfast.models.build_model import build_model
from ptfast.models.warm_start import load_weights
from ptfast.optim.build_optimizer import Grouping
from ptfast.techniques.checkpointing.activation_checkpointing import apply_checkpointing, apply_memory_budget
from ptfast.techniques.compile.compilation import Compilation
from ptfast.techniques.parallel.wrapping import apply_sync_batchnorm, wrap_for_ranks
from ptfast.techniques.precision.number_formats import apply_half_weights
from ptfast.techniques.repeated_blocks import find_blocks
from ptfast.techniques.rewrites.model_rewrites import (
    apply_channels_last,
    drop_biases,
    find_cancelled_biases,
    resolve_channels_last,
)
from ptfast.training.prepare_data import first_samples, reading
from ptfast.training.prepare_machine import BuildContext
from ptfast.training.sequence_batching import has_many_lengths
from ptfast.training.state import restore_model
from ptfast.training.user_code import constructing


@dataclass(frozen=True)
class Shaped:
    """A model in the form that trains."""

    wrap: Callable[[], Any]
    """Makes of it what the loop calls; again where freezing changes what ranks exchange."""
    grouping: Grouping
    """The config's demands on its parameters."""
    compilation: Compilation | None


def build_plain_model(context: BuildContext, info: DataInfo) -> nn.Module:
    """The model as its own code makes it, on the CPU, with the weights that a new run starts from."""
    target, section, fresh = context.config.model.target, context.config.model, context.state is None
    check_constructs(target, asdict(info))
    with context.display.status("building the model"), constructing("model", target.path):
        model = build_model(target, info, pretrained=fresh and section.weights == "pretrained")
    if fresh and section.weights and section.weights != "pretrained":
        for note in load_weights(model, section.weights, replace_head=section.replace_head):
            context.display.note(note)
    return model


def place_model(
    model: nn.Module, context: BuildContext, task: Task, data: Data | None, info: DataInfo
) -> None:
    """Bring `model` into the form that computes, in place: layout, number format, device, saved weights.

    Args:
        data: of which a few samples are looked at where biases may be dropped; None drops none but those of
            before.
    """
    config, resolved, before = context.config, context.resolved, context.before
    # Weights are shared out by rows that lie one after another.
    resolved.channels_last = False if _is_sharded(context) else before.channels_last
    if resolved.channels_last is None:
        resolved.channels_last = resolve_channels_last(
            config.rewrites.channels_last, model, info.kind, context.device
        )
    if resolved.channels_last:
        apply_channels_last(model)
    if context.precision.half_weights:
        apply_half_weights(model)
    model.to(context.device)
    dropped = before.dropped_biases
    if dropped is None and data is not None and not config.rewrites.bias_before_norm:
        dropped = on_first_rank(lambda: _cancelled_biases(model, context, task, data), context.ranks)
    resolved.dropped_biases = dropped or {}
    drop_biases(model, resolved.dropped_biases)
    if context.state is not None:
        restore_model(model, context.state)


def shape_model(model: nn.Module, context: BuildContext, data: Data) -> Shaped:
    """Bring a placed model into the form that trains, in place.

    The order: BatchNorm over ranks, frozen parameters, checkpointed blocks, compiled blocks or model.
    Wrapping for ranks comes last, by `Shaped.wrap`.
    """
    config, resolved, before, ranks = context.config, context.resolved, context.before, context.ranks
    if config.parallel.sync_batchnorm:
        apply_sync_batchnorm(model)
    section = config.optimizer
    grouping = Grouping(
        model,
        decay_1d=section.decay_1d,
        layer_decay=section.layer_decay,
        groups=section.groups,
        dropped=[f"{name}.bias" for name in resolved.dropped_biases or ()],
    )
    grouping.freeze()
    checkpointing = config.checkpointing
    blocks = apply_checkpointing(
        model,
        checkpointing.mode,
        blocks=before.checkpointed or checkpointing.blocks,
        every=1 if before.checkpointed else checkpointing.every,
    )
    apply_memory_budget(checkpointing.memory_budget if checkpointing.mode == "budget" else None)
    dynamic = config.compile.dynamic
    if dynamic == "auto":
        known = before.compile_dynamic
        dynamic = has_many_lengths(data, config) if known is None else known
    compilation = None
    if config.compile.mode != "none":
        accumulates = context.micro_batches > ranks.num_ranks
        compilation = Compilation(
            config.compile.mode, context.device.type, dynamic=dynamic, accumulates=accumulates
        )
        compilation.apply(model, config.compile.blocks)
    shards = find_blocks(model, config.parallel.blocks, key="parallel.blocks") if _is_sharded(context) else {}
    resolved.checkpointed, resolved.compile_dynamic, resolved.shards = list(blocks), dynamic, list(shards)
    half_type = context.precision.half_type
    wrap = partial(wrap_for_ranks, model, ranks, config.parallel, blocks=shards, half_type=half_type)
    return Shaped(wrap, grouping, compilation)


def _is_sharded(context: BuildContext) -> bool:
    return context.config.parallel.strategy == "fsdp" and context.ranks.distributed


def _cancelled_biases(model: nn.Module, context: BuildContext, task: Task, data: Data) -> dict[str, str]:
    """Biases that a BatchNorm subtracts, found on a few samples; none where the model cannot be looked at."""

    def forward() -> object:
        with context.precision.autocast():
            return task.loss(model, first_samples(data, reading(context)))

    try:
        return find_cancelled_biases(model, forward)
    except Exception as error:
        # What is wrong with the model or the data, training will say; iterable data is not there to look at.
        context.display.note(f"biases before a BatchNorm are kept: {type(error).__name__}: {error}")
        return {}
