"""Records of what is small at first and grows while training goes on."""

from __future__ import annotations

from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.errors import PtfastError
from ptfast.core.sections.coerce import POSITIVE, InUnit
from ptfast.core.sections.section import Count, Family, OrAuto, Section, Unused, longer_than_run


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


FAMILY = Family(
    rules=(growth_within_run,),
    unused=(
        Unused(("curriculum.over",), _grows, "where nothing grows", "curriculum.batch_size_from=auto, say"),
        Unused.without("curriculum.image_size_from", "auto", "curriculum.image_size_multiple"),
        Unused.without("curriculum.length_from", "auto", "curriculum.length_multiple"),
    ),
    panel=lambda resolved: {"curriculum": "; ".join(resolved.curriculum) or None},
)
