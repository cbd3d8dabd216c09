"""Memory for time: activations that the backward pass computes again."""

from __future__ import annotations

from functools import partial
from typing import Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.resolved import Resolved
from ptfast.core.sections.section import Count, Family, Section, Share, Technique, Unused
from ptfast.techniques.compile import Compile


class Checkpointing(Section):
    """Activations that backward computes again."""

    mode: Literal["none", "full", "every_n", "selective", "budget"] = "none"
    """The part computed again: all of blocks, of every n-th, their cheap parts, or the compiler's choice."""
    blocks: str | tuple[str, ...] = "auto"
    """A pattern or patterns of module names, such as `layers.*`; `auto` for the blocks that recur."""
    every: Count | None = None
    """For `every_n`: 2 takes every second block."""
    memory_budget: Share | None = None
    """For `budget`: the share that is kept of what a compiled model keeps."""


def what_the_mode_needs(checkpointing: Checkpointing, compile: Compile) -> PtfastError | None:
    """Refuse a budget without a compiler, and a mode without its figure."""
    mode = checkpointing.mode
    if mode == "budget" and compile.mode in ("none", "pointwise"):
        what = "only the compiler can keep a memory budget"
        hint = "Set compile=model, or use checkpointing=full"
        return ConfigError("C011", what, key="checkpointing", value=mode, suggestion=hint)
    for name, owner, usual in (("every", "every_n", 2), ("memory_budget", "budget", 0.5)):
        if mode == owner and getattr(checkpointing, name) is None:
            what, key = f"needed by checkpointing={mode}", f"checkpointing.{name}"
            return ConfigError("C016", what, key=key, suggestion=f"Set {key}={usual}")
    return None


def panel(checkpointing: Checkpointing, resolved: Resolved) -> dict[str, object]:
    """Activations that the backward pass computes again."""
    if checkpointing.mode == "none":
        return {"checkpointing": None}
    if checkpointing.mode == "budget":
        return {"checkpointing": f"the compiler keeps {checkpointing.memory_budget:.0%} of the activations"}
    blocks = resolved.checkpointed
    what = "cheap operations" if checkpointing.mode == "selective" else "all"
    which = f"{blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else blocks[0]
    every = f", 1 in {checkpointing.every}" if checkpointing.mode == "every_n" else ""
    plural = "s" * (len(blocks) > 1)
    return {"checkpointing": f"{what} in {len(blocks)} block{plural} computed again ({which}{every})"}


_TRIAL = ("model=resnet_digits", "model.width=4", "model.depth=14", "optimizer.lr=0.01")

_checkpointing = partial(
    Technique, kind="exact", off=("checkpointing=none",), alternatives="checkpointing", trial=_TRIAL
)

TECHNIQUES: tuple[Technique, ...] = (
    _checkpointing(
        name="checkpointing of all blocks",
        on=("checkpointing=full",),
        why="Each block keeps only its input, which makes room for a larger batch or model.",
        claim="A residual network of 1,000 layers on ImageNet in 7 GB instead of 48, for 30 % more time.",
        source="Chen, Xu, Zhang, Guestrin 2016, arXiv:1604.06174; torch.utils.checkpoint.",
        measured="ResNet-110 keeps 134 MiB instead of 513 for its backward pass, in 1.41 times the time.",
        command="python scripts/bench_memory.py resnet110",
        avoid="Memory does not limit the batch: then it only costs time.",
        audit="Memory runs out, or limits the batch, while activations take most of it.",
    ),
    _checkpointing(
        name="checkpointing of every n-th block",
        on=("checkpointing=every_n",),
        why="Recomputes only as many blocks as memory requires.",
        claim="A choice between all blocks and none; no figure is given.",
        source="torchtitan, activation checkpointing of every n-th layer.",
        measured="With every second block ResNet-110 keeps 324 MiB instead of 513, in 1.21 times the time.",
        command="python scripts/bench_memory.py resnet110",
        avoid="The model fits without it, or does not fit even with it.",
        audit="Memory is short by a part of what `full` saves.",
    ),
    _checkpointing(
        name="selective checkpointing",
        on=("checkpointing=selective",),
        why="Only norms, activations and dropout are recomputed: they take much memory, little arithmetic.",
        claim="Large transformers: a fifth of the activations' memory for a tenth of full recomputation's "
        "time, beside sequence parallelism, which ptfast lacks.",
        source="Korthikanti et al. 2022, arXiv:2205.05198; torch's create_selective_checkpoint_contexts.",
        measured="ResNet-110 keeps 386 MiB instead of 513 for its backward pass, in 1.19 times the time.",
        command="python scripts/bench_memory.py resnet110",
        avoid="Launches or Python are the bottleneck: every operation of a block goes through Python twice.",
        audit="Checkpointing of whole blocks where matrix products make up most of the forward pass.",
    ),
    _checkpointing(
        name="memory budget of the compiler",
        kind="reordered",
        on=("compile=model", "checkpointing=budget"),
        why="Over the whole graph, the compiler recomputes what frees the most memory for the least work.",
        claim="A transformer takes 50 % less memory by computing pointwise operations alone again.",
        source="PyTorch blog, March 2025, 'Current and New Activation Checkpointing Techniques in PyTorch'.",
        measured="A compiled GPT of 12 blocks at budget 0.5 keeps 209 of 418 MiB, in 0.98 of the time.",
        command="python scripts/bench_memory.py gpt --compile --batch-size 4",
        avoid="The model is not compiled, or its graph breaks inside blocks.",
        audit="A compiled model whose memory limits the batch.",
        needs=("compiler",),
        trial=("compile=model", "model=resnet_digits", "model.width=4", "optimizer.lr=0.01"),
    ),
)

FAMILY = Family(
    name="checkpointing",
    rules=(what_the_mode_needs,),
    unused=(
        Unused.unless("checkpointing.mode", ("every_n",), "checkpointing.every"),
        Unused.unless("checkpointing.mode", ("budget",), "checkpointing.memory_budget"),
        Unused.unless("checkpointing.mode", ("full", "every_n", "selective"), "checkpointing.blocks"),
    ),
    panel=panel,
    techniques=TECHNIQUES,
)
