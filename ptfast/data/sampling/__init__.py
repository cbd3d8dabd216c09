"""The order of samples, how they are batched, and how sequences are padded to one length."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Count, Family, Section, Technique, Unused
from ptfast.core.sections.targets import Target
from ptfast.data import MIXTURE, DataSection
from ptfast.optim import Optimizer
from ptfast.techniques.curriculum import Curriculum


class Sampling(Section):
    """The samples of an epoch and their order."""

    target: Target | None = None


class Batching(Section):
    """How texts are batched and padded to one length."""

    padding: Literal["longest", "fixed"] = "longest"
    """Up to the longest text of the batch, or in every batch up to the longest that the data keeps."""
    multiple: Literal[1, 8, 64] = 1
    """Pad to a multiple of so many tokens: 8 suits tensor cores, 64 keeps the shapes few."""
    buckets: bool = False
    """Batches of texts of like length, in a random order; every text once in an epoch."""
    batch_tokens: Count | None = None
    """Tokens of one optimizer step over all ranks, padding included, in place of `batch_size` samples."""
    pack: bool = False
    """Documents of a text to model side by side in windows of the context length, each seen by itself."""


def one_way_of_batching(
    batching: Batching, curriculum: Curriculum, optimizer: Optimizer
) -> PtfastError | None:
    """Refuse token budgets without buckets, and buckets with packing or growing batches."""
    first, scaling = curriculum.batch_size_from, optimizer.lr_scaling
    if batching.buckets and batching.pack:
        what, hint = "packed windows are all of one length", "Set one of the two to false"
        return ConfigError("C011", what, key="batching.pack", value="true", suggestion=hint)
    if not batching.buckets and batching.batch_tokens is not None:
        what, hint = "needs texts of similar length", "Use batching=tokens, or set batching.buckets=true"
        value = batching.batch_tokens
        return ConfigError("C011", what, key="batching.batch_tokens", value=value, suggestion=hint)
    if batching.buckets and first is not None:
        what, hint = "batches by length have one size", "Use curriculum=none or batching=longest"
        return ConfigError("C011", what, key="curriculum.batch_size_from", value=first, suggestion=hint)
    if batching.batch_tokens is not None and scaling != "none":
        what, hint = "token-budget batches have no batch size to scale by", "Use optimizer.lr_scaling=none"
        return ConfigError("C011", what, key="optimizer.lr_scaling", value=scaling, suggestion=hint)
    return None


def one_order(sampling: Sampling, batching: Batching, data: DataSection) -> Iterator[PtfastError]:
    """Refuse an order of samples beside batches by length or a shuffle buffer."""
    if sampling.target is None:
        return
    value, hint = sampling.target.path, "Use sampling=shuffle"
    if data.target.path == MIXTURE:
        what = "a mixture draws its parts by their weights"
        yield ConfigError("C011", what, key="sampling", value=value, suggestion=hint)
    if batching.buckets:
        what, way = "batches by length need an order of their own", f"{hint}, or batching=longest"
        yield ConfigError("C011", what, key="sampling", value=value, suggestion=way)
    if data.shuffle_buffer is not None:
        what = f"contradicts data.shuffle_buffer={data.shuffle_buffer}"
        yield ConfigError("C011", what, key="sampling", value=value, suggestion=f"{hint}, or the buffer null")


def one_way_of_splitting(data: DataSection) -> Iterator[PtfastError]:
    """Refuse keys about held-out samples that contradict each other."""
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


_LINES = (
    "data=text_file",
    "data.path={text}",
    "data.documents=lines",
    "data.context_length=96",
    "model=gpt",
    "model.width=32",
    "model.depth=1",
    "batch_size=4",
    "optimizer.lr=0.01",
)
"""A small language model on the lines of a text, which are of unequal length."""

_batching = partial(Technique, kind="training", needs=("sequences",), alternatives="batching", trial=_LINES)

TECHNIQUES: tuple[Technique, ...] = (
    _batching(
        name="dynamic padding",
        kind="reordered",
        on=("batching=longest",),
        off=("batching=none",),
        why="Each batch is padded to its own longest text, not the dataset's; padding costs as much as text.",
        claim="CamemBERT-base on the French X-NLI, on an RTX 2080 Ti: 4h39 become 0h59 with 16 texts of "
        "up to 493 tokens a batch, and 0h56 become 0h48 with 64 of up to 128.",
        source="Benesty 2020, 'Divide Hugging Face Transformers training time by 2 or more with dynamic "
        "padding and uniform length batching'.",
        measured="A 4-layer encoder at batch 16, on texts of 8 to 256 tokens: 2.11x padding to one length.",
        command="python scripts/bench_data.py text",
        avoid="Kernels are compiled or searched per length: pad to a multiple of 64, or to one length.",
        audit="padding='max_length' in a tokenizer's call, or a collate function that pads to a constant.",
    ),
    _batching(
        name="padding to a multiple",
        kind="reordered",
        on=("batching.multiple=8",),
        off=("batching.multiple=1",),
        why="Tensor cores work in tiles of eight, and fewer distinct lengths mean fewer recompilations.",
        claim="Half-precision matrix products use tensor cores best at multiples of 8 elements, of 64 on "
        "an A100; before cuBLAS 11 at those of 8 alone.",
        source="NVIDIA, Matrix Multiplication Background User's Guide, table 1, 'Tensor Core requirements'.",
        avoid="On a CPU, or with texts of a few tokens, which would be mostly padding.",
        audit="Batches of odd lengths in half precision on a GPU, or a model that is compiled repeatedly.",
        trial=(*_LINES, "batching=longest"),
        alternatives=None,
    ),
    _batching(
        name="uniform-length batches",
        on=("batching=buckets",),
        off=("batching=longest",),
        why="Texts of similar length are batched together, so almost nothing is padding.",
        claim="On top of dynamic padding, CamemBERT-base on the French X-NLI, on an RTX 2080 Ti: 1h01 "
        "become 0h52 with 16 texts of up to 493 tokens a batch, and 0h48 become 0h30 with 64 of up "
        "to 128.",
        source="Benesty 2020, 'Divide Hugging Face Transformers training time by 2 or more with dynamic "
        "padding and uniform length batching'; Khomenko et al. 2016, arXiv:1708.05604.",
        measured="A 4-layer encoder at batch 16, on texts of 8 to 256 tokens: 6.1x padding to one length, "
        "with 1.6 % padding.",
        command="python scripts/bench_data.py text",
        avoid="Length predicts the class, so batches become nearly single-class; or all lengths are equal.",
        audit="More than a tenth of the tokens of a batch are padding.",
    ),
    _batching(
        name="token-budget batches",
        on=("batching=tokens", "batching.batch_tokens=256"),
        off=("batching=longest", "batching.batch_tokens=null"),
        why="Each batch holds about the same number of tokens, of many short or few long texts.",
        claim="How the original Transformer was trained: batches of about 25,000 source and 25,000 target "
        "tokens, of sentences of like length.",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 5.1.",
        avoid="The learning rate was tuned for a fixed number of samples per batch.",
        audit="Batches of a fixed number of texts whose step time and memory vary severalfold.",
    ),
    _batching(
        name="sequence packing",
        on=("batching=pack",),
        off=("batching=longest",),
        why="Documents are laid end to end in windows of one length: almost no padding, and a single shape.",
        claim="The second phase of BERT's pretraining twice as fast, at sequences of 512 tokens of which "
        "half had been padding, on IPUs.",
        source="Krell, Kosec, Perez, Fitzgibbon 2021, arXiv:2107.02027.",
        avoid="Documents have one length or far exceed the context. On a GPU in float32 or with dropout, "
        "attention takes a mask, which shuts out the fastest kernels.",
        audit="A language model whose batches hold a document a row, padded to the context length.",
    ),
    Technique(
        name="tokens kept on disk",
        kind="exact",
        why="A text is tokenised once; later runs read its ids from a cache keyed by text and tokenizer.",
        claim="No published figure: it saves the tokenizer's time at every start but the first.",
        source="Common practice, such as the map cache of Hugging Face datasets.",
        avoid="Never: texts below a million characters are not cached, and a damaged entry is rebuilt.",
        audit="A tokenizer called in __getitem__, or at every start.",
        needs=("sequences",),
    ),
)

FAMILY = Family(
    name="batching",
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
            ("dataloader.last",),
            lambda batching: batching.batch_tokens is None,
            "where batches are made up by their tokens",
            "batching=buckets",
        ),
    ),
    panel=lambda resolved: {"sampling": resolved.sampling, "padding": resolved.padding},
    techniques=TECHNIQUES,
)
