"""LoRA: low-rank factors that train next to frozen linear layers, with the package peft."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.errors import ConfigError, did_you_mean, import_extra, name_some
from ptfast.core.sections.origins import is_instance_of
from ptfast.models import Lora
from ptfast.optim.parameter_groups import layer_depths

_TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")
_READ = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The output layer of torch's attention, whose weight is read without calling the layer."""


def add_adapters(model: nn.Module, lora: Lora, *, trains_head: bool) -> list[str]:
    """Freeze `model`, add trainable factors to its linear layers in place, and return these layers' names.

    A layer then computes `W x + alpha / rank * B A x`, where W is frozen and B starts at zero. With
    `trains_head` the last layer trains in full, unless it is a target. E004 without peft; C005 for a target
    that matches no linear layer; C011 for a model without linear layers below the last.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    peft = import_extra("peft", "lora", "model.lora.rank", lora.rank)
    depths, layers = layer_depths(model), _linear_layers(model)
    head = {name for name, depth in depths.items() if depth == max(depths.values())}
    if lora.targets == "auto":
        chosen = [name for name in layers if f"{name}.weight" not in head]
    else:
        targets = [lora.targets] if isinstance(lora.targets, str) else lora.targets
        matched = {name for target in targets for name in _matches(target, layers)}
        chosen = [name for name in layers if name in matched]
    if not chosen:
        what = f"{type(model).__name__} has no linear layers below the last one"
        raise ConfigError("C011", what, key="model.lora.rank", value=lora.rank)
    adapted = tuple(f"{name}." for name in chosen)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and trains_head]
    trained = [p for name, p in named if name in head and not name.startswith(adapted)]
    alpha, names = lora.alpha or 2 * (lora.rank or 0), "|".join(map(re.escape, chosen))
    turned = not all(isinstance(layers[name], nn.Linear) for name in chosen)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=names, fan_in_fan_out=turned
    )
    peft.inject_adapter_in_model(config, model)
    for parameter in trained:
        parameter.requires_grad_(True)
    for name in chosen:
        # Autocast converts inputs by itself; peft would make them float32 first.
        model.get_submodule(name).__dict__["cast_input_dtype_enabled"] = False
    # In evaluation torch's fused encoder layers would read the weights and skip the factors.
    torch.backends.mha.set_fastpath_enabled(False)
    return chosen


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers that are called and do not share their weight, GPT-2's Conv1D included."""
    weights = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    named: Any = [(name, each) for name, each in model.named_modules() if name and type(each) is not _READ]
    linear = ((n, m) for n, m in named if isinstance(m, nn.Linear) or is_instance_of(m, *_TRANSPOSED))
    return {name: each for name, each in linear if weights.count(id(each.weight)) == 1}


def _matches(target: str, layers: dict[str, nn.Module]) -> list[str]:
    """Return the layers whose name equals `target`, ends with it or matches it as a regular expression."""
    what = "matches no linear layer"
    try:
        if found := [n for n in layers if f".{n}".endswith(f".{target}") or re.fullmatch(target, n)]:
            return found
    except re.error as error:
        what = f"is no regular expression ({error})"
    hint = did_you_mean(target, layers) or f"There are {name_some([*layers])}"
    raise ConfigError("C005", what, key="model.lora.targets", value=target, suggestion=hint)


def merged(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the `state` of an adapted model by plain names, with the factors merged into the weights."""
    layers: Any = ((name, each) for name, each in model.named_modules() if hasattr(each, "get_delta_weight"))
    for name, layer in layers:
        state[f"{name}.base_layer.weight"] += layer.get_delta_weight("default").detach()
    return {n.replace(".base_layer.", "."): value for n, value in state.items() if ".lora_" not in n}
