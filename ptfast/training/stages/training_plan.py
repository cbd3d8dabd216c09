"""The plan of a run: the samples of each step, the number of steps, and the sizes that grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from ptfast.config.schema import Config
from ptfast.core.batch_plan import BatchPlan, DropLast
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.build_data import Data
from ptfast.data.loaders.pipeline import Transform
from ptfast.data.map_source import Padding
from ptfast.data.sampling import Batching
from ptfast.data.sampling.length_buckets import LengthPlan, padding_share
from ptfast.data.sampling.sampler import Sampler, Sharding, smallest_micro_batch
from ptfast.data.sources.ragged_text import Documents, PackedSequences
from ptfast.models.layers import load_varlen_attention
from ptfast.techniques.curriculum.growing_sizes import (
    build_resize,
    build_truncation,
    describe_growth,
)

MOST_WIDTHS = 4
"""Maximum number of lengths compiled separately: torch gives up after eight shapes, with short batches."""


@dataclass
class TrainingPlan:
    """The batches of a run, its steps, and the sizes that grow."""

    batches: BatchPlan
    """Selects the samples of each step."""
    total_steps: int
    transforms: list[Transform] = field(default_factory=list)
    """Functions applied to each micro-batch, on the device."""
    notes: list[str] = field(default_factory=list)
    """A line for each size that grows, for the panel."""
    spans_run: bool = False
    """Whether a longer run would begin with other sizes."""

    def steps(self, key: str, duration: Duration) -> int:
        """Return the number of steps in `duration`, the value of `key`; C011 if the data lacks its unit."""
        try:
            return self.batches.steps(duration, self.total_steps)
        except ValueError as error:
            raise ConfigError("C011", str(error), key=key, value=duration) from error

    def every(self, key: str, duration: Duration | Literal["auto"], times: int = 10) -> Sequence[int]:
        """Return the steps at every `duration`; for `auto`, at `times` steps of the run."""
        # One epoch, the default, has no meaning for data without epochs.
        if duration == "auto" or (self.batches.size is None and duration == Duration(1, "epochs")):
            duration = Duration(math.ceil(self.total_steps / times), "steps")
        self.steps(key, duration)
        return self.batches.every(duration, self.total_steps)


def build_plan(
    config: Config, data: Data, model: nn.Module, micro_batches: int, note: Callable[[str], None]
) -> TrainingPlan:
    """Plan a run.

    `note` receives a line if `dataloader.drop_last=auto` leaves out the last batch of an epoch.
    """
    check_sequences(model, data)
    curriculum, info = config.curriculum, data.info

    def batches_with(drop_last: DropLast) -> BatchPlan:
        return build_length_plan(config, data, drop_last) or BatchPlan(
            info.num_train, config.batch_size, drop_last
        )

    drop_last = config.dataloader.drop_last
    batches = batches_with(False if drop_last == "auto" else drop_last)
    if drop_last == "auto" and leaves_one(batches, model, micro_batches):
        dropped = batches_with(True)
        if dropped.steps_per_epoch and not leaves_one(dropped, model, micro_batches):
            batches = dropped
            what = "each epoch skips its last batch, which would give BatchNorm a single sample"
            note(f"dataloader.drop_last=true: {what} ({batches.size:,} samples)")
    if config.steps is None and batches.size is None:
        hint = "Iterable data has no epochs: set for example steps=1000"
        raise ConfigError("C016", "the number of steps is unknown", key="steps", suggestion=hint)
    plan = TrainingPlan(batches, config.steps or batches.steps(Duration(config.epochs or 0, "epochs"), None))
    grows = (curriculum.image_size_from, curriculum.length_from) != (None, None)
    over_steps = plan.steps("curriculum.over", curriculum.over) if grows else 0
    if curriculum.image_size_from is not None:
        first, multiple = curriculum.image_size_from, curriculum.image_size_multiple
        plan.transforms.append(resize := build_resize(first, multiple, over_steps, info))
        plan.notes.append(describe_growth("images from {} to {} pixels", resize.stages))
    if curriculum.length_from is not None:
        first, multiple = curriculum.length_from, curriculum.length_multiple
        plan.transforms.append(truncation := build_truncation(first, multiple, over_steps, info))
        plan.notes.append(describe_growth("sequences from {} to {} tokens", truncation.stages))
    plan.spans_run = bool(plan.notes) and curriculum.over.unit == "percent"
    return plan


def leaves_one(plan: BatchPlan, model: nn.Module, micro_batches: int) -> bool:
    """Return True if a micro-batch has a single sample, which BatchNorm cannot train on."""
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    return normed and plan.size is not None and smallest_micro_batch(plan.all_sizes(), micro_batches) == 1


def check_last_batch(plan: BatchPlan, model: nn.Module, micro_batches: int) -> None:
    """Reject, with D006, a micro-batch of a single sample under BatchNorm."""
    if leaves_one(plan, model, micro_batches):
        what = (
            f"{plan.size:,} samples leave a last micro-batch of 1, but BatchNorm cannot train on one sample"
        )
        hint = "Set dataloader.drop_last=true or another batch_size"
        raise DataError("D006", what, key="batch_size", value=plan.batch_size, suggestion=hint)


def pack_or_pad(data: Data, batching: Batching, seed: int) -> Data:
    """Return the same data, with documents packed into windows, or sequences padded in each batch."""
    if not batching.pack:
        for source in (data.train, data.val, data.test):
            if source is not None:
                source.padding = _padding(batching)
        return data
    limit, sources = data.info.context_length, (data.train, data.val, data.test)
    if limit is None or not isinstance(data.train, Documents):
        what = "the data has no documents to pack"
        hint = "Use data=text_file with data.documents=lines or paragraphs, or batching=longest"
        raise ConfigError("C011", what, key="batching.pack", value="true", suggestion=hint)
    packed = [PackedSequences(s, limit, seed) if isinstance(s, Documents) else s for s in sources]
    train, val, test = packed
    assert isinstance(train, PackedSequences)
    info = replace(data.info, num_train=len(train))
    return replace(data, train=train, val=val, test=test, info=info)


def _padding(batching: Batching) -> Padding:
    return Padding(batching.padding == "fixed", batching.multiple)


def build_length_plan(config: Config, data: Data, drop_last: DropLast) -> LengthPlan | None:
    """Build the plan of batches by length; None if batches are not by length."""
    batching, lengths, limit = config.batching, data.train.lengths, data.info.context_length
    if not batching.buckets:
        return None
    if lengths is None or limit is None:
        what, hint = f"{data.info.kind} data has no samples of unequal length", "Use batching=longest"
        raise ConfigError("C011", what, key="batching.buckets", value="true", suggestion=hint)
    budget, longest = batching.batch_tokens, _padding(batching).width(int(lengths.max()), limit)
    if budget is not None and budget < longest:
        what = f"is too small for the longest text, which has {longest:,} tokens"
        hint = f"Use batching.batch_tokens={longest} or more, or lower the data's length limit"
        raise ConfigError("C011", what, key="batching.batch_tokens", value=budget, suggestion=hint)
    return LengthPlan(
        lengths,
        limit=limit,
        padding=_padding(batching),
        batch_size=config.batch_size,
        batch_tokens=budget,
        drop_last=drop_last,
        seed=config.seed,
    )


def check_sequences(model: nn.Module, data: Data) -> None:
    """Reject sequences longer than the model's stated limit, and packed ones if it does not support them."""
    info = data.info
    if isinstance(data.train, PackedSequences) and not getattr(model, "takes_packed", False):
        what = f"{type(model).__name__} would attend across documents"
        hint = "Use batching=buckets, or model=gpt"
        raise ConfigError("C011", what, key="batching.pack", value="true", suggestion=hint)
    if isinstance(data.train, PackedSequences) and torch.cuda.is_available():
        load_varlen_attention()
    most = getattr(model, "context_length", None)
    most = most or getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if info.kind not in ("text", "tokens") or not isinstance(most, int) or (info.context_length or 0) <= most:
        return
    key = "data.context_length" if info.kind == "tokens" else "data.max_length"
    what, hint = f"the model accepts at most {most:,} tokens per sequence", f"Set {key}={most}"
    raise ConfigError("C011", what, key=key, value=info.context_length, suggestion=hint)


