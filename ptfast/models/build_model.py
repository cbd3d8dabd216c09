"""Models by import path, and the one place that builds the model of a run."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from ptfast.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ptfast.core.protocols import DataInfo


class ModelTarget(Protocol):
    """An import path and its keywords."""

    @property
    def path(self) -> str: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    def resolve(self) -> Any: ...
    def build(self, *args: Any, **facts: Any) -> Any: ...


def build_model(target: ModelTarget, info: DataInfo, *, pretrained: bool = False) -> nn.Module:
    """Construct the model, with what its constructor wants to know about the data filled in.

    Args:
        target: the model's class, or a function that returns a module.
        info: what the data says; each field that is known becomes the keyword of the same name.
        pretrained: ask the constructor for published weights, with a fresh head where the classes differ.

    Raises:
        ConfigError: the data does not say what the constructor needs (C011), there are no published weights
            (C012), or the target gives something that is no module (C009).
    """
    from torch import nn

    facts = {f.name: getattr(info, f.name) for f in fields(info) if getattr(info, f.name) is not None}
    if info.task == "regression":
        facts.setdefault("num_classes", 1)
    factory = target.resolve()
    parameters = _parameters(factory)
    if pretrained:
        if "pretrained" not in parameters:
            what = f"there are no published weights for {target.path}"
            hint = "Name a file or a run folder, or use model=torchvision, model=timm or model=hf"
            raise ConfigError("C012", what, key="model.weights", value="pretrained", suggestion=hint)
        facts["pretrained"] = True
    _check_facts(target, parameters, facts, info)
    model = target.build(**facts)
    if not isinstance(model, nn.Module):
        what = f"gives a {type(model).__name__}, not a torch.nn.Module"
        raise ConfigError("C009", what, key="model._target_", value=target.path)
    return model


def _parameters(factory: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return {}


def _check_facts(
    target: ModelTarget, parameters: dict[str, inspect.Parameter], facts: dict[str, Any], info: DataInfo
) -> None:
    """Say which fact is missing before the constructor fails with a TypeError that does not say why."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in named
        and parameter.default is inspect.Parameter.empty
        and name not in facts
        and name not in target.kwargs
    ]
    if "in_channels" in {*parameters} - {*facts, *target.kwargs} and info.kind in (
        "text",
        "tokens",
        "features",
    ):
        # Models of images take 3 channels for granted, but not what has none.
        missing.append("in_channels")
    if missing:
        keys = " and ".join(missing)
        attribute = ", give your data set an attribute vocab_size" if missing[0] == "vocab_size" else ""
        what = f"needs {keys}, which data of the kind `{info.kind}` does not tell"
        hint = f"Set model.{missing[0]}{attribute}, or choose a model that fits the data"
        raise ConfigError("C011", what, key="model._target_", value=target.path, suggestion=hint)
