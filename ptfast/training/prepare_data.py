"""From a config to its data: the splits, the course of the run through them, and their loaders."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ptfast.config.schema import Config
from ptfast.core.batch_plan import BatchPlan, constant
from ptfast.core.distributed import Ranks, on_first_rank
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError, PtfastError
from ptfast.core.protocols import IGNORE_INDEX, DataInfo, EvalLoader, Task, TrainLoader
from ptfast.data.build_data import Data, build_data, build_eval_loader, build_train_loader
from ptfast.data.loaders.loader_choice import Choice, choose
from ptfast.data.loaders.read_ahead import build_ahead
from ptfast.data.loaders.shared_memory import build_holder
from ptfast.data.loaders.side_stream import PrefetchedEvaluation, PrefetchedLoader, Side, open_side_stream
from ptfast.data.loaders.transformed_batches import Change, ChangedLoader
from ptfast.data.loaders.worker_processes import RAISED, failed
from ptfast.data.sampling.length_buckets import LengthPlan
from ptfast.data.sampling.sampler import smallest_micro_batch
from ptfast.data.streams.stream_loaders import Marks
from ptfast.data.transforms.augment import Augment
from ptfast.data.transforms.mixup_cutmix import build_mix
from ptfast.techniques.curriculum.growing_sizes import (
    build_batch_sizes,
    build_cut,
    build_resize,
    describe_batch_sizes,
)
from ptfast.training.sequence_batching import arrange, build_length_plan, check_takes, describe_padding

SMALL_SAMPLE_BYTES = 64 * 2**10
"""A sample that takes no more as float32 is small: an image of 72 x 72, say."""

STATISTICS_SAMPLES = 4096
"""Training samples that BatchNorm's statistics are measured on; more do not change them much."""


def load_data(
    config: Config, ranks: Ranks | None = None, choose: Callable[..., Choice] | None = None, **saved: Any
) -> Data:
    """The splits that the config names, and the facts about them.

    Args:
        ranks: that load together; statistics are computed by the first of them.
        choose: says who loads, as in `build_data`.
        saved: what is known from before: keywords of `build_data`.
    """
    section, ignored = config.data, config.task.options.get("ignore_index")
    ranks = ranks or Ranks()
    try:
        source = section.target.build()
    except RAISED as error:
        if isinstance(error, PtfastError) or section.target.path.startswith("ptfast."):
            raise
        raise failed(error) from error
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
        **saved,
    )
    return arrange(data, config)


def build_choice(
    config: Config, micro_batches: int, device: torch.device, resolved: dict[str, Any], num_ranks: int = 1
) -> Callable[..., Choice]:
    """What chooses the loader, for `load_data`.

    Args:
        resolved: what `auto` became when the run was begun; empty for a new one.
    """
    loader, augment = config.dataloader, Augment(**config.augment.model_dump(exclude={"mixup", "cutmix"}))
    return partial(
        choose,
        kind=unless_auto(loader.kind, resolved, "dataloader"),
        # Kinds without workers have found out nothing about their number.
        workers=(loader.workers == "auto" and resolved.get("workers")) or loader.workers,
        micro_batch_size=config.batch_size // micro_batches,
        num_samples=None if config.steps is None else config.steps * config.batch_size,
        prefetch=loader.prefetch,
        before=resolved.get("dataloader_reason") if loader.kind == "auto" else None,
        augments=bool(augment),
        crops=augment.resized_crop is not None,
        device=device,
        num_ranks=num_ranks,
    )


def build_eval_loaders(
    config: Config,
    data: Data,
    *,
    micro_batches: int | None = None,
    rank: int,
    num_ranks: int,
    side: Side | None = None,
    **loading: Any,
) -> dict[str, EvalLoader]:
    """Loaders of the splits that the data has besides `train`, by name.

    Args:
        micro_batches: that a batch is cut into in training; None for what the config says.
        side: stream on which batches are made ready, None for that of the model.
    """
    micro_batches = micro_batches or config.micro_batches or num_ranks * config.gradients.accumulate
    batch_size = evaluated_at_once(config, data.info, micro_batches)
    splits = {"val": data.val, "test": data.test}
    loaders = {
        split: build_eval_loader(
            source,
            data.info,
            batch_size=batch_size,
            rank=rank,
            num_ranks=num_ranks,
            drop_last=config.eval.last == "drop",
            **loading,
        )
        for split, source in splits.items()
        if source is not None
    }
    if side is None:
        return loaders
    return {split: PrefetchedEvaluation(loader, side) for split, loader in loaders.items()}


