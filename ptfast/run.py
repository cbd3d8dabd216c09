"""A run as the loop takes it: what was built, its settings, and how it stands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ptfast.core.clock import Clock
from ptfast.core.distributed import Ranks
from ptfast.core.plain_display import Display
from ptfast.core.protocols import Callback, DataInfo, Logger, StepBatch, Task, hooks
from ptfast.core.resolved import Progress, Resolved

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ptfast.data.loaders.build_loaders import EvaluationLoader, Loader
    from ptfast.data.streams.stream_loaders import Marks
    from ptfast.optim.parameter_groups import Freezing
    from ptfast.techniques.compile.compilation import Compilation
    from ptfast.techniques.ema.weight_averages import Average
    from ptfast.techniques.precision.number_formats import NumberFormats
    from ptfast.techniques.schedule.scheduled_run import LrSchedule


@dataclass
class Cadence:
    """After which optimizer steps, rising, the host looks up from training."""

    log_steps: Sequence[int]
    eval_steps: Sequence[int]
    save_steps: Sequence[int]
    switch_steps: Sequence[int] = ()
    """Steps before which parameters freeze or thaw."""
    epoch_steps: Sequence[int] = ()
    """Steps that end an epoch, where a callback asks for them."""

    def next_stop(self, step: int, total_steps: int) -> int:
        """The first step after `step` at which something is due."""
        all_steps = self.log_steps, self.eval_steps, self.save_steps, self.switch_steps, self.epoch_steps
        later = (steps[bisect_right(steps, step) :] for steps in all_steps)
        return min([total_steps, *(steps[0] for steps in later if steps)])


@dataclass(kw_only=True)
class Settings:
    """The config's settings of the loop, in steps and samples."""

    seed: int
    total_steps: int
    batch_size: int
    micro_batches: int
    """Of a step, over all ranks."""
    cadence: Cadence
    best_metric: str
    best_mode: str
    patience: int | None
    """Evaluations without gain after which training stops."""
    max_time_s: float | None
    keep_best: bool
    keep_states: int
    """Newest states that are kept on disk."""
    debug: str = "none"
    """The debugging aid that was asked for."""
    log_norm: bool = False
    """Log the norm of the gradients."""
    flip: bool = False
    """Average over each image and its mirror image in evaluations."""
    shift: int = 0
    """Pixels by which images are moved, for evaluations to average over; 0 for none."""
    full_size: int | None = None
    """Samples that smaller batches of an evaluation are filled up to; None where they stay as they are."""


@dataclass
class Status:
    """How a run stands while it trains; `progress` is saved."""

    progress: Progress = field(default_factory=Progress)
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    """The newest figures of each split."""
    best_figures: dict[str, float] = field(default_factory=dict)
    resumed_note: str = ""
    """Notes on resuming, for the panel."""
    stop_reason: str | None = None
    """Why training ended before its last step."""
    stop_signal: int | None = None
    """Set by a signal handler; the loop ends after the step it is in."""
    batches: int = 0
    """Batches that came, of training and evaluation: what a run that hangs adds nothing to."""
    waits: Literal["alone", "together"] | None = None
    """In a wait for data that a signal may end: by this rank's own decision, or by that of all."""


@dataclass(kw_only=True)
class Run:
    """Everything the loop needs: the parts that `build` has made, and how it is to use them."""

    settings: Settings
    resolved: Resolved
    status: Status = field(default_factory=Status)

    folder: Path
    device: torch.device
    ranks: Ranks
    clock: Clock
    display: Display
    logger: Logger

    model: nn.Module
    """The plain model; its parameter names are the saved ones."""
    forward: Any
    """The model as the loop calls it, wrapped for its ranks where there are several."""
    wrap: Callable[[], Any]
    """Wraps the model for its ranks; anew where parameters freeze or thaw, which wrappers do not notice."""
    task: Task
    info: DataInfo
    optimizer: torch.optim.Optimizer
    schedule: LrSchedule
    precision: NumberFormats
    clip: Callable[[], Any] | None
    ema: Average | None
    compilation: Compilation | None
    """None where nothing is compiled."""
    freezing: Freezing | None
    """None where the same parameters train throughout."""
    train_loader: Loader
    eval_loaders: dict[str, EvaluationLoader]
    marks: Marks | None
    """None for data that is not iterable."""
    unreadable: Callable[[], list[str]] | None
    """Names the files that were left out so far; None where one that cannot be read ends the run."""
    seed_step: Callable[[int, int, int], None]
    """Seeds dropout and its like from (seed, step, micro-batch)."""
    callbacks: list[Callback]
    watchers: list[Callback] = field(default_factory=list, init=False)
    """Debugging aids: called after the callbacks' `on_step`, and never saved."""
    watch: Callable[[Iterator[StepBatch]], Iterator[StepBatch]] | None = None
    """Looks at the training batches as they pass."""
    counter: Any = None
    """Counts the operators of a step (`ptfast.profiling.operator_counting`)."""
    data_note: str = ""
    """The data in one line, for the panel."""
    groups_note: str | None = None
    """The demands on single parameters, for the panel."""
    remedy: Callable[[], str | None] = lambda: None
    """Says what makes the model fit the data, for when its first forward pass fails."""

    @property
    def progress(self) -> Progress:
        """Its progress, which is saved."""
        return self.status.progress

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """The newest figures of each split."""
        return self.status.figures

    @property
    def epoch(self) -> float:
        """Epochs trained so far; 0 where the data has no length."""
        return self.train_loader.plan.epoch_at(self.progress.step)

    @property
    def total_steps(self) -> int:
        """Optimizer steps from its start to its end."""
        return self.settings.total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        self.settings.total_steps = steps

    @property
    def sharded(self) -> bool:
        """True if a rank has a part of the weights only: all have to be there when the model is used."""
        return getattr(self.forward, "sharded", False)

    @property
    def saves_together(self) -> bool:
        """True if every rank has something that is saved, and so has to take part in saving."""
        return self.sharded or getattr(self.forward, "compression", None) is not None

    def uncompiled(self) -> AbstractContextManager[Any]:
        """A context in which the model runs as it was written: forward passes that train nothing."""
        return nullcontext() if self.compilation is None else self.compilation.plain()

    def call_back(self, hook: str, *facts: Any) -> None:
        """Call the method `hook` of its callbacks."""
        if methods := hooks(self.callbacks, hook):
            self.clock.to("callbacks")
            for method in methods:
                method(self, *facts)
            self.clock.to(None)

    def close(self) -> None:
        """Stop the processes that load its data."""
        for loader in (self.train_loader, *self.eval_loaders.values()):
            loader.close()


def _forwarded(record: str, name: str) -> property:
    def read(run: Run) -> Any:
        return getattr(getattr(run, record), name)

    def write(run: Run, value: Any) -> None:
        setattr(getattr(run, record), name, value)

    return property(read, write)


# Callbacks may read and set settings and status on the run itself, where `run.stop_signal` ends training.
for _record, _kind in (("settings", Settings), ("status", Status)):
    for _each in fields(_kind):
        if _each.name not in vars(Run):
            setattr(Run, _each.name, _forwarded(_record, _each.name))
