"""Models, one per file, and adapters for models of other libraries."""

from __future__ import annotations

from pydantic import Field

from ptfast.core.sections.section import Count, Family, Fraction, Positive, Section, TargetSection


class Lora(Section):
    """LoRA: low-rank factors that train next to frozen linear layers, with the package peft."""

    rank: Count | None = None
    """Rank of the factors, such as 8; null trains the whole model."""
    alpha: Positive | None = None
    """The factors are scaled by alpha / rank; null for twice the rank."""
    dropout: Fraction = 0.0
    """Probability of zeroing an input of the factors."""
    targets: str | tuple[str, ...] = "auto"
    """Linear layers by name, name suffix or regular expression; `auto` for all below the last layer."""


class Model(TargetSection):
    """The model and the weights it starts from."""

    weights: str | None = None
    """Initial weights: `pretrained`, a file or a run folder; null for random weights."""
    replace_head: bool = False
    """Keep the last layer's random weights if the stored shape does not match."""
    lora: Lora = Field(default_factory=Lora)
    """Low-rank factors that train instead of the whole model."""


def panel(model: Model) -> dict[str, object]:
    """Describe the layers that training drops at random, and the filters computed from the data."""
    names = ("drop_path", "drop_path_rate", "stochastic_depth_prob")
    side = model.target.kwargs.get("whitening")
    return {
        "drop path": next(filter(None, map(model.target.kwargs.get, names)), None),
        "whitening": f"patches of {side} x {side} pixels, by filters from the data" if side else None,
    }


FAMILY = Family(panel=panel)
