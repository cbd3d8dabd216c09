"""Which sequences come together in a batch, and how they come to one length."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.errors import ConfigError
from ptfast.data.build_data import Data
from ptfast.data.map_source import Padding
from ptfast.data.sampling import Batching
from ptfast.data.sampling.length_buckets import LengthPlan, padding_share
from ptfast.data.sampling.sequence_packing import PackedSequences
from ptfast.data.sources.ragged_text import Documents

MOST_WIDTHS = 4
"""Lengths that are compiled one by one; torch gives up after eight shapes, with those of short batches."""


def arrange(data: Data, batching: Batching, seed: int) -> Data:
    """The same data, whose sequences come packed, or to one length with the others of their batch.

    Args:
        seed: of the order in which documents are packed.

    Raises:
        ConfigError: C011 where documents are to be packed and the data has none.
    """
    if batching.pack:
        return _packed(data, seed)
    for source in (data.train, data.val, data.test):
        if source is not None:
            source.pad(_padding(batching))
    return data


def _packed(data: Data, seed: int) -> Data:
    limit, sources = data.info.context_length, (data.train, data.val, data.test)
    if limit is None or not isinstance(data.train, Documents):
        what = "the data has no documents to pack"
        hint = "Use data=text_file with data.documents=lines or paragraphs, or batching=longest"
        raise ConfigError("C011", what, key="batching.pack", value="true", suggestion=hint)
    train, val, test = (
        PackedSequences(source, limit, seed) if isinstance(source, Documents) else source
        for source in sources
    )
    assert train is not None
    return replace(
        data, train=train, val=val, test=test, info=replace(data.info, num_train=train.num_samples)
    )


def _padding(batching: Batching) -> Padding:
    return Padding(batching.padding == "fixed", batching.multiple)


def build_length_plan(
    batching: Batching, data: Data, *, batch_size: int, last: str, seed: int
) -> LengthPlan | None:
    """The plan of batches that go by the samples' length; None where they do not.

    Args:
        batch_size, last, seed: as for `LengthPlan`.

    Raises:
        ConfigError: C011 for data without sequences, or one that is longer than a step's tokens.
    """
    lengths, limit = data.train.lengths(), data.info.context_length
    if not batching.buckets:
        return None
    if lengths is None or limit is None:
        what, hint = f"{data.info.kind} data has no samples of unequal length", "Use batching=longest"
        raise ConfigError("C011", what, key="batching.buckets", value="true", suggestion=hint)
    budget, longest = batching.batch_tokens, _padding(batching).width(int(lengths.max()), limit)
    if budget is not None and budget < longest:
        what = f"does not hold the longest text, which takes {longest:,} tokens"
        hint = f"Use batching.batch_tokens={longest} or more, or a smaller limit of the data's lengths"
        raise ConfigError("C011", what, key="batching.batch_tokens", value=budget, suggestion=hint)
    return LengthPlan(
        lengths,
        limit=limit,
        padding=_padding(batching),
        batch_size=batch_size,
        batch_tokens=budget,
        last=last,
        seed=seed,
    )


def check_takes(model: nn.Module, data: Data) -> None:
    """Refuse sequences longer than the model says that it takes, and packed ones where it takes none.

    Raises:
        ConfigError: C011.
    """
    info = data.info
    if isinstance(data.train, PackedSequences) and not getattr(model, "takes_packed", False):
        what = f"{type(model).__name__} would attend across documents"
        hint = "Use batching=buckets, or model=gpt"
        raise ConfigError("C011", what, key="batching.pack", value="true", suggestion=hint)
    most = getattr(model, "context_length", None)
    most = most or getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if info.kind not in ("text", "tokens") or not isinstance(most, int) or (info.context_length or 0) <= most:
        return
    key = "data.context_length" if info.kind == "tokens" else "data.max_length"
    what, hint = f"the model takes sequences of {most:,} tokens at most", f"Set {key}={most}"
    raise ConfigError("C011", what, key=key, value=info.context_length, suggestion=hint)


def describe_padding(
    batching: Batching, data: Data, plan: BatchPlan, micro_batches: int, seed: int
) -> tuple[str | None, float | None]:
    """How sequences come to one length, for the panel, and how much of the first epoch is padding."""
    if isinstance(train := data.train, PackedSequences):
        what = f"{train.num_documents:,} documents packed into {len(train):,} windows"
        share = train.padding_share
        return f"{what}: {share:.1%} of all tokens", round(share, 6)
    lengths, limit = data.train.lengths(), data.info.context_length
    if lengths is None or limit is None or plan.grows:
        return None, None
    own_order = data.order(seed, 0)
    share = padding_share(plan, lengths, limit, _padding(batching), micro_batches, seed, own_order)
    longest = "the longest of each batch" if batching.padding == "longest" else f"{limit} tokens"
    alike = "batches of like length, " if batching.buckets else ""
    to = f"padded to {longest}" + (f" in steps of {batching.multiple}" if batching.multiple > 1 else "")
    return f"{alike}{to}: {share:.1%} of all tokens", round(share, 6)


def has_many_lengths(data: Data, batching: Batching) -> bool:
    """Return True if batches come in more lengths than are worth compiled code of their own."""
    lengths, limit = data.train.lengths(), data.info.context_length
    if lengths is None or limit is None:
        return data.info.kind == "text"
    if batching.batch_tokens is not None:
        return True
    return len({_padding(batching).width(length, limit) for length in set(lengths.tolist())}) > MOST_WIDTHS
