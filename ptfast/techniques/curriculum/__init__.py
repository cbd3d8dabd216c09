"""Records of what is small at first and grows while training goes on."""

from __future__ import annotations

from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.errors import PtfastError
from ptfast.core.sections.coerce import POSITIVE, InUnit
from ptfast.core.sections.section import Count, Family, OrAuto, Section, Technique, Unused, longer_than_run


class Curriculum(Section):
    """Sizes that start small and grow in training."""

    image_size_from: Count | OrAuto | None = None
    """Pixels of the shorter side of images at first; `auto` for half of theirs, null for all."""
    image_size_multiple: Count = 32
    """Sizes in between are multiples of it; every size is one more shape to find kernels for."""
    length_from: Count | OrAuto | None = None
    """Tokens of sequences at first; `auto` for a quarter of theirs, null for all."""
    length_multiple: Count = 64
    """Lengths in between are multiples of it."""
    batch_size_from: Count | OrAuto | None = None
    """Samples of a batch at first, by which it then grows; `auto` for a quarter, null for all."""
    over: Annotated[Duration, InUnit("steps"), POSITIVE] = Duration(60, "percent")
    """How long it takes to grow to full size, such as `60%` or `5epochs`."""


def _grows(curriculum: Curriculum) -> bool:
    sizes = (curriculum.image_size_from, curriculum.length_from, curriculum.batch_size_from)
    return sizes != (None, None, None)


def growth_within_run(curriculum: Curriculum, epochs: int | None, steps: int | None) -> PtfastError | None:
    """Refuse growing for longer than the run."""
    if not _grows(curriculum):
        return None
    return longer_than_run("curriculum.over", curriculum.over, epochs, steps)


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="progressive resizing",
        kind="training",
        on=("curriculum=image_size",),
        off=("curriculum=none",),
        why="A convolution costs the square of the image side, and small images teach what comes first.",
        claim="Part of ResNet-50 to 93 % top-5 on ImageNet in 18 minutes on 128 V100 (2018); EfficientNetV2 "
        "trains in less time to a higher accuracy, where regularisation grows too.",
        source="Howard, Shaw, Bulatov et al., fast.ai for DAWNBench, 2018; Tan, Le 2021, arXiv:2104.00298.",
        avoid="Models of one fixed size (an MLP, a plain ViT), detail that matters, and compiled models.",
        audit="Images of 128 pixels or more and a convolutional model trained at full size for many epochs.",
        needs=("images", "convolutions"),
        trial=("model=resnet_digits", "optimizer.lr=0.005"),
    ),
    Technique(
        name="sequence length warm-up",
        kind="training",
        on=("curriculum.length_from=auto",),
        off=("curriculum.length_from=null",),
        why="Short sequences are cheaper and keep early steps stable, which allows larger batches and rates.",
        claim="GPT-2: up to 2.2 times fewer tokens and 3.7 times less time, at 8 times larger batches and 4 "
        "times larger rates, unstable without it.",
        source="Li, Zhang, He 2022, arXiv:2108.06084.",
        avoid="Short contexts and stable runs, where cutting tokens only loses data.",
        audit="Language modelling at 1,024 tokens or more that needs a long warm-up or a small rate.",
        about=("curriculum/sequence_length",),
        needs=("sequences",),
        trial=(
            "data=text_file",
            "data.path={text}",
            "data.context_length=32",
            "model=gpt",
            "model.width=32",
            "model.depth=1",
            "curriculum.length_multiple=8",
            "optimizer.lr=0.01",
        ),
    ),
    Technique(
        name="batch size warm-up",
        kind="training",
        on=("curriculum=batch_size",),
        off=("curriculum=none",),
        why="Early gradients are large against their noise, so small batches get more steps out of samples.",
        claim="Batches that grow where the rate would fall give the same curves in fewer steps (Smith); "
        "the useful batch size grows during training (McCandlish).",
        source="Smith et al. 2018, arXiv:1711.00489; McCandlish et al. 2018, arXiv:1812.06162.",
        avoid="Batches that are already small, or of the size found to be fastest on this machine.",
        audit="Batches of thousands from the first step on, with an early loss that falls no faster for it.",
    ),
)

FAMILY = Family(
    name="curriculum",
    rules=(growth_within_run,),
    unused=(
        Unused(("curriculum.over",), _grows, "where nothing grows", "curriculum.batch_size_from=auto, say"),
        Unused.without("curriculum.image_size_from", "auto", "curriculum.image_size_multiple"),
        Unused.without("curriculum.length_from", "auto", "curriculum.length_multiple"),
    ),
    panel=lambda resolved: {"curriculum": "; ".join(resolved.curriculum) or None},
    techniques=TECHNIQUES,
)
