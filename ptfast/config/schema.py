"""The typed schema of a whole config, and the keys that may change between a run and its continuation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field

from ptfast.config.checks.former_keys import in_todays_keys
from ptfast.config.families import FAMILIES
from ptfast.core.durations import Duration
from ptfast.core.sections.coerce import POSITIVE, InUnit, Range
from ptfast.core.sections.origins import is_ours
from ptfast.core.sections.secret_values import SECRET, is_secret
from ptfast.core.sections.section import (
    GATHERED,
    Count,
    Every,
    EveryOrTime,
    Natural,
    OrAuto,
    Section,
    WallTime,
)
from ptfast.core.sections.targets import Target, plain
from ptfast.data import DataSection
from ptfast.data.loaders import Dataloader
from ptfast.data.sampling import Batching, Sampling
from ptfast.data.transforms import AugmentSection
from ptfast.models import Model
from ptfast.optim import Optimizer
from ptfast.tasks import TaskSection
from ptfast.techniques.backend import Backend
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.compile import Compile
from ptfast.techniques.curriculum import Curriculum
from ptfast.techniques.debug import Debug
from ptfast.techniques.ema import Ema
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.numerics import Numerics
from ptfast.techniques.parallel import Parallel
from ptfast.techniques.precision import Precision
from ptfast.techniques.rewrites import Rewrites
from ptfast.techniques.schedule import Schedule


class Eval(Section):
    """When and how the held-out splits are evaluated."""

    test: bool = True
    """Evaluate `test` once, at the end of a run."""
    every: Every = Duration(1, "epochs")
    """How often `val` is evaluated, such as `1epochs` or `500steps`."""
    batch_size: Count | None = None
    """Evaluation batch size of each rank; null for at least 256."""
    flip: bool = False
    """Average the outputs for an image and its mirror image; predictions too."""
    shift: Natural = 0
    """Also average over images shifted by this many pixels up-left and down-right; 0 for none."""


class Stop(Section):
    """When training ends before its last step."""

    patience: Count | None = None
    """Stop after this many evaluations without improvement; null never stops early."""
    metric: str | None = None
    """The metric that `best` and `patience` follow; null for the task's own."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better; `auto` goes by the metric's name."""


class RunOptions(Section):
    """Folder of the run, the checkpoint it resumes from, and its time limit."""

    name: str | None = None
    """Folder under `run.root`; null for the recipe's name."""
    root: str = "runs"
    """Folder of all runs."""
    dir: str | None = None
    """The run's own folder; null for a new one under `run.root`."""
    resume: Literal["auto", "never"] | str = "never"
    """`never`, `auto` (the newest unfinished run of this config), or a checkpoint to resume from."""
    max_time: WallTime | None = None
    """Save and end the run after this wall time, for example `2h`."""
    hang_timeout: OrAuto | WallTime = "auto"
    """End with exit code 7 after this time without progress, for example `10m`; `auto` only reports hangs."""


class Sweep(Section):
    """The metric by which the runs of a sweep are ranked, and how many run at a time."""

    metric: str = "auto"
    """The metric that ranks the runs, for example `val.loss`; `auto` for the metric of `best`."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better; `auto` goes by the metric's name."""
    parallel: Count | OrAuto = 1
    """Runs at the same time, each on its own GPU if there are several; `auto` for one per GPU."""


class Saving(Section):
    """When checkpoints are saved, and how many are kept."""

    every: EveryOrTime = Duration(1, "epochs")
    """Interval between checkpoints, for example `1epochs`, `500steps` or `10m`."""
    background: bool | OrAuto = "auto"
    """Write while training continues; `auto` for large checkpoints whose copy fits into memory."""
    keep: Count = 1
    """Newest checkpoints that are kept."""
    best: Natural | bool = 1
    """Best checkpoints that are kept in addition; 0 or `false` keeps no best one."""


class LoggerSection(Section):
    """Where metrics go in addition to metrics.jsonl."""

    target: Target | None = None
    several: dict[str, Target] = Field(default_factory=dict)

    @property
    def targets(self) -> dict[str, Target]:
        """Every logger, by the key of its section."""
        one = {} if self.target is None else {"logger": self.target}
        return one | {f"logger.{name}": target for name, target in self.several.items()}


FREE_KEYS = (
    *("recipe", "preset", "trust", "epochs", "steps", "log_every", "device", "metrics"),
    *("run", "eval", "evals", "stop", "sweep", "saving", "logger"),
    *(key for family in FAMILIES for key in family.free_keys),
)
"""Keys and sections that may change between a run and its continuation."""
DATA_PLACES = tuple(
    f"data.{name}" for name in ("root", "path", "targets", "shards", "val_shards", "test_shards")
)
"""Locations of built-in data, which may change: its content is compared instead."""
VARIABLES = "vars"
"""The section that only interpolations read."""


