"""The data of a run: its splits, its task, and their loaders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks, on_first_rank
from ptfast.core.errors import DataError, PtfastError, summary_of
from ptfast.core.protocols import IGNORE_INDEX, DataInfo
from ptfast.core.resolved import Resolved, resolved_or
from ptfast.data.build_data import Data, build_data
from ptfast.data.dataset import check_same_data, read_info
from ptfast.data.loaders.build_loaders import EvaluationLoader, build_eval_loader, build_train_loader
from ptfast.data.loaders.collate import Collate
from ptfast.data.loaders.loader_choice import Choice, choose
from ptfast.data.loaders.loading import ReaderOptions, SideStream, open_side_stream
from ptfast.data.loaders.shared_memory import build_holder
from ptfast.data.loaders.worker_processes import RAISED
from ptfast.data.sampling.sample_orders import build_order, describe_sampling
from ptfast.data.sampling.sampler import Sharding
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.transforms.augment_plan import Augment, build_augment
from ptfast.data.transforms.mixup_cutmix import build_mix
from ptfast.tasks.added_metrics import add_metrics
from ptfast.tasks.build_task import build_task, collate_of
from ptfast.training.evaluate import check_full_size, check_views
from ptfast.training.stages.machine_stage import BuildContext
from ptfast.training.stages.training_plan import arrange, describe_padding
from ptfast.training.user_code import constructing

SMALL_SAMPLE_BYTES = 64 * 2**10
"""A sample that takes no more as float32 is small: an image of 72 x 72, say."""


def load_data(
    config: Config, ranks: Ranks | None = None, choose: Callable[..., Choice] | None = None, **saved: Any
) -> Data:
    """The splits that the config names, and the facts about them.

    Args:
        ranks: that load together; statistics are computed by the first of them.
        saved: what is known from before: keywords of `build_data`, as `choose` is.
    """
    section, ignored = config.data, config.task.options.get("ignore_index")
    ranks = ranks or Ranks()
    try:
        source = section.target.build()
    except RAISED as error:
        path = section.target.path
        if isinstance(error, PtfastError) or path.startswith("ptfast."):
            raise
        what = f"its constructor raises {summary_of(error)}"
        raise DataError("D008", what, key="data._target_", value=path) from error
    data = build_data(
        source,
        val=section.val,
        seed=config.seed,
        task=config.task.name,
        normalize=section.normalize,
        choose=choose,
        crops=config.augment.resized_crop is not None,
        shuffle_buffer=section.shuffle_buffer,
        once=lambda compute: on_first_rank(compute, ranks),
        holder=build_holder(ranks),
        ignore_index=ignored if isinstance(ignored, int) else IGNORE_INDEX,
        collate=_collate(config),
        **saved,
    )
    return arrange(data, config.batching, config.seed)


def _collate(config: Config) -> Collate | None:
    """What the config, or else the task, has batches made by."""
    if (named := config.data.collate) is not None:
        with constructing("data.collate", named.path):
            return Collate(named.build(), key="data.collate", value=named.path)
    of_task = collate_of(config.task.name)
    return Collate(of_task, key="task", value=config.task.name) if of_task is not None else None


def load_splits(context: BuildContext) -> str:
    """Load the splits of a run; return how the held-out ones differ from those of the resumed state."""
    info = read_info(context.state.facts["info"]) if context.state is not None else None
    if context.data is None:
        with context.display.status("loading the data"):
            choice = build_choice(
                context.config, context.micro_batches, context.device, context.before, context.ranks.num_ranks
            )
            measured = info.extra.get("normalize") if info is not None else None
            context.data = load_data(context.config, context.ranks, choice, measured=measured)
    context.info = context.data.info
    return check_same_data(info, context.info) if info is not None else ""


def choose_task(context: BuildContext) -> None:
    """The task that the config names, or that the data is for, if what it is evaluated with fits it."""
    config, info = context.config, context.info
    named = config.task.name != "auto"
    context.resolved.task = config.task.name if named else info.task
    context.resolved.task_reason = "" if named else info.task_reason
    task = add_metrics(
        build_task(config.task.name, info, **config.task.build_options()), config.metrics, info
    )
    check_views(config.eval.flip, config.eval.shift, info, task, targets=config.augment.targets)
    check_full_size(config.eval.last, task)
    context.task = task


def build_choice(
    config: Config,
    micro_batches: int,
    device: torch.device,
    before: Resolved | None = None,
    num_ranks: int = 1,
) -> Callable[..., Choice]:
    """Build the function that chooses the loader, for `load_data`."""
    before = before or Resolved()
    loader, augment = config.dataloader, Augment(**config.augment.model_dump(exclude={"mixup", "cutmix"}))
    return partial(
        choose,
        kind=resolved_or(loader.kind, before.dataloader),
        # Kinds without workers have found out nothing about their number.
        workers=resolved_or(loader.workers, before.workers),
        micro_batch_size=config.batch_size // micro_batches,
        num_samples=None if config.steps is None else config.steps * config.batch_size,
        prefetch=loader.prefetch,
        before=(before.dataloader_reason or None) if loader.kind == "auto" else None,
        augments=bool(augment),
        crops=augment.resized_crop is not None,
        device=device,
        num_ranks=num_ranks,
    )


def build_eval_loaders(
    context: BuildContext, data: Data, side: SideStream | None
) -> dict[str, EvaluationLoader]:
    """Loaders of the splits that the data has besides `train`, by name.

    Args:
        side: stream on which batches are made ready, None for that of the model.
    """
    batch_size, ranks = evaluated_at_once(context), context.ranks
    splits = {"val": data.val, "test": data.test}
    return {
        split: build_eval_loader(
            source,
            data.info,
            context.reading,
            batch_size=batch_size,
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
            drop_last=context.config.eval.last == "drop",
            side=side,
        )
        for split, source in splits.items()
        if source is not None
    }


def evaluated_at_once(context: BuildContext) -> int:
    """Samples of a forward pass in evaluation on one rank."""
    return context.config.eval.batch_size or eval_batch_size(context.info, context.micro_batch_size)


def full_size(context: BuildContext) -> int | None:
    """Samples that every batch of an evaluation is filled up to; None where the last may be smaller."""
    return evaluated_at_once(context) if context.config.eval.last == "pad" else None


def few_samples(data: Data, loading: ReaderOptions, num_samples: int = 2) -> Any:
    """Training samples, evenly spaced, as a task takes them, for a look at them before training."""
    if isinstance(data.train, IterableSource):
        raise TypeError("iterable data has no length")
    places = np.linspace(0, len(data.train) - 1, min(num_samples, len(data.train)))
    few = data.train.take(places.astype(np.int64))
    loader = build_eval_loader(few, data.info, loading, batch_size=num_samples)
    return next(iter(loader)).data


def eval_batch_size(info: DataInfo, micro_batch_size: int) -> int:
    """Samples of a forward pass in evaluation: what training has shown to fit into memory, or little more.

    Small samples go through by hundreds. Sequences take twice a micro-batch: there are no gradients.
    """
    if info.kind in ("image", "features") and info.input_shape is not None:
        small = 4 * math.prod(info.input_shape) <= SMALL_SAMPLE_BYTES
        return max(micro_batch_size, 256) if small else micro_batch_size
    return 2 * micro_batch_size if info.kind in ("text", "tokens") else micro_batch_size


def build_loaders(context: BuildContext, mark: Callable[[str], None]) -> None:
    """The loaders of the training data and of the splits that are evaluated.

    Args:
        mark: called with what the time from there on goes to.
    """
    config, resolved, loader, plan = context.config, context.resolved, context.config.dataloader, context.plan
    choice: Choice = context.splits.choice
    context.reading = readers(
        context,
        kind=choice.kind,
        reason=choice.reason,
        workers=choice.workers,
        prefetch=loader.prefetch,
        worker_threads=config.backend.worker_threads,
        pin=loader.pin,
        read_ahead=loader.read_ahead,
    )
    side = open_side_stream(context.device) if loader.side_stream else None
    data = replace(context.splits, order=build_order(config.sampling, context.splits, config.seed))
    resolved.sampling = describe_sampling(config.sampling, data)
    options = config.augment.model_dump(exclude={"mixup", "cutmix"})
    augment = build_augment(
        options,
        data.info,
        images=data.train.images,
        task_name=config.task.name,
        normalize=config.data.normalize,
    )
    mix = build_mix(
        config.augment.mixup, config.augment.cutmix, config.seed, info=data.info, task=context.task
    )
    context.train_loader = build_train_loader(
        data,
        Sharding(plan.batches, context.micro_batches, context.ranks.rank, context.ranks.num_ranks),
        context.reading,
        seed=config.seed,
        augment=augment,
        transforms=[*plan.transforms, *([mix] if mix is not None else [])],
        side=side,
        report=mark,
    )
    evaluated = data if config.eval.test else replace(data, test=None)
    context.eval_loaders = build_eval_loaders(context, evaluated, side)
    resolved.dataloader, resolved.dataloader_reason = choice.kind, choice.reason
    resolved.workers = context.train_loader.workers
    resolved.worker_threads = config.backend.worker_threads
    resolved.side_stream, resolved.read_ahead = side is not None, loader.read_ahead
    resolved.padding, resolved.padding_share = describe_padding(
        config.batching, data, plan.batches, context.micro_batches, config.seed
    )
    if plan.batches.size is not None and plan.batches.batch_size > plan.batches.size:
        what = (
            f"batch_size={plan.batches.batch_size:,} is more than the {plan.batches.size:,} training samples"
        )
        context.display.warn(f"{what}: one step is an epoch")


def readers(context: BuildContext, **how: Any) -> ReaderOptions:
    """How samples are made ready for the model; keywords say who reads them, by default this process."""
    return ReaderOptions(
        context.device, context.config.data.normalize, bool(context.resolved.channels_last), **how
    )
