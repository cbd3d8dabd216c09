"""Linear layers whose matrix products are in float8, by torchao."""

from __future__ import annotations

from typing import Any

from torch import nn

from ptfast.core.errors import MachineError


def apply_float8(model: nn.Module, **options: Any) -> list[str]:
    """Have the linear layers of `model` multiply in float8, forward and backward, in place.

    Weights stay as they are and so do their names: both sides of a product are scaled by their largest
    magnitude and rounded as it is taken. The last layer is left alone, whose rounding the loss would see, and
    so are layers whose sizes are no multiples of 16, which the hardware does not multiply.

    Args:
        model: on its device; its inputs to linear layers are bfloat16, by autocast or by its weights.
        options: of torchao's `Float8LinearConfig`.

    Returns:
        The names of these layers.

    Raises:
        MachineError: E004 where torchao is not installed.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao.float8.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        hint = "Install it with pip install 'ptfast[float8]'"
        what = f"needs the package torchao, which cannot be imported ({error})"
        raise MachineError("E004", what, key="precision.float8", value="true", suggestion=hint) from error
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    chosen = [
        name
        for name, layer in list(layers.items())[:-1]
        if layer.in_features % 16 == 0 and layer.out_features % 16 == 0
    ]
    # Batches hold any number of tokens, over which the gradient of a weight is summed.
    config = Float8LinearConfig(pad_inner_dim=True, **options)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    return chosen