def describe_padding(
    config: Config, data: Data, plan: BatchPlan, micro_batches: int
) -> tuple[str | None, float | None]:
    """Describe for the panel how sequences are padded or packed, and return the share of padding."""
    batching, seed = config.batching, config.seed
    if isinstance(train := data.train, PackedSequences):
        what = f"{train.num_documents:,} documents packed into {len(train):,} windows"
        share = train.padding_share
        return f"{what}: {share:.1%} of all tokens", round(share, 6)
    lengths, limit = data.train.lengths, data.info.context_length
    if lengths is None or limit is None:
        return None, None
    sampler = Sampler(Sharding(plan, micro_batches), seed, partial(data.order, seed))
    share = padding_share(sampler, lengths, limit, _padding(batching))
    longest = "the longest of each batch" if batching.padding == "longest" else f"{limit} tokens"
    alike = "batches of like length, " if batching.buckets else ""
    to = f"padded to {longest}" + (f" in steps of {batching.multiple}" if batching.multiple > 1 else "")
    return f"{alike}{to}: {share:.1%} of all tokens", round(share, 6)


def has_many_lengths(data: Data, batching: Batching) -> bool:
    """Return True if batches have too many lengths to compile each of them."""
    lengths, limit = data.train.lengths, data.info.context_length
    if lengths is None or limit is None:
        return data.info.kind == "text"
    if batching.batch_tokens is not None:
        return True
    return len({_padding(batching).width(length, limit) for length in set(lengths.tolist())}) > MOST_WIDTHS
