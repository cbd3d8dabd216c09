"""The catalogue's record of one technique, and of a family of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ptfast.core.sections.section import Rule, Unused

Kind = Literal["exact", "reordered", "reduced", "training"]
Need = Literal[
    "cuda",
    "nvidia_tf32",
    "float8",
    "bf16",
    "fp16",
    "half",
    "compiler",
    "ranks",
    "images",
    "sequences",
    "convolutions",
    "batchnorm",
    "cores",
    "pack",
    "schedulefree",
]

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

    Plain data, from which docs/techniques.md, `ptfast techniques`, the tests and the measuring commands work.
    """

    name: str
    """Unique, a few lower-case words, such as `fused optimizer`."""
    family: str = ""
    """The config group or family that it belongs to, such as `transfers`; by default its `Family`'s."""
    kind: Kind
    """Its class: what it promises of the result."""
    on: tuple[str, ...] = ()
    """Overrides that switch it on; none for what is always on."""
    off: tuple[str, ...] = ()
    """Overrides that switch it off; by default those of `on` with true and false exchanged."""
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
    """Option files that it is about beside those that `on` selects, such as `augment/mixup`."""
    alternatives: str | None = None
    """The set of techniques of which one at most is on, such as `precision`."""
    needs: tuple[Need, ...] = ()
    """Requirements on the machine, the model or the data for it to apply."""
    trial: tuple[str, ...] = ()
    """Overrides of the smallest run in which it acts, to check its promise or measure it by; `{text}` in one
    stands for the path of any text file, `{pack}` for that of a pack of images, `{images}` for that of
    class folders of JPEG files, `{shards}` for that of tar shards of images."""
    measured: str = ""
    """Its worth as found by `command`; all figures in it stand in the docs beside that."""
    command: str = ""
    """The command that measures that again, such as `python scripts/bench_data.py jpeg`."""
    drift: float | None = None
    """For a reduced technique: the largest relative drift of the loss over ten steps that it stands for."""

    def __post_init__(self) -> None:
        if not self.off:
            other = {"true": "false", "false": "true"}
            words = [word.rpartition("=") for word in self.on]
            off = tuple(f"{key}={other[value]}" for key, _, value in words if value in other)
            object.__setattr__(self, "off", off)

    @property
    def options(self) -> tuple[str, ...]:
        """The option files that it is about, such as `precision/amp`."""
        selected = (word.replace("=", "/") for word in self.on if "." not in word.partition("=")[0])
        return (*selected, *self.about)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that a part of the package states about its keys, beside their section.

    It loads no torch. `ptfast.config.catalogue` collects the families; the code that acts is called by a
    stage of `ptfast.training.build`.
    """

    name: str = ""
    """The family of those of its records that name no other."""
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
    techniques: tuple[Technique, ...] = ()
    """Its records, in the order of the table of techniques."""

    def __post_init__(self) -> None:
        records = tuple(replace(each, family=each.family or self.name) for each in self.techniques)
        object.__setattr__(self, "techniques", records)
