"""Sections of the run itself; those of a part or a technique stand with it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ptfast.core.durations import Duration
from ptfast.core.sections.coerce import NOT_NEGATIVE
from ptfast.core.sections.section import Count, Every, OrAuto, Section, WallTime
from ptfast.core.sections.targets import Target


class Eval(Section):
    """When the held-out splits are evaluated."""

    test: bool = True
    """Evaluate `test` once, at the end of a run."""
    every: Every = Duration(1, "epochs")
    """How often `val` is evaluated, such as `1epochs` or `500steps`."""
    batch_size: Count | None = None
    """Samples of an evaluation's batch on each rank; null for at least 256."""
    last: Literal["keep", "drop", "pad"] = "keep"
    """Treatment of a split's last, smaller batch; `pad` fills it with stand-ins that do not count."""
    flip: bool = False
    """Average what the model says of an image and of its mirror image; predictions too."""
    shift: Annotated[int, NOT_NEGATIVE] = 0
    """Average also over images moved by so many pixels up and left, and down and right; 0 for none."""


class Stop(Section):
    """When training ends before its last step."""

    patience: Count | None = None
    """Stop after so many evaluations without a better one; null never stops early."""
    metric: str | None = None
    """The figure that `best` and `patience` follow; null for the task's own."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Which way that figure is better; `auto` goes by its name."""


class RunOptions(Section):
    """Folder of the run, the state it resumes from, and its time limit."""

    name: str | None = None
    """Folder under `run.root`; null for the recipe's name."""
    root: str = "runs"
    """Folder of all runs."""
    dir: str | None = None
    """The run's own folder; null for a new one under `run.root`."""
    resume: Literal["auto", "never"] | str = "never"
    """`never`, `auto` (the newest unfinished run of this config), or a state folder to resume from."""
    max_time: WallTime | None = None
    """Save and leave after so much wall time, such as `2h`."""


class Sweep(Section):
    """The figure by which the runs of a sweep are ranked, and how many run at a time."""

    metric: str = "auto"
    """The figure that runs are ranked by, such as `val.loss`; `auto` for what `best` follows."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Which way it is better; `auto` goes by its name."""
    parallel: Count | OrAuto = 1
    """Runs at a time, each on a GPU of its own where there are several; `auto` for one per GPU."""


class Saving(Section):
    """When states are saved, and how many are kept."""

    every: Every = Duration(1, "epochs")
    """How often the state is saved, such as `1epochs` or `500steps`."""
    keep: Count = 1
    """Newest states that are kept."""
    best: bool = True
    """Keep the state of the best evaluation too."""


class LoggerSection(Section):
    """Where figures go besides metrics.jsonl."""

    target: Target | None = None
    several: dict[str, Target] = Field(default_factory=dict)

    @property
    def targets(self) -> dict[str, Target]:
        """Every logger, by the key of its section."""
        one = {} if self.target is None else {"logger": self.target}
        return one | {f"logger.{name}": target for name, target in self.several.items()}