class Config(Section):
    """The checked config of a whole run. Built by `validate`, which knows where each value was given."""

    recipe: str | None = None
    preset: str = "safe"
    """A named set of defaults, which the recipe overrides."""
    vars: dict[str, Any] = Field(default_factory=dict)
    """Variables of your own, which other keys refer to as `${vars.NAME}`."""
    task: TaskSection = Field(default_factory=TaskSection)
    epochs: Count | None = None
    """Passes over the training data; null if `steps` sets the length."""
    steps: Count | None = None
    """Optimizer steps; null if `epochs` sets the length."""
    batch_size: Count
    """Samples of one optimizer step, over all ranks and micro-batches."""
    micro_batches: Count | None = None
    """Parts that a batch is split into; null for ranks x `gradients.accumulate`."""
    determinism: Literal["same_ranks", "elastic"] = "same_ranks"
    """`elastic` gives the same bits on any number of ranks that divides `micro_batches`."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of everything random."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """`auto` uses a GPU if there is one."""
    log_every: OrAuto | Annotated[Duration, InUnit("steps"), POSITIVE] = "auto"
    """Interval between logged metrics, for example `50steps`; `auto` logs a hundred times a run."""
    trust: list[str] = Field(default_factory=list)
    """Packages that a config you did not write may import."""
    callbacks: list[Target] = Field(default_factory=list)
    """Classes called during training: an import path, or a mapping with `_target_`."""
    metrics: dict[str, Target] = Field(default_factory=dict)
    """Further metrics by name: an import path such as `torchmetrics.AUROC`, or a mapping."""
    eval: Eval = Field(default_factory=Eval)
    stop: Stop = Field(default_factory=Stop)
    run: RunOptions = Field(default_factory=RunOptions)
    sweep: Sweep = Field(default_factory=Sweep)
    data: DataSection
    evals: dict[str, DataSection] = Field(default_factory=dict)
    """Further evaluation sets by name; each inherits the keys of `data` that it does not set."""
    model: Model
    dataloader: Dataloader = Field(default_factory=Dataloader)
    sampling: Sampling = Field(default_factory=Sampling)
    batching: Batching = Field(default_factory=Batching)
    augment: AugmentSection = Field(default_factory=AugmentSection)
    curriculum: Curriculum = Field(default_factory=Curriculum)
    precision: Precision = Field(default_factory=Precision)
    optimizer: Optimizer
    schedule: Schedule
    gradients: Gradients = Field(default_factory=Gradients)
    parallel: Parallel = Field(default_factory=Parallel)
    checkpointing: Checkpointing = Field(default_factory=Checkpointing)
    rewrites: Rewrites = Field(default_factory=Rewrites)
    compile: Compile = Field(default_factory=Compile)
    numerics: Numerics = Field(default_factory=Numerics)
    ema: Ema = Field(default_factory=Ema)
    backend: Backend = Field(default_factory=Backend)
    debug: Debug = Field(default_factory=Debug)
    saving: Saving = Field(default_factory=Saving)
    logger: LoggerSection = Field(default_factory=LoggerSection)


def section_of(annotation: Any) -> type[Section] | None:
    """Return the section class of a field of `Config`, or None for a plain value."""
    # In Python 3.10, list[int] passes for a type.
    plain = isinstance(annotation, type) and get_origin(annotation) is None
    return annotation if plain and issubclass(annotation, Section) else None


def entry_of(annotation: Any) -> type[Section] | None:
    """Return the section class that a field is a list of, or None."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


@functools.cache
def defaults() -> dict[str, Any]:
    """Return every key that has a default, as plain values; option files and recipes override them."""

    def of(part: type[Section]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name, field in part.model_fields.items():
            section = section_of(field.annotation)
            if section is TaskSection:
                tree[name] = TaskSection().name
            elif section:
                tree[name] = of(section)
            # With a list as default, Hydra would reject a single entry, which validation explains.
            elif name not in GATHERED and not field.is_required() and entry_of(field.annotation) is None:
                tree[name] = plain(field.get_default(call_default_factory=True))
        return tree

    return of(Config)


def with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a whole config of any version, with defaults for its missing keys."""
    whole = dict(tree)
    for key, default in defaults().items():
        if not isinstance(default, dict):
            whole.setdefault(key, default)
        elif isinstance(given := tree.get(key) or {}, dict):
            whole[key] = {**default, **given}
    return whole


def changed_keys(old: dict[str, Any], new: dict[str, Any], *, moves: bool = False) -> list[str]:
    """Return dotted keys that differ, except secrets, `FREE_KEYS` and, if `moves`, locations of data."""
    before, after = in_todays_keys(flatten(with_defaults(old))), flatten(with_defaults(new))
    if "split" not in old.get("data", {}):
        before["data.split"] = after.get("data.split")  # the checkpoint says how its data was split
    known = is_ours(str(after.get("data._target_")))
    free_keys = (*FREE_KEYS, *(DATA_PLACES if moves and known else ()))
    return sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
        and not lies_in(key, free_keys)
        and not any(is_secret(name) for name in key.split("."))
        # Masked secrets are compared by their digests.
        and SECRET not in (before.get(key), after.get(key))
    )


def lies_in(key: str, sections: Iterable[str]) -> bool:
    """Return True for a dotted key among `sections`, or in one of them."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
