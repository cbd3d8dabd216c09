"""Models by import path, and the one place that builds the model of a run."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ptfast.core.errors import ConfigError, name_some
from ptfast.core.sections.targets import Target, keywords

if TYPE_CHECKING:
    from torch import nn

    from ptfast.core.protocols import DataInfo


def build_model(target: Target, info: DataInfo, *, pretrained: bool = False) -> nn.Module:
    """Construct the model, with what its constructor wants to know about the data filled in.

    Args:
        target: the model's class, or a function that returns a module.
        info: what the data says; each field that is known becomes the keyword of the same name.
        pretrained: ask the constructor for published weights, with a fresh head where the classes differ.

    Raises:
        ConfigError: the data does not say what the constructor needs (C011), there are no published weights
            (C012), the target gives something that is no module (C009), or layers without sizes (C017).
    """
    from torch import nn
    from torch.nn.parameter import is_lazy

    facts = {f.name: getattr(info, f.name) for f in fields(info) if getattr(info, f.name) is not None}
    if info.task == "regression":
        facts.setdefault("num_classes", 1)
    parameters = keywords(target.resolve())
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
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        what = f"is built with layers that have no sizes yet: {name_some(lazy)}"
        hint = "Give their sizes, or call the model once in its constructor, on zeros of input_shape"
        raise ConfigError("C017", what, key="model._target_", value=target.path, suggestion=hint)
    return model


def _check_facts(
    target: Target, parameters: dict[str, inspect.Parameter], facts: dict[str, Any], info: DataInfo
) -> None:
    """Say which fact is missing before the constructor fails with a TypeError that does not say why."""
    unset = {name: each for name, each in parameters.items() if name not in {*facts, *target.kwargs}}
    missing = [name for name, each in unset.items() if each.default is inspect.Parameter.empty]
    if "in_channels" in unset and info.kind in ("text", "tokens", "features"):
        # Models of images take 3 channels for granted, but not what has none.
        missing.append("in_channels")
    if missing:
        keys = " and ".join(missing)
        attribute = ", give your data set an attribute vocab_size" if missing[0] == "vocab_size" else ""
        what = f"needs {keys}, which {info.kind} data does not determine"
        hint = f"Set model.{missing[0]}{attribute}, or choose a model that fits the data"
        raise ConfigError("C011", what, key="model._target_", value=target.path, suggestion=hint)
