"""A run as the loop takes it: what was built, its settings, what `auto` became, and how it stands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ptfast.core import run_directory
from ptfast.core.clock import Clock
from ptfast.core.distributed import Ranks
from ptfast.core.protocols import Callback, DataInfo, EvalLoader, StepBatch, Task, TrainLoader, Watched, hooks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

LEAST_STEPS, LEAST_S = 5, 2.0
"""Fewer steps or seconds after the warm-up give no throughput: a neighbour's burst would make it."""


@dataclass(kw_only=True)
class Resolved:
    """The content of `resolved.json`: what `auto` became, and other facts for a resumed run and the panel.

    Resolved once, by the first rank, and taken from the file when the run is resumed. A field at its default
    is not resolved yet.
    """

    task: str = ""
    task_reason: str = ""
    """The labels' trait that implies it; empty where the config names the task."""
    device: str = ""
    """Its type."""
    num_ranks: int = 0
    micro_batches: int = 0
    threads: int = 0
    threads_reason: str = ""
    """Why `auto` took fewer than there are cores; empty where it did not."""
    interop_threads: int = 0
    cudnn_benchmark: bool | None = None
    deterministic: bool = False
    holds_memory: bool = False
    """What the CPU frees is held for the next step."""
    flushes_denormals: bool = False
    """The CPU takes numbers below 1e-38 for 0."""
    precision: str = ""
    matmul_precision: str = ""
    float8: list[str] = field(default_factory=list)
    """Layers that multiply in float8."""
    channels_last: bool | None = None
    dropped_biases: dict[str, str] | None = None
    """Layers whose bias was dropped, and the BatchNorm that subtracts it."""
    checkpointed: list[str] = field(default_factory=list)
    compile_dynamic: bool | None = None
    shards: list[str] = field(default_factory=list)
    dataloader: str = ""
    dataloader_reason: str = ""
    workers: int = 0
    worker_threads: int = 0
    side_stream: bool = False
    read_ahead: bool = False
    sampling: str | None = None
    """How samples are drawn, in words; None where each comes once in an epoch."""
    padding: str | None = None
    padding_share: float | None = None
    """Of the tokens of an epoch, in [0, 1]; None where nothing is padded."""
    optimizer: str = ""
    """Which kernels take its step."""
    lr_scaling: str | None = None
    momentum: str | None = None
    """Its treatment by the schedule, in words."""
    curriculum: list[str] = field(default_factory=list)
    """A line for each thing that grows."""
    total_steps: int = 0

    @classmethod
    def read(cls, folder: Path, facts: Mapping[str, Any] | None = None) -> Resolved:
        """Read from a run directory; nothing is resolved without a file, and unknown keys are passed over.

        Args:
            facts: of a state of that run, which repeats the file and stands in where it is gone.
        """
        known = {each.name for each in fields(cls)}
        found = run_directory.read_json(folder / run_directory.RESOLVED) or (facts or {}).get("resolved", {})
        return cls(**{name: value for name, value in found.items() if name in known})

    def write(self, folder: Path) -> None:
        """Keep it in a run directory; called on the first rank."""
        run_directory.write_json(folder / run_directory.RESOLVED, asdict(self))


def unless_resolved(wanted: Any, before: Any) -> Any:
    """The value in the config, or what its `auto` was resolved to before."""
    return before or wanted if wanted == "auto" else wanted


@dataclass
class Progress:
    """Where a run stands; saved with the weights and restored with them."""

    step: int = 0
    samples: int = 0
    best_value: float | None = None
    best_step: int | None = None
    evaluations_without_gain: int = 0
    timed_steps: int = 0
    """Steps that its speed is computed from, over all attempts: none that warm up or that are measured."""
    timed_samples: int = 0
    timed_s: float = 0.0
    """Seconds that those steps took."""
    window_loss: float = 0.0
    """Sum of the item losses since the last log line, so that a resumed run logs the same figure."""
    window_items: float = 0.0
    epoch_loss: float = 0.0
    """Sum of the item losses since the last evaluation, without the open window."""
    epoch_items: float = 0.0
    evaluation_due: bool = False
    """The evaluation of this step is still to be made."""
    skipped_steps: int = 0
    """Steps that were left out because fp16 gradients overflowed."""
    skipped_before: int = 0
    """The same before the last step: how far the schedule is behind in the next one."""
    skipped_logged: int = 0
    """The same at the last log line."""

    @property
    def samples_per_s(self) -> float | None:
        """Training samples a second, warm-up left out; None where the run was too short."""
        enough = self.timed_steps >= LEAST_STEPS and self.timed_s >= LEAST_S
        return self.timed_samples / self.timed_s if enough else None


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


class Schedule(Protocol):
    """Learning-rate factors and momenta, by step."""

    def begins_like(self, total_steps: int, num_steps: int) -> bool: ...
    def lr_factors(self, first: int, last: int) -> list[float]: ...
    def momenta(self, first: int, last: int) -> list[float] | None: ...


class Precision(Protocol):
    """The number formats of a run."""

    @property
    def enabled(self) -> bool: ...
    @property
    def scaler(self) -> torch.amp.GradScaler | None: ...
    @property
    def warning(self) -> str | None: ...
    def autocast(self) -> AbstractContextManager[object]: ...
    def describe(self) -> str: ...


class Average(Protocol):
    """The average of the weights."""

    extendable: bool

    @property
    def ready(self) -> bool: ...
    def update(self, step: int, skipped: Tensor | None = None) -> None: ...
    def settle(self, watched: Watched = ...) -> None: ...
    def swapped(self) -> AbstractContextManager[None]: ...
    def copy_to_model(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def describe(self) -> str: ...


class Compilation(Protocol):
    """The part of torch.compile."""

    def plain(self) -> AbstractContextManager[Any]: ...
    def booking(self, clock: Clock) -> AbstractContextManager[None]: ...
    def start(self, seconds: float) -> tuple[str, bool]: ...
    def complaint(self, step_s: float, num_steps: int) -> str | None: ...
    def describe(self) -> str: ...
    def report(self) -> dict[str, Any]: ...


class Freezing(Protocol):
    """When which parameters train."""

    extendable: bool
    switch_steps: tuple[int, ...]

    def apply(self, step: int) -> bool: ...


class Marks(Protocol):
    """Where the passes over iterable data began."""

    def state(self, step: int) -> dict[str, int]: ...
    def load(self, state: dict[str, int], step: int) -> str: ...


class Display(Protocol):
    """The terminal."""

    def status(self, text: str, left_s: float | None = None) -> AbstractContextManager[None]: ...
    def start(
        self, step: int = 0, total_steps: int | None = None, steps_per_epoch: int | None = None
    ) -> None: ...
    def progress(self, step: int, epoch: float, figures: dict[str, Any]) -> None: ...
    def evaluation(
        self, step: int, epoch: float, split: str, figures: dict[str, Any], is_best: bool = False
    ) -> None: ...
    def note(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...


class Logger(Protocol):
    """A sink for figures."""

    def log(self, record: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


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
    schedule: Schedule
    precision: Precision
    clip: Callable[[], Any] | None
    ema: Average | None
    compilation: Compilation | None
    """None where nothing is compiled."""
    freezing: Freezing | None
    """None where the same parameters train throughout."""
    train_loader: TrainLoader
    eval_loaders: dict[str, EvalLoader]
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
    """Counts the operators of a step (`ptfast.profiling.limits.step_counting`)."""
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
