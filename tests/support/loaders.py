"""Training and evaluation loaders out of flat keywords."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from ptfast.core.batch_plan import BatchPlan, DropLast
from ptfast.data.build_data import Data
from ptfast.data.loaders.build_loaders import build_eval_loader, build_train_loader
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.loaders.pipeline import LoaderOptions
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.sampler import Sharding
from ptfast.data.transforms.augment_plan import build_augment


def loading(given: Mapping[str, Any]) -> tuple[LoaderOptions, dict[str, Any]]:
    """The keywords of `given` that are of `LoaderOptions`, and the others."""
    names = {field.name for field in fields(LoaderOptions)}
    own = {name: value for name, value in given.items() if name in names}
    others = {name: value for name, value in given.items() if name not in names}
    return LoaderOptions(**{"device": torch.device("cpu"), **own}), others


def train_loader(
    data: Data,
    *,
    batch_size: int,
    micro_batches: int = 1,
    rank: int = 0,
    world_size: int = 1,
    drop_last: DropLast = False,
    seed: int = 0,
    augment: Mapping[str, Any] = {},
    **given: Any,
) -> Any:
    """A training loader of one rank, in this process unless a kind is given."""
    how, others = loading(given)
    if how.kind == "auto":
        kind, reason, workers = choose(data.train, kind="auto", workers=how.workers)
        how = replace(how, kind=kind, reason=reason, workers=workers)
    size = len(data.train) if isinstance(data.train, MapSource) else None
    sharding = Sharding(BatchPlan(size, batch_size, drop_last), micro_batches, rank, world_size)
    changes = build_augment(
        augment, data.info, images=data.train.images, task_name="auto", normalize=how.normalize
    )
    return build_train_loader(data, sharding, how, seed=seed, augment=changes, **others)


def eval_loader(source: Any, info: Any, *, batch_size: int, **given: Any) -> Any:
    """An evaluation loader of one rank, in this process unless a kind is given."""
    how, others = loading(given)
    return build_eval_loader(source, info, how, batch_size=batch_size, **others)
