"""The base class of config sections, their shared types, and a family's rules for its keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, InUnit, Range, coerce
from ptfast.core.sections.targets import Target

Count = Annotated[int, AT_LEAST_ONE]
Natural = Annotated[int, NOT_NEGATIVE]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, NOT_NEGATIVE]
Fraction = Annotated[float, FRACTION]
"""At least 0, below 1: a dropout or a momentum."""
UpToOne = Annotated[float, Range(0, 1, open_low=True)]
"""Above 0, at most 1."""
OpenFraction = Annotated[float, Range(0, 1, open_low=True, open_high=True)]
"""Above 0, below 1."""
Every = Annotated[Duration, InUnit("epochs"), POSITIVE]
EveryOrTime = Annotated[
    Duration, InUnit("epochs", ("steps", "epochs", "samples", "percent", "seconds")), POSITIVE
]
WallTime = Annotated[Duration, InUnit("seconds", ("seconds",)), POSITIVE]
OrAuto = Literal["auto"]

GATHERED = ("target", "options", "several")
"""Section fields that are collected from several config keys, and are not keys themselves."""


class Section(BaseModel):
    """The base class of sections: frozen, without extra keys, with values converted by `coerce` first."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        defer_build=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _coerced(cls, value: Any, info: ValidationInfo) -> Any:
        try:
            return coerce(value, typed(cls.model_fields[info.field_name or ""]))
        except PtfastError as error:
            raise ValueError(str(error)) from error  # pydantic collects these


def typed(field: FieldInfo) -> Any:
    """Return the annotation of a section's field, with the range and unit of its values."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


class TargetSection(Section):
    """A section with `_target_`, which has both the target's keywords and fixed keys."""

    target: Target


Rule = Callable[..., "PtfastError | Iterable[PtfastError] | None"]
PlaceOf = Callable[[str], str]


class Unused(NamedTuple):
    """Keys that have an effect only with a certain choice."""

    keys: tuple[str, ...]
    used: Callable[..., bool]
    """Whether that choice was made."""
    otherwise: str
    """The choice made instead, after `means nothing`; `{SECTION.KEY}` stands for a value."""
    remedy: str

    @classmethod
    def unless(cls, choice: str, values: tuple[str, ...], *keys: str) -> Unused:
        """Declare keys that need `choice`, such as `debug.mode`, in `values`; the usual value is first."""
        section, _, name = choice.partition(".")
        # A value that an option of the group sets is shown as the option: `debug=profiler`.
        shown = section if name in ("mode", "strategy", "kind") else choice
        return cls(
            keys,
            lambda **sections: getattr(sections[section], name) in values,
            f"to {shown}={{{choice}}}",
            f"{shown}={values[0]}",
        )

    @classmethod
    def without(cls, choice: str, usual: str, *keys: str) -> Unused:
        """Declare keys that need `choice` to be set; `usual` is an example of its value."""
        section, _, name = choice.partition(".")
        return cls(
            keys,
            lambda **sections: attrgetter(name)(sections[section]) is not None,
            f"to {choice}=null",
            f"{choice}={usual}",
        )


def call_with(function: Callable[..., Any], facts: Mapping[str, Any]) -> Any:
    """Call `function` with the `facts` that its parameters name, or with all if it takes `**kwargs`."""
    parameters = signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**facts)
    return function(**{name: facts[name] for name in parameters})


def longer_than_run(key: str, length: Duration, epochs: int | None, steps: int | None) -> PtfastError | None:
    """Return a C011 if `length`, a part of the run, is longer than the run."""
    total = {"steps": steps, "epochs": epochs}.get(length.unit)
    if total is None or length.value <= total:
        return None
    return ConfigError("C011", f"longer than the run of {total} {length.unit}", key=key, value=length)


Kind = Literal["exact", "reordered", "reduced", "training"]
_DeviceNeed = Literal["cuda", "nvidia_tf32", "float8", "bf16", "fp16", "half", "compiler", "ranks"]
_RunNeed = Literal["images", "sequences", "convolutions", "batchnorm", "rms_norm", "pack"]
Need = Literal[_DeviceNeed, "cores", "schedulefree", "peft", _RunNeed]

PROMISES: dict[Kind, str] = {
    "exact": "the same bits",
    "reordered": "the same formula at the same precision, in another order of operations",
    "reduced": "lower precision somewhere, with a bounded drift",
    "training": "changes what is computed",
}
"""The promise of each kind of technique about the result."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One switch that makes training faster.

    Its record in a `records.yaml` is data for `ptfast techniques`, docs/reference/techniques.md and tests.
    """

    name: str
    """Unique name of a few lowercase words, such as `fused optimizer`."""
    family: str
    """Its config group or family, such as `transfers`."""
    kind: Kind
    """Its promise about the result: a key of `PROMISES`."""
    on: tuple[str, ...] = ()
    """Overrides that switch it on; empty if it is always on."""
    off: tuple[str, ...] = ()
    """Overrides that switch it off."""
    why: str
    """Why it is faster, or reaches the same result sooner, as one sentence."""
    claim: str
    """Its gain and the conditions for it, as stated by the source; nothing else."""
    source: str
    """The source of the idea and the claim, never ptfast itself."""
    avoid: str
    """When not to use it, as one sentence."""
    audit: str
    """How to detect that a model, a loader or a training loop lacks it."""
    about: tuple[str, ...] = ()
    """Its option files besides those that `on` selects, such as `augment/mixup`."""
    alternatives: str | None = None
    """A set of mutually exclusive techniques, such as `precision`."""
    needs: tuple[Need, ...] = ()
    """Its requirements on the machine, the model or the data."""
    trial: tuple[str, ...] = ()
    """Overrides of the smallest run that uses it, to check its promise or to measure it. `{text}` stands for
    the path of any text file, `{pack}` for a pack of images, `{images}` for class folders of JPEG files,
    `{shards}` for tar shards of images."""
    measured: str = ""
    """Its gain as measured by `command`; the docs show all its numbers next to it."""
    command: str = ""
    """The command that repeats the measurement, such as `python scripts/bench_data.py jpeg`."""
    drift: float | None = None
    """For a `reduced` technique, the maximum relative drift of the loss over ten steps."""

    @property
    def options(self) -> tuple[str, ...]:
        """Return its option files, such as `precision/amp`."""
        selected = (word.replace("=", "/") for word in self.on if "." not in word.partition("=")[0])
        return (*selected, *self.about)


@dataclass(frozen=True, kw_only=True)
class Family:
    """The rules of a family of techniques for its keys, in addition to their section.

    Families must not import torch. `ptfast.config.families` collects them.
    """

    rules: tuple[Rule, ...] = ()
    """Contradictions between keys."""
    machine_rules: tuple[Rule, ...] = ()
    """Requirements on the machine; checked if there is no other error."""
    unused: tuple[Unused, ...] = ()
    """Keys without effect under another choice."""
    free_keys: tuple[str, ...] = ()
    """Keys that may change when a run is resumed."""
    panel: Callable[..., dict[str, object]] = dict
    """Its rows of the panel; rows of None are omitted."""
