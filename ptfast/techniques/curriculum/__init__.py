"""Start with small images or short sequences, and grow them during training."""

from __future__ import annotations

from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.errors import PtfastError
from ptfast.core.sections.coerce import POSITIVE, InUnit
from ptfast.core.sections.section import Count, Family, OrAuto, Section, Unused, longer_than_run


class Curriculum(Section):
    """Input sizes that start small and grow during training."""

    image_size_from: Count | OrAuto | None = None
    """Initial pixels of the shorter image side; `auto` for half of the full size, null for the full size."""
    image_size_multiple: Count = 32
    """Intermediate sizes are multiples of this; each size is one more shape to find kernels for."""
    length_from: Count | OrAuto | None = None
    """Initial tokens of sequences; `auto` for a quarter of the full length, null for the full length."""
    length_multiple: Count = 64
    """Intermediate lengths are multiples of this."""
    over: Annotated[Duration, InUnit("steps"), POSITIVE] = Duration(60, "percent")
    """How long the growth takes, such as `60%` or `5epochs`."""


def _grows(curriculum: Curriculum) -> bool:
    return (curriculum.image_size_from, curriculum.length_from) != (None, None)


def growth_within_run(curriculum: Curriculum, epochs: int | None, steps: int | None) -> PtfastError | None:
    """Reject a growth that takes longer than the run."""
    if not _grows(curriculum):
        return None
    return longer_than_run("curriculum.over", curriculum.over, epochs, steps)


FAMILY = Family(
    rules=(growth_within_run,),
    unused=(
        Unused(("curriculum.over",), _grows, "where nothing grows", "curriculum.image_size_from=auto"),
        Unused.without("curriculum.image_size_from", "auto", "curriculum.image_size_multiple"),
        Unused.without("curriculum.length_from", "auto", "curriculum.length_multiple"),
    ),
)
