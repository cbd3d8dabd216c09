"""A training run: its parts, its settings, and its progress."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ptfast.core.auto_choices import AutoChoices
from ptfast.core.clock import Clock
from ptfast.core.distributed import Ranks
from ptfast.core.plain_display import Display
from ptfast.core.protocols import Callback, DataInfo, Logger, Stateful, StepBatch, Task, hooks
from ptfast.core.run_records import Progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ptfast.config.schema import Eval, Saving, Stop
    from ptfast.data.loaders.build_loaders import EvaluationLoader, Loader
    from ptfast.optim.parameter_groups import Freezing
    from ptfast.techniques.backend.garbage_collection import Collector
    from ptfast.techniques.compile.compilation import Compilation
    from ptfast.techniques.ema.weight_averages import Average
    from ptfast.techniques.numerics import Numerics
    from ptfast.techniques.precision.mixed_precision import MixedPrecision
    from ptfast.techniques.schedule.scheduled_run import RunSchedule


@dataclass(frozen=True)
class LoopIntervals:
    """The optimizer steps, ascending, after which the loop logs, evaluates or saves."""

    log_steps: Sequence[int]
    eval_steps: Sequence[int]
    save_steps: Sequence[int]
    switch_steps: Sequence[int] = ()
    """Steps before which parameters freeze or thaw."""
    epoch_steps: Sequence[int] = ()
    """Steps that end an epoch, if a callback asks for them."""

    def next_stop(self, step: int, total_steps: int) -> int:
        """Return the first step after `step` at which something is due."""
        all_steps = self.log_steps, self.eval_steps, self.save_steps, self.switch_steps, self.epoch_steps
        later = (steps[bisect_right(steps, step) :] for steps in all_steps)
        return min([total_steps, *(steps[0] for steps in later if steps)])


@dataclass(frozen=True)
class RunPlan:
    """The training settings in steps and samples, derived from the config, the data and the task."""

    seed: int
    total_steps: int
    intervals: LoopIntervals
    best_metric: str
    """The metric that ranks evaluations, in the form of `stop.metric`."""
    followed: tuple[str, str]
    """The split and the name of that metric."""
    best_mode: str
    batch_size: int
    """Samples per optimizer step, over all ranks."""
    max_time_s: float | None
    stop: Stop
    saving: Saving
    numerics: Numerics
    debug: str
    log_norm: bool
    freezes_statistics: bool
    """Whether BatchNorm in frozen layers keeps its running statistics."""


@dataclass(kw_only=True, eq=False, repr=False)
class Run:
    """Everything the loop needs: the parts, the plan and the progress.

    The stages of `ptfast.training.build.build` set the attributes without a default. Callbacks may read all
    attributes, and set those outside `plan`. For example, `stop_signal` ends training after the step.
    """

    folder: Path
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    clock: Clock = field(default_factory=Clock)
    display: Display = field(default_factory=Display)
    logger: Logger = field(default_factory=Logger)
    choices: AutoChoices = field(default_factory=AutoChoices)
    """The value chosen for each `auto`; each stage adds its own."""

    model: nn.Module = field(init=False)
    """The unwrapped model, whose parameter names checkpoints use."""
    forward: Any = None
    """The model that the loop calls: wrapped if there are several ranks."""
    wrap: Callable[[], Any] = field(init=False)
    """Builds `forward`; called again when parameters freeze or thaw, which wrappers do not notice."""
    task: Task = field(init=False)
    info: DataInfo = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    schedule: RunSchedule = field(init=False)
    precision: MixedPrecision = field(init=False)
    clip: Callable[[], Any] | None = None
    ema: Average | None = None
    compilation: Compilation | None = None
    freezing: Freezing | None = None
    """None if the same parameters train throughout."""
    collector: Collector = field(init=False)
    train_loader: Loader = field(init=False)
    eval_loaders: dict[str, EvaluationLoader] = field(default_factory=dict)
    """The loaders of the evaluated splits, by split."""
    unreadable: Callable[[], list[str]] | None = None
    """Returns the names of the files skipped so far; None if an unreadable file ends the run."""
    seed_step: Callable[[int, int], None] = field(init=False)
    """Seeds dropout and other random operations from the run's seed, the step, and the micro-batch."""
    callbacks: list[Callback] = field(default_factory=list)
    debug_aids: list[Callback] = field(default_factory=list)
    """Called after the callbacks' `on_step`, and never saved."""
    watch_batches: Callable[[Iterator[StepBatch]], Iterator[StepBatch]] | None = None
    """Observes the training batches as they pass."""
    counter: Any = None
    """Counts the operators of a step (`ptfast.profiling.operator_counting.StepCounter`)."""
    flush: Callable[[], None] = lambda: None
    """Reads and logs training metrics still being copied from the device; raises N001 like the loop."""
    remedy: Callable[[], str | None] = lambda: None
    """Suggests how to make the model fit the data, after its first forward pass has failed."""
    data_note: str = ""
    """The data in one line, for the panel."""

    evaluation: Eval = field(init=False)
    plan: RunPlan = field(init=False)
    stateful: dict[str, Stateful] = field(init=False)
    """The parts saved in checkpoints besides the weights, by name."""
    checkpointer: Any = field(init=False)
    """Saves and restores the run (`ptfast.training.checkpointer.Checkpointer`); its `writer` writes files."""

    progress: Progress = field(default_factory=Progress)
    """How far training is; saved with the weights."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """The latest metrics of each split."""
    best_metrics: dict[str, float] = field(default_factory=dict)
    outputs_checked: bool = False
    """Whether this process has checked the outputs of an evaluation."""
    slow_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Ranks that the others wait for: the first such `step`, the `cause`, and how much `slower` steps are."""
    resumed_note: str = ""
    """Notes on resuming, for the panel."""
    stop_reason: str | None = None
    """Why training ended before its last step."""
    stop_signal: int | None = None
    """Set by a signal handler; the loop ends after the current step."""
    num_batches: int = 0
    """Batches received so far in training and evaluation; a hanging run receives none."""
    waits: Literal["alone", "together"] | None = None
    """Set while waiting for data: a signal ends the wait of this rank `alone`, or of all ranks `together`."""

    @property
    def total_steps(self) -> int:
        return self.plan.total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        self.plan = replace(self.plan, total_steps=steps)

    @property
    def seed(self) -> int:
        return self.plan.seed

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step, over all ranks."""
        return self.choices.get("micro_batches")

    @property
    def epoch(self) -> float:
        """Epochs trained so far; 0 if the data has no length."""
        return self.train_loader.plan.epoch_at(self.progress.step)

    @property
    def evaluated_weights(self) -> dict[str, str]:
        """The weights that evaluations use, under the key `weights`; empty if the run averages none."""
        return {} if self.ema is None else {"weights": "averaged" if self.ema.ready else "last"}

    @property
    def sharded(self) -> bool:
        """True if each rank has a shard of the weights: all ranks must then call the model together."""
        return getattr(self.forward, "sharded", False)

    def uncompiled(self) -> AbstractContextManager[Any]:
        """Return a context in which the model runs uncompiled, for forward passes outside training."""
        if self.compilation is None:
            return nullcontext()
        import torch

        return torch.compiler.set_stance("force_eager")

    def call_back(self, hook: str, *facts: Any) -> None:
        """Call the method `hook` of the callbacks that have it."""
        if methods := hooks(self.callbacks, hook):
            self.clock.to("callbacks")
            for method in methods:
                method(self, *facts)
            self.clock.to(None)

    def close(self) -> None:
        """Stop the processes that load the data."""
        for loader in (self.train_loader, *self.eval_loaders.values()):
            loader.close()
