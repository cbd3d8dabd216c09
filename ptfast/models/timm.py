"""Any model of timm by name; needs the package timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from ptfast.core.errors import ConfigError, did_you_mean, import_extra
from ptfast.core.sections.section import Count


def build(
    name: str, num_classes: Count, in_channels: Count = 3, pretrained: bool = False, **kwargs: Any
) -> nn.Module:
    """Construct a timm model, such as `resnet50d` or `vit_small_patch16_224`.

    Args:
        name: a name from `timm.list_models()`, optionally with the tag of its weights after a dot.
        num_classes: outputs, filled from the data.
        in_channels: channels of an image, filled from the data.
        pretrained: start from the published weights; timm adapts the head and the first layer.
        kwargs: further keywords of `timm.create_model`, such as `img_size` or `drop_path_rate`.

    Raises:
        MachineError: timm is not installed (E004).
        ConfigError: there is no such model (C003).
    """
    timm = import_extra("timm", "timm", "model")
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models()) or "See timm.list_models()"
        raise ConfigError("C003", "timm has no such model", key="model.name", value=name, suggestion=hint)
    return timm.create_model(
        name, pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **kwargs
    )
