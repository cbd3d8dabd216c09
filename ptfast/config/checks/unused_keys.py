"""Keys that are typed and would change nothing: worth a warning, because somebody expects something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ptfast.config.schema import Config
from ptfast.core.errors import COMMAND_LINE
from ptfast.core.sections.problem import shown
from ptfast.core.sections.section import Section

Place = Callable[[str], str]


class Owner(NamedTuple):
    """What has to be chosen for some keys to mean anything."""

    keys: tuple[str, ...]
    acts: Callable[[Config], bool]
    besides: str
    """What is chosen instead, as a clause after `means nothing`."""
    remedy: str


def _grows(config: Config) -> bool:
    wanted = config.curriculum
    return (wanted.image_size_from, wanted.length_from, wanted.batch_size_from) != (None, None, None)


OWNERS = (
    Owner(
        ("checkpointing.every",),
        lambda config: config.checkpointing.mode == "every_n",
        "to checkpointing={config.checkpointing.mode}",
        "checkpointing=every_n",
    ),
    Owner(
        ("checkpointing.memory_budget",),
        lambda config: config.checkpointing.mode == "budget",
        "to checkpointing={config.checkpointing.mode}",
        "checkpointing=budget",
    ),
    Owner(
        ("checkpointing.blocks",),
        lambda config: config.checkpointing.mode in ("full", "every_n", "selective"),
        "to checkpointing={config.checkpointing.mode}",
        "checkpointing=full",
    ),
    Owner(
        ("compile.blocks",),
        lambda config: config.compile.mode == "blocks",
        "to compile={config.compile.mode}",
        "compile=blocks",
    ),
    Owner(
        ("compile.dynamic",),
        lambda config: config.compile.mode != "none",
        "without compiling",
        "compile=model",
    ),
    Owner(
        ("optimizer.reference_batch",),
        lambda config: config.optimizer.lr_scaling != "none",
        "to optimizer.lr_scaling=none",
        "optimizer.lr_scaling=linear",
    ),
    Owner(
        ("curriculum.over",),
        _grows,
        "where nothing grows",
        "curriculum.batch_size_from=auto, say",
    ),
    Owner(
        ("curriculum.image_size_multiple",),
        lambda config: config.curriculum.image_size_from is not None,
        "where images do not grow",
        "curriculum.image_size_from=auto",
    ),
    Owner(
        ("curriculum.length_multiple",),
        lambda config: config.curriculum.length_from is not None,
        "where sequences do not grow",
        "curriculum.length_from=auto",
    ),
    Owner(
        ("parallel.powersgd_rank", "parallel.powersgd_start"),
        lambda config: config.parallel.compression == "powersgd",
        "to parallel.compression={config.parallel.compression}",
        "parallel.compression=powersgd",
    ),
    Owner(
        ("parallel.bucket_mb", "parallel.gradient_as_bucket_view"),
        lambda config: config.parallel.strategy == "ddp",
        "to parallel={config.parallel.strategy}",
        "parallel=ddp",
    ),
    Owner(
        ("parallel.blocks",),
        lambda config: config.parallel.strategy == "fsdp",
        "to parallel={config.parallel.strategy}",
        "parallel=fsdp",
    ),
    Owner(
        ("batching.multiple", "batching.padding"),
        lambda config: not config.batching.pack,
        "to batching=pack, whose windows have one length",
        "batching=longest",
    ),
    Owner(
        ("batch_size",),
        lambda config: config.batching.batch_tokens is None,
        "to training by batching.batch_tokens={config.batching.batch_tokens}",
        "batching.batch_tokens for a step's tokens and eval.batch_size for evaluation, or batching=buckets",
    ),
    Owner(
        ("dataloader.last",),
        lambda config: config.batching.batch_tokens is None,
        "where batches are made up by their tokens",
        "batching=buckets",
    ),
    Owner(
        ("ema.swa_every",),
        lambda config: config.ema.swa_start is not None,
        "without such an average",
        "ema.swa_start=75%",
    ),
    Owner(
        ("debug.wait", "debug.warmup", "debug.active"),
        lambda config: config.debug.mode in ("profiler", "memory"),
        "to debug={config.debug.mode}",
        "debug=profiler",
    ),
    Owner(
        ("run.root", "run.name"),
        lambda config: config.run.dir is None,
        "beside run.dir={config.run.dir}, which is the run's own folder",
        "one of the two",
    ),
    Owner(
        ("sweep.metric", "sweep.mode"),
        lambda config: False,
        "to a single run",
        "stop.metric and stop.mode for what `best` follows, or -m for a sweep",
    ),
    Owner(
        ("augment.resized_ratio",),
        lambda config: config.augment.resized_crop is not None,
        "without augment.resized_crop",
        "augment=resized_crop",
    ),
    Owner(
        ("dataloader.workers", "dataloader.prefetch", "backend.worker_threads"),
        lambda config: config.dataloader.kind in ("auto", "workers"),
        "to dataloader={config.dataloader.kind}",
        "dataloader=workers",
    ),
)
"""Keys by what has to be chosen for them to count. Those of an option file stay, ready for its switch."""


def idle_keys(config: Config, place: Place) -> Iterator[str]:
    """A warning for each key of the command line, other than its default, that nothing goes by.

    No error: in a sweep over the switch that it belongs to, a key is idle in some of the runs.
    """
    for owner in OWNERS:
        if owner.acts(config):
            continue
        for key in owner.keys:
            section_name, _, name = key.rpartition(".")
            section: Section = getattr(config, section_name) if section_name else config
            value = getattr(section, name)
            if place(key) == COMMAND_LINE and value != type(section).model_fields[name].get_default():
                besides = owner.besides.format(config=config)
                yield f"{key}={shown(value)} ({COMMAND_LINE}): means nothing {besides}. Use {owner.remedy}"
