"""Any classifier or segmentation model of torchvision by name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torch import nn

from ptfast.core.errors import ConfigError, did_you_mean
from ptfast.core.sections.section import Count

_AUXILIARY = ("googlenet", "inception_v3")
"""Classifiers with auxiliary heads, whose outputs in training would not be plain logits."""


def build(
    name: str, num_classes: Count, in_channels: Count = 3, pretrained: bool = False, **kwargs: Any
) -> nn.Module:
    """Construct a torchvision classifier (`resnet50`, `vit_b_16`) or segmentation model (`fcn_resnet50`).

    Args:
        name: from `torchvision.models.list_models(module=torchvision.models)`, or of its `segmentation`.
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data; if not 3, the first layer changes.
        pretrained: start from the best published weights, with a fresh head if the classes differ.
        kwargs: keywords of the torchvision builder or class, such as `dropout`.

    Raises:
        ConfigError: there is no such model (C003), or a keyword does not fit (C005).
        ConnectionError: the published weights cannot be downloaded.
    """
    models: Any = importlib.import_module("torchvision.models")
    names = [*models.list_models(module=models), *models.list_models(module=models.segmentation)]
    if name not in names:
        what, hint = "torchvision has no such classifier or segmentation model", did_you_mean(name, names)
        hint = hint or "See torchvision.models.list_models()"
        if name in models.list_models():
            what = "is neither a classifier nor a segmentation model, so it needs a task of its own"
            hint = "Name it by model._target_, and a task of your own by task=mine.Task"
        raise ConfigError("C003", what, key="model.name", value=name, suggestion=hint)
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        # By default, the builder downloads the backbone's weights.
        kwargs = {"weights_backbone": None, **kwargs}
    elif name in _AUXILIARY:
        kwargs = {"aux_logits": False, "init_weights": True, **kwargs}
    try:
        model = models.get_model(name, weights=None, num_classes=num_classes, **kwargs)
    except ValueError as error:
        raise ConfigError(
            "C005", f"torchvision's {name} does not take this ({error})", key="model"
        ) from error
    if pretrained:
        weights = models.get_model_weights(name).DEFAULT
        try:
            published = weights.get_state_dict(progress=False, check_hash=True)
        except OSError as error:
            raise ConnectionError(f"{weights.url}: {error}") from None
        # Only the head differs in shape.
        own = model.state_dict()
        fits = {
            key: value for key, value in published.items() if key in own and value.shape == own[key].shape
        }
        model.load_state_dict(fits, strict=False)
    if in_channels != 3:
        first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        # A gray image then gives the same outputs as its RGB version did.
        weight = first.weight.detach().sum(1, keepdim=True).repeat(1, in_channels, 1, 1) / in_channels
        first.weight, first.in_channels = nn.Parameter(weight), in_channels
    return model
