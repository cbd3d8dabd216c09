"""Change the learning rate over a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from ptfast.core.auto_choices import AutoChoices
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import InUnit
from ptfast.core.sections.section import Family, TargetSection, longer_than_run


class Schedule(TargetSection):
    """How the learning rate changes over the run."""

    warmup: Annotated[Duration, InUnit("steps")] = Duration(0, "steps")
    """Length of the linear warm-up, such as `5%` or `200steps`."""


def durations_that_fit(schedule: Schedule, epochs: int | None, steps: int | None) -> Iterator[PtfastError]:
    """Reject a warm-up longer than the run, and milestones of one unit that do not increase."""
    if problem := longer_than_run("schedule.warmup", schedule.warmup, epochs, steps):
        yield problem
    values = schedule.target.kwargs.get("milestones")
    if not isinstance(values, (list, tuple)):
        return
    units = {value.unit for value in values if isinstance(value, Duration)}
    numbers = [value.value if isinstance(value, Duration) else value for value in values]
    if len(units) <= 1 and numbers != sorted(numbers):
        what = "milestones must be in increasing order"
        yield ConfigError("C011", what, key="schedule.milestones", value=values)


def panel(schedule: Schedule, choices: AutoChoices) -> dict[str, object]:
    """Describe the schedule, its main settings and the warm-up."""
    words = [schedule.target.path.rsplit(".", 1)[-1]]
    if (rise := schedule.target.kwargs.get("rise")) is not None:
        words.append(f"rises for {rise}")
    if (decay := schedule.target.kwargs.get("decay")) is not None:
        words.append(f"decays over the last {decay}")
    if (patience := schedule.target.kwargs.get("patience")) is not None:
        words.append(f"patience {patience}")
    if schedule.warmup.value:
        words.append(f"warm-up {schedule.warmup}")
    momentum = choices.get("momentum")
    return {"schedule": ", ".join(words + ([f"momentum {momentum}"] if momentum else []))}


FAMILY = Family(
    rules=(durations_that_fit,),
    panel=panel,
)