def evaluated_at_once(config: Config, info: DataInfo, micro_batches: int) -> int:
    """Samples of a forward pass in evaluation on one rank."""
    return config.eval.batch_size or eval_batch_size(info, config.batch_size // micro_batches)


def full_size(config: Config, info: DataInfo, micro_batches: int) -> int | None:
    """Samples that every batch of an evaluation is filled up to; None where the last may be smaller."""
    return evaluated_at_once(config, info, micro_batches) if config.eval.last == "pad" else None


def first_samples(data: Data, num_samples: int = 2, **loading: Any) -> Any:
    """The first training samples as a task takes them, for a look at what the model does with them.

    Raises:
        TypeError: the data is iterable; looking at it would use it up.
    """
    few = data.train.take(np.arange(min(num_samples, len(data.train))))
    loader = build_eval_loader(few, data.info, batch_size=num_samples, rank=0, num_ranks=1, **loading)
    return next(iter(loader)).data


def build_statistics_loader(
    data: Data, *, batch_size: int, seed: int, rank: int, num_ranks: int, **loading: Any
) -> EvalLoader | None:
    """Some thousand training samples in a random order, as many on each rank, as they are evaluated.

    Returns:
        None where there are too few samples, or iterable data, of which none may be taken.
    """
    try:
        size = len(data.train)
    except TypeError:
        return None
    share = min(STATISTICS_SAMPLES, size) // num_ranks
    # BatchNorm takes no batch of one sample.
    share -= share % batch_size == 1
    if share < 2:
        return None
    # In the order of a folder a batch would hold a single class.
    picked = np.random.default_rng(seed).permutation(size)[: share * num_ranks]
    return build_eval_loader(
        data.train.take(picked),
        data.info,
        batch_size=batch_size,
        rank=rank,
        num_ranks=num_ranks,
        **loading,
    )


def eval_batch_size(info: DataInfo, micro_batch_size: int) -> int:
    """Samples of a forward pass in evaluation: what training has shown to fit into memory, or little more.

    Small samples go through by hundreds. Sequences take twice a micro-batch: there are no gradients.
    """
    if info.kind in ("image", "features") and info.input_shape is not None:
        small = 4 * math.prod(info.input_shape) <= SMALL_SAMPLE_BYTES
        return max(micro_batch_size, 256) if small else micro_batch_size
    return 2 * micro_batch_size if info.kind in ("text", "tokens") else micro_batch_size


def check_last_batch(plan: BatchPlan, model: nn.Module, micro_batches: int) -> None:
    """Refuse an epoch whose last micro-batch is one sample, where BatchNorm would take its statistics.

    Raises:
        DataError: D006.
    """
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if normed and plan.size is not None and smallest_micro_batch(plan.all_sizes(), micro_batches) == 1:
        what = (
            f"{plan.size:,} samples leave a last micro-batch of 1, and BatchNorm cannot train on one sample"
        )
        hint = "Set dataloader.last=drop or another batch_size"
        raise DataError("D006", what, key="batch_size", value=plan.batch_size, suggestion=hint)


@dataclass
class Course:
    """How a run goes through its data, and what grows on the way."""

    plan: BatchPlan
    """Which samples make up each step."""
    total_steps: int
    changes: list[Change] = field(default_factory=list)
    """What is made of each micro-batch on the device."""
    notes: list[str] = field(default_factory=list)
    """What grows, for the panel."""
    spans_run: bool = False
    """Whether a longer run would begin with other sizes."""

    def steps(self, key: str, duration: Duration) -> int:
        """How many steps `duration`, the value of `key`, takes.

        Raises:
            ConfigError: C011 for a unit that this data cannot be counted in.
        """
        with _naming(key, duration):
            return self.plan.steps(duration, self.total_steps)

    def every(self, key: str, duration: Duration) -> Sequence[int]:
        """The steps at which something recurs that happens every `duration`, the value of `key`.

        Raises:
            ConfigError: C011 for a unit that this data cannot be counted in.
        """
        if self.plan.size is None and duration == Duration(1, "epochs"):
            # The default, where there are no epochs: ten times a run.
            duration = Duration(math.ceil(self.total_steps / 10), "steps")
        with _naming(key, duration):
            return self.plan.every(duration, self.total_steps)


def build_course(config: Config, data: Data, model: nn.Module, micro_batches: int) -> Course:
    """Count the steps of the run, and set out what is small at first.

    Args:
        model: as built, on the CPU; where images are to grow it is tried on small ones.

    Raises:
        ConfigError: C011 for what this data or model cannot have, C016 when only epochs are given and the
            data has no length.
    """
    info = data.info
    check_takes(model, data)
    wanted, sizes = config.curriculum, constant(config.batch_size)
    if wanted.batch_size_from is not None:
        sizes = build_batch_sizes(
            wanted.batch_size_from,
            config.batch_size,
            wanted.over,
            micro_batches=micro_batches,
            num_samples=info.num_train,
            epochs=config.epochs,
            steps=config.steps,
        )
    plan = build_length_plan(config, data) or BatchPlan(info.num_train, sizes, config.dataloader.last)
    course = Course(plan, count_steps(config, plan))
    # All that grows has grown by the same step.
    over_steps = sizes.starts[-1]
    if plan.grows:
        course.notes.append(describe_batch_sizes(sizes))
    elif (wanted.image_size_from, wanted.length_from) != (None, None):
        over_steps = course.steps("curriculum.over", wanted.over)
    if wanted.image_size_from is not None:
        resize = build_resize(wanted.image_size_from, wanted.image_size_multiple, over_steps, info, model)
        course.changes.append(resize)
        course.notes.append(resize.describe())
    if wanted.length_from is not None:
        cut = build_cut(wanted.length_from, wanted.length_multiple, over_steps, info)
        course.changes.append(cut)
        course.notes.append(cut.describe())
    course.spans_run = bool(course.notes) and wanted.over.unit == "percent"
    return course


@contextlib.contextmanager
def _naming(key: str, duration: Duration) -> Iterator[None]:
    """Say of a duration that cannot be counted which key it belongs to."""
    try:
        yield
    except ValueError as error:
        raise ConfigError("C011", str(error), key=key, value=duration) from error


def count_steps(config: Config, plan: BatchPlan) -> int:
    """Optimizer steps of the whole run.

    Raises:
        ConfigError: C016 when only epochs are given and the data has no length.
    """
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    if plan.size is None:
        hint = "Iterable data has no epochs: set steps=1000, say"
        raise ConfigError("C016", "the number of steps is not known", key="steps", suggestion=hint)
    return plan.steps(Duration(config.epochs, "epochs"), None)


@dataclass(frozen=True)
class Loaders:
    """The loaders of one rank."""

    train: TrainLoader
    evaluation: dict[str, EvalLoader]
    """By split."""
    loading: dict[str, Any]
    """Keywords that all loaders share."""
    marks: Marks | None
    """Where the passes over iterable data began, for a run that is resumed."""
    facts: dict[str, Any]
    """What `auto` became, for `resolved.json`."""


def build_loaders(
    config: Config,
    data: Data,
    task: Task,
    course: Course,
    *,
    micro_batches: int,
    ranks: Ranks,
    device: torch.device,
    channels_last: bool,
    tell: Callable[[str], None],
) -> Loaders:
    """The loaders of the training data and of the splits that are evaluated.

    Args:
        data: with the choice of who loads it.
        tell: hears what the time goes to.
    """
    loader, info = config.dataloader, data.info
    choice: Choice = data.choice
    loading = {
        "normalize": config.data.normalize,
        "device": device,
        "channels_last": channels_last,
        "kind": choice.kind,
        "workers": choice.workers,
        "prefetch": loader.prefetch,
        "pin": loader.pin,
        "worker_threads": config.backend.worker_threads,
    }
    side = open_side_stream(device) if loader.side_stream else None
    sharding = {"rank": ranks.rank, "num_ranks": ranks.num_ranks}
    train_loader = build_train_loader(
        data,
        task_name=config.task.name,
        batch_size=config.batch_size,
        micro_batches=micro_batches,
        seed=config.seed,
        augment=config.augment.model_dump(exclude={"mixup", "cutmix"}),
        last=loader.last,
        sizes=course.plan.sizes,
        by_length=course.plan if isinstance(course.plan, LengthPlan) else None,
        reason=choice.reason,
        **sharding,
        **loading,
    )
    marks: Marks | None = getattr(train_loader, "marks", None)
    if loader.read_ahead:
        train_loader = build_ahead(train_loader, data.train)
    if side is not None:
        train_loader = PrefetchedLoader(train_loader, side, tell)
    mix = build_mix(config.augment.mixup, config.augment.cutmix, config.seed, info=info, task=task)
    changes: list[Change] = [*course.changes, *([mix] if mix is not None else [])]
    if changes:
        first_micro_batch = ranks.rank * (micro_batches // ranks.num_ranks)
        train_loader = ChangedLoader(train_loader, changes, first_micro_batch)
    eval_loaders = build_eval_loaders(
        config, data, micro_batches=micro_batches, side=side, **sharding, **loading
    )

    facts = {
        "dataloader": choice.kind,
        "dataloader_reason": choice.reason,
        "workers": getattr(train_loader, "workers", 0),
        "worker_threads": config.backend.worker_threads,
        "side_stream": side is not None,
        "read_ahead": loader.read_ahead,
        **describe_padding(config, data, course.plan, micro_batches),
    }
    return Loaders(train_loader, eval_loaders, loading, marks, facts)


def unless_auto(wanted: Any, resolved: dict[str, Any], name: str) -> Any:
    """What the config says, and where it says `auto`, what that was resolved to before, if it was."""
    return resolved.get(name, wanted) if wanted == "auto" else wanted
