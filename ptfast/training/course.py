"""How a run goes through its data: the steps, what grows on the way, and durations in steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo
from ptfast.data.loaders.train_loader import Transform
from ptfast.data.sampling.sampler import smallest_micro_batch
from ptfast.techniques.curriculum import Curriculum
from ptfast.techniques.curriculum.growing_sizes import build_cut, build_resize, describe_batch_sizes


@dataclass
class Course:
    """How a run goes through its data, and what grows on the way."""

    plan: BatchPlan
    """Which samples make up each step."""
    total_steps: int
    transforms: list[Transform] = field(default_factory=list)
    """Applied to each micro-batch, on the device."""
    notes: list[str] = field(default_factory=list)
    """A line for each thing that grows, for the panel."""
    spans_run: bool = False
    """True if a longer run would begin with other sizes."""

    def steps(self, key: str, duration: Duration) -> int:
        """How many steps `duration`, the value of `key`, takes.

        Raises:
            ConfigError: C011 for a unit that this data cannot be counted in.
        """
        with _naming(key, duration):
            return self.plan.steps(duration, self.total_steps)

    def every(self, key: str, duration: Duration | Literal["auto"], times: int = 10) -> Sequence[int]:
        """The steps at which something recurs that happens every `duration`, the value of `key`.

        Args:
            times: how often in a run where `duration` leaves it open.

        Raises:
            ConfigError: C011 for a unit that this data cannot be counted in.
        """
        # One epoch, the default, says nothing where there are none.
        if duration == "auto" or (self.plan.size is None and duration == Duration(1, "epochs")):
            duration = Duration(math.ceil(self.total_steps / times), "steps")
        with _naming(key, duration):
            return self.plan.every(duration, self.total_steps)


def build_course(
    curriculum: Curriculum, plan: BatchPlan, info: DataInfo, model: nn.Module, total_steps: int
) -> Course:
    """Set out what is small at first.

    Args:
        model: as built, on the CPU; where images are to grow it is tried on small ones.

    Raises:
        ConfigError: C011 for what this data or model cannot have.
    """
    course = Course(plan, total_steps)
    # All that grows has grown by the same step.
    over_steps = plan.sizes.starts[-1]
    if plan.grows:
        course.notes.append(describe_batch_sizes(plan.sizes))
    elif (curriculum.image_size_from, curriculum.length_from) != (None, None):
        over_steps = course.steps("curriculum.over", curriculum.over)
    if curriculum.image_size_from is not None:
        first, multiple = curriculum.image_size_from, curriculum.image_size_multiple
        course.transforms.append(resize := build_resize(first, multiple, over_steps, info, model))
        course.notes.append(resize.describe())
    if curriculum.length_from is not None:
        first, multiple = curriculum.length_from, curriculum.length_multiple
        course.transforms.append(cut := build_cut(first, multiple, over_steps, info))
        course.notes.append(cut.describe())
    course.spans_run = bool(course.notes) and curriculum.over.unit == "percent"
    return course


@contextlib.contextmanager
def _naming(key: str, duration: Duration) -> Iterator[None]:
    """Say of a duration that cannot be counted which key it belongs to."""
    try:
        yield
    except ValueError as error:
        raise ConfigError("C011", str(error), key=key, value=duration) from error


def count_steps(plan: BatchPlan, epochs: int | None, steps: int | None) -> int:
    """Optimizer steps of the whole run, of which either `epochs` or `steps` says the length.

    Raises:
        ConfigError: C016 when only epochs are given and the data has no length.
    """
    if steps is not None:
        return steps
    assert epochs is not None
    if plan.size is None:
        hint = "Iterable data has no epochs: set steps=1000, say"
        raise ConfigError("C016", "the number of steps is not known", key="steps", suggestion=hint)
    return plan.steps(Duration(epochs, "epochs"), None)


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
