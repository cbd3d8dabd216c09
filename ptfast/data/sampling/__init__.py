"""Options for the order of samples, batching, and padding of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Count, Family, Section, Unused
from ptfast.core.sections.targets import Target
from ptfast.data import MIXTURE, DataSection
from ptfast.optim import Optimizer


class Sampling(Section):
    """The samples of an epoch and their order."""

    target: Target | None = None


class Batching(Section):
    """How texts are batched and padded to one length."""

    padding: Literal["longest", "fixed"] = "longest"
    """Pad to the longest text of the batch, or to the same fixed length in all batches."""
    multiple: Literal[1, 8, 64] = 1
    """Pad to a multiple of this many tokens: 8 suits tensor cores, 64 keeps the number of shapes small."""
    buckets: bool = False
    """Batch texts of similar length, in random order; every text comes once per epoch."""
    batch_tokens: Count | None = None
    """Tokens of one optimizer step over all ranks, padding included, in place of `batch_size` samples."""
    pack: bool = False
    """Pack documents into windows of the context length; attention stays within each document."""


def one_way_of_batching(batching: Batching, optimizer: Optimizer) -> PtfastError | None:
    """Reject token budgets without buckets or with learning-rate scaling, and buckets with packing."""
    scaling = optimizer.lr_scaling
    if batching.buckets and batching.pack:
        what, hint = "packed windows are all of one length", "Set one of the two to false"
        return ConfigError("C011", what, key="batching.pack", value="true", suggestion=hint)
    if not batching.buckets and batching.batch_tokens is not None:
        what, hint = "needs texts of similar length", "Use batching=tokens, or set batching.buckets=true"
        value = batching.batch_tokens
        return ConfigError("C011", what, key="batching.batch_tokens", value=value, suggestion=hint)
    if batching.batch_tokens is not None and scaling != "none":
        what, hint = "token-budget batches have no batch size to scale by", "Use optimizer.lr_scaling=none"
        return ConfigError("C011", what, key="optimizer.lr_scaling", value=scaling, suggestion=hint)
    return None


def one_order(sampling: Sampling, batching: Batching, data: DataSection) -> Iterator[PtfastError]:
    """Reject a sample order together with a mixture, length buckets or a shuffle buffer."""
    path = sampling.target.path if sampling.target is not None else None
    if data.target.path == MIXTURE:
        what, hint = "a mixture draws its parts by their weights", "Leave it out"
        others = {"sampling": path, "batching.buckets": batching.buckets, "batching.pack": batching.pack}
        for key, value in others.items():
            if value:
                yield ConfigError("C011", what, key=key, value=value, suggestion=hint)
    if path is None:
        return
    value, hint = path, "Use sampling=shuffle"
    if batching.buckets:
        what, way = "batches by length need an order of their own", f"{hint}, or batching=longest"
        yield ConfigError("C011", what, key="sampling", value=value, suggestion=way)
    if data.shuffle_buffer is not None:
        what = f"contradicts data.shuffle_buffer={data.shuffle_buffer}"
        yield ConfigError("C011", what, key="sampling", value=value, suggestion=f"{hint}, or the buffer null")


def one_way_of_splitting(data: DataSection) -> Iterator[PtfastError]:
    """Reject contradictory keys about held-out samples."""
    if data.fold is not None and data.fold >= (data.folds or 0):
        what = f"folds are counted from 0 to {data.folds - 1}" if data.folds else "there are no folds"
        yield ConfigError("C005", what, key="data.fold", value=data.fold, suggestion="Set data.folds=5, say")
    if data.folds is not None and data.val != DataSection.model_fields["val"].default:
        what = f"contradicts data.folds={data.folds}, which holds out a fold"
        yield ConfigError("C011", what, key="data.val", value=data.val, suggestion="Leave out one of the two")
    if data.split != "auto" and (data.split == "grouped") != (data.group is not None):
        what = f"does not go with data.group={data.group or 'null'}"
        hint = "Set data.split=grouped data.group=COLUMN, or neither"
        yield ConfigError("C011", what, key="data.split", value=data.split, suggestion=hint)


FAMILY = Family(
    rules=(one_way_of_batching, one_order, one_way_of_splitting),
    unused=(
        Unused(
            ("batching.multiple", "batching.padding"),
            lambda batching: not batching.pack,
            "to batching=pack, whose windows have one length",
            "batching=longest",
        ),
        Unused(
            ("batch_size",),
            lambda batching: batching.batch_tokens is None,
            "to training by batching.batch_tokens={batching.batch_tokens}",
            "batching.batch_tokens for a step's tokens and eval.batch_size for evaluation, or "
            "batching=buckets",
        ),
        Unused(
            ("dataloader.drop_last",),
            lambda batching: batching.batch_tokens is None,
            "where batches are made up by their tokens",
            "batching=buckets",
        ),
    ),
)
