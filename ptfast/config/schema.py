"""The typed shape of a config: every fixed key, its type, its range and its default."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ptfast.config.coerce import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, InUnit, Range, coerce
from ptfast.config.targets import Target, built, plain
from ptfast.durations import Duration
from ptfast.errors import is_secret

Count = Annotated[int, AT_LEAST_ONE]
OrAuto = Literal["auto"]
Every = Annotated[Duration, InUnit("epochs"), POSITIVE]
WallTime = Annotated[Duration, InUnit("seconds", ("seconds",)), POSITIVE]

FREE_KEYS = (
    *("recipe", "preset", "trust", "epochs", "steps", "log_every", "device", "run", "eval", "stop", "sweep"),
    *(
        "saving",
        "logger",
        "parallel",
        "dataloader.kind",
        "dataloader.workers",
        "dataloader.prefetch",
        "dataloader.pin",
    ),
)
"""Keys and sections that may change between a run and its continuation."""


class Section(BaseModel):
    """Base of all sections: frozen, closed, values coerced by `ptfast.config.coerce` before pydantic."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _coerced(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        annotation = field.annotation
        for metadata in field.metadata:
            annotation = Annotated[annotation, metadata]  # type: ignore[valid-type]
        return coerce(value, annotation, name=info.field_name or "")

    def to_tree(self) -> dict[str, Any]:
        """Plain YAML-able data that validates to an equal object."""
        tree: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Section):
                tree[name] = value.to_tree()
            elif name == "target":
                tree.update(value.to_tree() if value else {"_target_": None})
            elif name == "options":
                tree.update(plain(value))
            else:
                tree[name] = plain(value)
        return tree


class TargetSection(Section):
    """A section with `_target_`: the target's keywords and fixed keys side by side."""

    target: Target


class Task(Section):
    """What a batch is and what its loss means: a name or import path, and the task's keywords beside it."""

    name: str = "auto"
    options: dict[str, Any] = {}

    def build_options(self) -> dict[str, Any]:
        """Keywords of the task's constructor; what they name by import path is built."""
        return built(self.options)


class Eval(Section):
    """When the held-out splits are evaluated."""

    every: Every = Duration(1, "epochs")
    batch_size: Count | None = None


class Stop(Section):
    """When training ends before its last step."""

    patience: Count | None = None
    metric: str | None = None
    mode: Literal["auto", "min", "max"] = "auto"


class RunOptions(Section):
    """Where the run lies, what it goes on from, how long it may take."""

    name: str | None = None
    root: str = "runs"
    dir: str | None = None
    resume: Literal["auto", "never"] | str = "never"
    max_time: WallTime | None = None


class Sweep(Section):
    """What the runs of a sweep are ranked by."""

    metric: str = "auto"
    mode: Literal["auto", "min", "max"] = "auto"


class Data(TargetSection):
    """The data set, and what of it is held out."""

    val: Annotated[Duration, InUnit("samples", ("percent", "samples"))] = Duration(10, "percent")
    normalize: bool = True


class Model(TargetSection):
    """The model and the weights it starts from."""

    weights: str | None = None
    replace_head: bool = False


class Dataloader(Section):
    """How samples reach the training loop."""

    kind: Literal["auto", "plain", "workers", "memory"] = "auto"
    workers: Annotated[int, NOT_NEGATIVE] | OrAuto = "auto"
    prefetch: Count = 2
    pin: bool | OrAuto = "auto"
    last: Literal["keep", "drop"] = "keep"


class Augment(Section):
    """Random changes to training images."""

    crop_padding: Annotated[int, NOT_NEGATIVE] = 0
    flip: bool = False


class Precision(Section):
    """The number format that forward and backward compute in."""

    mode: Literal["fp32", "amp", "bf16", "amp_fp16"] = "fp32"


class Optimizer(TargetSection):
    """What changes the weights."""


class Schedule(TargetSection):
    """How the learning rate moves over the run."""

    warmup: Annotated[Duration, InUnit("steps")] = Duration(0, "steps")


class Gradients(Section):
    """What happens to gradients between backward and the optimizer's step."""

    accumulate: Count = 1
    clip_norm: Annotated[float, POSITIVE] | None = None
    clip_value: Annotated[float, POSITIVE] | None = None


class Parallel(Section):
    """The processes that train together."""

    strategy: Literal["single", "ddp"] = "single"
    nproc: Count | OrAuto = "auto"
    nnodes: Count = 1
    timeout: WallTime = Duration(600, "seconds")


class Checkpointing(Section):
    """Activations that backward computes again."""

    mode: Literal["none"] = "none"


class Rewrites(Section):
    """Rewrites of the model that leave its formula as it is."""

    channels_last: bool | OrAuto = "auto"


class Compile(Section):
    """What `torch.compile` takes."""

    mode: Literal["none", "model"] = "none"


class Ema(Section):
    """The moving average of the weights."""

    decay: float | None = None


class Backend(Section):
    """Threads and kernels."""

    threads: Count | OrAuto = "auto"
    cudnn_benchmark: bool = True
    deterministic: bool = False


class Debug(Section):
    """Checks that slow training down."""

    mode: Literal["none", "anomaly"] = "none"


class Saving(Section):
    """When states are saved, and how many are kept."""

    every: Every = Duration(1, "epochs")
    keep: Count = 1
    best: bool = True


class Logger(Section):
    """Where figures go besides metrics.jsonl."""

    target: Target | None = None


class Config(Section):
    """A whole run, checked. Built by `validate`, which knows where each value was given."""

    recipe: str | None = None
    preset: str = "safe"
    task: Task = Field(default_factory=Task)
    epochs: Count | None = None
    steps: Count | None = None
    batch_size: Count
    micro_batches: Count | None = None
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    log_every: Annotated[Duration, InUnit("steps"), POSITIVE] = Duration(50, "steps")
    trust: list[str] = []
    callbacks: list[Target] = []
    eval: Eval = Field(default_factory=Eval)
    stop: Stop = Field(default_factory=Stop)
    run: RunOptions = Field(default_factory=RunOptions)
    sweep: Sweep = Field(default_factory=Sweep)
    data: Data
    model: Model
    dataloader: Dataloader = Field(default_factory=Dataloader)
    augment: Augment = Field(default_factory=Augment)
    precision: Precision = Field(default_factory=Precision)
    optimizer: Optimizer
    schedule: Schedule
    gradients: Gradients = Field(default_factory=Gradients)
    parallel: Parallel = Field(default_factory=Parallel)
    checkpointing: Checkpointing = Field(default_factory=Checkpointing)
    rewrites: Rewrites = Field(default_factory=Rewrites)
    compile: Compile = Field(default_factory=Compile)
    ema: Ema = Field(default_factory=Ema)
    backend: Backend = Field(default_factory=Backend)
    debug: Debug = Field(default_factory=Debug)
    saving: Saving = Field(default_factory=Saving)
    logger: Logger = Field(default_factory=Logger)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field of `Config` holds, or None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The dotted keys in which two whole configs, as plain values, differ, sorted.

    Those that may change (`FREE_KEYS`) are left out, and secrets, which are not written down.
    """
    before, after = flatten(old), flatten(new)
    return sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
        and not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
        and not any(is_secret(name) for name in key.split("."))
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
