"""Models, a file each, and the doors to other libraries."""

from __future__ import annotations

from ptfast.core.sections.section import TargetSection


class Model(TargetSection):
    """The model and the weights it starts from."""

    weights: str | None = None
    """The start: `pretrained`, a file or a run folder; null for random weights."""
    replace_head: bool = False
    """Keep random weights where those of the last layer do not fit."""


def panel(model: Model) -> dict[str, object]:
    """How often parts of the model are left out in training."""
    names = ("drop_path", "drop_path_rate", "stochastic_depth_prob")
    return {"drop path": next(filter(None, map(model.target.kwargs.get, names)), None)}
