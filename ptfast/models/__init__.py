"""Models, a file each, and the doors to other libraries."""

from __future__ import annotations

from pydantic import Field

from ptfast.core.resolved import Resolved
from ptfast.core.sections.section import Count, Family, Fraction, Positive, Section, TargetSection, Technique


class Lora(Section):
    """LoRA: small factors that train beside frozen linear layers, by the package peft."""

    rank: Count | None = None
    """Width of the factors, such as 8; null trains the whole model."""
    alpha: Positive | None = None
    """What the factors add is multiplied by alpha / rank; null for twice the rank."""
    dropout: Fraction = 0.0
    """Probability of zeroing an input of the factors."""
    targets: str | tuple[str, ...] = "auto"
    """Linear layers by name, the end of it, or a regular expression; `auto` for all below the last layer."""


class Model(TargetSection):
    """The model and the weights it starts from."""

    weights: str | None = None
    """The start: `pretrained`, a file or a run folder; null for random weights."""
    replace_head: bool = False
    """Keep random weights where those of the last layer do not fit."""
    lora: Lora = Field(default_factory=Lora)
    """Small factors that train in place of the model."""


def panel(model: Model, resolved: Resolved) -> dict[str, object]:
    """What trains and what is left out of it, and what is computed from the data."""
    names = ("drop_path", "drop_path_rate", "stochastic_depth_prob")
    side = model.target.kwargs.get("whitening")
    return {
        "LoRA": resolved.lora or None,
        "drop path": next(filter(None, map(model.target.kwargs.get, names)), None),
        "whitening": f"patches of {side} x {side} pixels, by filters from the data" if side else None,
    }


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="whitening first layer",
        kind="training",
        on=("model.whitening=3",),
        why="Neighbouring pixels are highly correlated; a fixed first layer that decorrelates them saves the"
        " epochs it would take to learn that.",
        claim="The network of the first source comes to 94 % on CIFAR-10 in 21 epochs instead of 45.",
        source="Jordan 2024, arXiv:2404.00498; Page 2018, 'How to Train Your ResNet 8: Bag of Tricks'.",
        avoid="The data is a stream, or inputs differ from the images the filters were computed from.",
        audit="A network of small images that trains for tens of epochs with a first layer that is learned.",
        needs=("images",),
        trial=("model=resnet9", "model.width=4", "optimizer=sgd"),
    ),
)

FAMILY = Family(
    name="model",
    panel=panel,
    techniques=TECHNIQUES,
)
