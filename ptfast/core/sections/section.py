"""The base of all sections, types that many of them use, and what a family states about its keys."""

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
"""Fields of sections that are gathered from several keys of a config, and are no keys themselves."""


class Section(BaseModel):
    """Base of all sections: frozen, closed, values coerced by `coerce` before pydantic sees them."""

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
            raise ValueError(str(error)) from error  # which pydantic gathers


def typed(field: FieldInfo) -> Any:
    """The annotation of a section's field, with the range and the unit of its values."""
    return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


class TargetSection(Section):
    """A section with `_target_`: the target's keywords and fixed keys side by side."""

    target: Target


Rule = Callable[..., "PtfastError | Iterable[PtfastError] | None"]
PlaceOf = Callable[[str], str]


class Unused(NamedTuple):
    """Keys that have an effect under one choice only."""

    keys: tuple[str, ...]
    used: Callable[..., bool]
    """Return True if that choice was made."""
    otherwise: str
    """The choice made instead, after `means nothing`; `{SECTION.KEY}` stands for a value."""
    remedy: str

    @classmethod
    def unless(cls, choice: str, values: tuple[str, ...], *keys: str) -> Unused:
        """Keys that count where `choice`, such as `debug.mode`, has one of `values`, the usual one first."""
        section, _, name = choice.partition(".")
        # What an option of the group sets is shown as that option: `debug=profiler`.
        shown = section if name in ("mode", "strategy", "kind") else choice
        return cls(
            keys,
            lambda **sections: getattr(sections[section], name) in values,
            f"to {shown}={{{choice}}}",
            f"{shown}={values[0]}",
        )

    @classmethod
    def without(cls, choice: str, usual: str, *keys: str) -> Unused:
        """Keys that count where `choice` is not null; `usual` is a value of it."""
        section, _, name = choice.partition(".")
        return cls(
            keys,
            lambda **sections: attrgetter(name)(sections[section]) is not None,
            f"to {choice}=null",
            f"{choice}={usual}",
        )


def call_with(function: Callable[..., Any], facts: Mapping[str, Any]) -> Any:
    """Call `function` with those of `facts` that its parameters name; with all where it takes any."""
    parameters = signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**facts)
    return function(**{name: facts[name] for name in parameters})


def longer_than_run(key: str, length: Duration, epochs: int | None, steps: int | None) -> PtfastError | None:
    """Reject a part of the run that is longer than all of it."""
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
"""The promise of each class about the result."""


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One switch that makes training faster.

    Its record in a `records.yaml` is data for `ptfast techniques`, docs/reference/techniques.md and tests.
    """

    name: str
    """Unique, a few lower-case words, such as `fused optimizer`."""
    family: str
    """The config group or family that it belongs to, such as `transfers`."""
    kind: Kind
    """Its class: what it promises of the result."""
    on: tuple[str, ...] = ()
    """Overrides that switch it on; none for what is always on."""
    off: tuple[str, ...] = ()
    """Overrides that switch it off."""
    why: str
    """Why it is faster, or reaches the same result sooner, as one sentence."""
    claim: str
    """Its worth according to its source, and under which conditions; nothing that the source does not say."""
    source: str
    """Where the idea and the claim come from: others, never ourselves."""
    avoid: str
    """When not to use it, as one sentence."""
    audit: str
    """How to see in a model, a loader or a loop that it is missing."""
    about: tuple[str, ...] = ()
    """Option files that it is about besides those that `on` selects, such as `augment/mixup`."""
    alternatives: str | None = None
    """The set of techniques of which one at most is on, such as `precision`."""
    needs: tuple[Need, ...] = ()
    """Requirements on the machine, the model or the data for it to apply."""
    trial: tuple[str, ...] = ()
    """Overrides of the smallest run in which it acts, to check its promise or measure it by; `{text}` in one
    stands for the path of any text file, `{pack}` for that of a pack of images, `{images}` for that of
    class folders of JPEG files, `{shards}` for that of tar shards of images."""
    measured: str = ""
    """Its worth as found by `command`; the docs have all its numbers next to that."""
    command: str = ""
    """The command that measures that again, such as `python scripts/bench_data.py jpeg`."""
    drift: float | None = None
    """For a reduced technique: the largest relative drift of the loss over ten steps that it stands for."""

    @property
    def options(self) -> tuple[str, ...]:
        """The option files that it is about, such as `precision/amp`."""
        selected = (word.replace("=", "/") for word in self.on if "." not in word.partition("=")[0])
        return (*selected, *self.about)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of techniques: what it states about its keys, besides their section.

    It loads no torch. `ptfast.config.families` collects the families.
    """

    rules: tuple[Rule, ...] = ()
    """Contradictions between keys."""
    machine_rules: tuple[Rule, ...] = ()
    """Requirements that this machine lacks; checked where nothing else is wrong."""
    unused: tuple[Unused, ...] = ()
    """Keys that another choice leaves without effect."""
    free_keys: tuple[str, ...] = ()
    """Keys that may change between a run and its continuation."""
    panel: Callable[..., dict[str, object]] = dict
    """Its rows of the panel; a row of None is left out."""
