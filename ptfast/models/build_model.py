"""Build the model of a run, and suggest keys that make it fit the data."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ptfast.core.errors import ConfigError, did_you_mean, summary_of
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.origins import is_ours
from ptfast.core.sections.targets import Target, keywords, swallows_keywords
from ptfast.models import Model


def build_model(target: Target, info: DataInfo, *, pretrained: bool = False) -> nn.Module:
    """Build the model, and fill in the facts about the data that its constructor takes.

    Args:
        target: the model's class, or a function that returns a module.
        info: facts about the data; each known field becomes the keyword of the same name.
        pretrained: ask the constructor for published weights, with a fresh head if the classes differ.

    Raises:
        ConfigError: the data lacks a fact that the constructor needs, or does not fit (C011); there are no
            published weights (C012); a keyword passed through `**kwargs` is unknown (C002), or its value is
            rejected by a library (C005); the target does not return a module (C009).
    """
    facts = info.facts()
    if info.task == "regression":
        facts.setdefault("num_classes", 1)
    parameters = keywords(target.resolve())
    if pretrained:
        if "pretrained" not in parameters:
            what = f"there are no published weights for {target.path}"
            hint = "Name a file or a run folder, or use model=torchvision, model=timm or model=hf"
            raise ConfigError("C012", what, key="model.weights", value="pretrained", suggestion=hint)
        facts["pretrained"] = True
    unset = {name: each for name, each in parameters.items() if name not in {*facts, *target.kwargs}}
    missing = [name for name, each in unset.items() if each.default is inspect.Parameter.empty]
    if "in_channels" in unset and info.kind in ("text", "tokens", "features"):
        # The default of 3 is meant for images.
        missing.append("in_channels")
    if missing:
        # Otherwise the constructor would fail with a TypeError.
        keys = " and ".join(missing)
        attribute = ", give your dataset an attribute vocab_size" if missing[0] == "vocab_size" else ""
        what = f"needs {keys}, which {info.kind} data does not determine"
        hint = f"Set model.{missing[0]}{attribute}, or choose a model that fits the data"
        raise ConfigError("C011", what, key="model._target_", value=target.path, suggestion=hint)
    own = target.kwargs.get("vocab_size")
    if isinstance(own, int) and info.vocab_size is not None and own < info.vocab_size:
        what = f"too few: the data has {info.vocab_size:,} token ids"
        raise ConfigError("C011", what, key="model.vocab_size", value=own)
    try:
        model = target.build(**facts)
    except (TypeError, ValueError, AssertionError, AttributeError, ArithmeticError, LookupError) as error:
        if not swallows_keywords(target.resolve()):
            raise
        if isinstance(error, TypeError) and "keyword argument" in str(error):
            raise _unknown_keyword(target, error) from error
        if not is_ours(target.path):
            raise  # the error comes from the user's own target
        raise ConfigError("C005", summary_of(error), key="model", value=target.path) from error
    if not isinstance(model, nn.Module):
        what = f"gives a {type(model).__name__}, not a torch.nn.Module"
        raise ConfigError("C009", what, key="model._target_", value=target.path)
    return model


def lazy_tensors(model: nn.Module) -> dict[str, Any]:
    """Return the uninitialized parameters and buffers of lazy layers, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in tensors if is_lazy(tensor)}


def size_lazy_layers(model: nn.Module, forward: Callable[[], Any]) -> None:
    """Initialize lazy layers by running `forward` in evaluation mode, which changes no statistics."""
    training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()
            forward()
    finally:
        for module, trains in training.items():
            module.training = trains


def _unknown_keyword(target: Target, error: TypeError) -> ConfigError:
    """Return C002 for an unknown keyword in `**kwargs`, with the nearest one of the model or its library."""
    found = re.search(r"(unexpected|multiple values for) keyword argument\W.*?'(\w+)'", str(error))
    if found is None:
        return ConfigError("C002", f"the library does not take this ({error})", key="model")
    key, value = f"model.{found[2]}", target.kwargs.get(found[2])
    if found[1] != "unexpected":
        return ConfigError("C002", "the library sets this itself", key=key, value=value)
    # The classes in the modules that passed the keyword on show which keywords exist.
    passed_on = [frame.f_globals for frame, _ in traceback.walk_tb(error.__traceback__)]
    nearby = [each for names in passed_on for each in names.values() if isinstance(each, type)]
    here = {names["__name__"] for names in passed_on} - {Target.__module__}
    classes = [each for each in nearby if each.__module__ in here]
    known = {name for each in (target.resolve(), *classes) for name in keywords(each)}
    known -= {"self", "target", found[2]}
    hint = did_you_mean(found[2], sorted({*Model.model_fields, *known}), "model.{}")
    return ConfigError("C002", "unknown key", key=key, value=value, suggestion=hint)


_CHANNELS = ("in_channels", "in_chans", "num_channels", "input_channels", "channels")
_FEATURES = ("in_features", "num_features", "input_dim", "input_size", "in_dim")
_SIZES = ("image_size", "img_size", "input_size", "size")


def remedy(model: Target, data: Target, info: DataInfo) -> str | None:
    """Return a sentence that suggests settings for a failed model that contradict the data, or None."""
    if info.kind not in ("image", "features") or info.input_shape is None:
        return None
    images, first, last = info.kind == "image", info.input_shape[0], info.input_shape[-1]
    wanted: dict[str, int] = dict.fromkeys(_CHANNELS, first) if images else {}
    wanted |= dict.fromkeys(_SIZES if images else _FEATURES, last)
    defaults = {name: keyword.default for name, keyword in keywords(model.resolve()).items()}
    used = defaults | {name: fact for name, fact in info.facts().items() if name in defaults} | model.kwargs
    odd = [name for name in wanted if isinstance(used.get(name), int) and used[name] != wanted[name]]
    found = [f"model.{name}={wanted[name]}" for name in odd]
    if images and "image_size" in keywords(data.resolve()):
        found += [f"data.image_size={used[name]}" for name in odd if name in _SIZES]
    return f"Set {' or '.join(found)}" if found else None
