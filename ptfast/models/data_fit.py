"""Models that cannot take what the data gives: found on the meta device, with the key that mends it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ptfast.core.errors import text_of
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.targets import Target, keywords, swallows_keywords
from ptfast.models.build_model import build_model

LOOK_S = 0.03
"""About the longest time that a look at a model which fits may take."""
_CHANNELS = ("in_channels", "in_chans", "num_channels", "input_channels", "channels")
_FEATURES = ("in_features", "num_features", "input_dim", "input_size", "in_dim")
_SIZES = ("image_size", "img_size", "input_size", "size")
_SIDES = (16, 32, 64, 96, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512)
"""Sizes of images that published models are made for, and some smaller ones."""


class _Enough(BaseException):
    """The time for a look is over."""


def mismatch(model: nn.Module, info: DataInfo) -> bool:
    """Return True if a forward pass on the meta device fails within `LOOK_S`, for inputs of the data's shape.

    That is a suspicion: some models cannot run there. A copy of the model runs, for one that notes anything
    in its forward pass.

    Cost: `LOOK_S`, and some 10 ms for 60 modules to copy; no memory for weights and activations.
    """
    if info.kind not in ("image", "features") or info.input_shape is None:
        return False
    with torch.random.fork_rng(devices=[]):
        try:
            twin = _on_meta(model)
            error = _error_of(twin, info.input_shape, time.perf_counter() + LOOK_S)
        except Exception:
            return False  # it cannot be copied
    return error is not None and not isinstance(error, NotImplementedError) and "meta" not in text_of(error)


def remedy(model: Target, data: Target, info: DataInfo) -> str | None:
    """What makes the model fit the data, tried out on the meta device: a key to set, or else what it takes.

    Args:
        model: of the config, which failed on the data.
        data: of the config.
        info: what the data says.

    Returns:
        A sentence; None where nothing that was tried helps.
    """
    shape = info.input_shape
    if info.kind not in ("image", "features") or shape is None:
        return None
    with torch.random.fork_rng(devices=[]):
        keys = [
            f"model.{key}={value}"
            for key, value in _settings(model, info)
            if _fits(model, info, shape, key, value)
        ]
        found = keys[:1]
        if (
            info.kind == "image"
            and data.path.startswith("ptfast.")
            and "image_size" in keywords(data.resolve())
        ):
            sides = (side for side in _SIDES if side > max(shape[1:]))
            side = next((side for side in sides if _fits(model, info, (shape[0], side, side))), None)
            found += [f"data.image_size={side}"] * (side is not None)
        if found:
            return f"Set {' or '.join(found)}"
        taken = next((other for other in _other_shapes(shape) if _fits(model, info, other)), None)
    if taken is None:
        return None
    what = "images" if info.kind == "image" else "inputs"
    return f"It takes {what} of {_times(taken)}, and the data gives {_times(shape)}"


def _settings(model: Target, info: DataInfo) -> Iterator[tuple[str, Any]]:
    """Keywords of the model that may say what it takes, with what the data gives."""
    function = model.resolve()
    known, open_ended = keywords(function), swallows_keywords(function)
    first, last = (info.input_shape or (0,))[0], (info.input_shape or (0,))[-1]
    images = info.kind == "image"
    tried = dict.fromkeys(_CHANNELS, first) if images else {}
    tried |= dict.fromkeys(_SIZES if images else _FEATURES, last)
    for name, value in tried.items():
        if name in known or open_ended:
            yield name, value


def _other_shapes(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shapes of other inputs, those that differ in one respect first."""
    if len(shape) != 3:
        return
    channels = [number for number in (3, 1) if number != shape[0]]
    sides = [side for side in _SIDES if side > max(shape[1:])]
    yield from ((number, *shape[1:]) for number in channels)
    yield from ((number, side, side) for number in (shape[0], *channels) for side in sides)


def _fits(
    model: Target, info: DataInfo, shape: Sequence[int], key: str | None = None, value: Any = None
) -> bool:
    """Return True if the model, with a keyword changed, takes inputs of a shape, on the meta device."""
    changes = {key: value} if key else {}
    without_weights = {name: False for name in ("pretrained",) if name in model.kwargs}
    target = replace(model, kwargs={**model.kwargs, **without_weights, **changes})
    channels = shape[0] if info.in_channels is not None else None
    seen = replace(info, input_shape=tuple(shape), in_channels=channels)
    try:
        with torch.device("meta"):
            built = build_model(target, seen)
        return _error_of(built, shape) is None
    except Exception:
        return False  # a constructor that refuses it, or that cannot run there


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin = tensor.detach().to("meta")
        memo[id(tensor)] = (
            nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        )
    return copy.deepcopy(model, memo)


def _error_of(model: nn.Module, shape: Sequence[int], until: float | None = None) -> Exception | None:
    """The error of a forward pass for two samples on the meta device, where there is one in time."""

    def check_time(*args: Any) -> None:
        if until is not None and time.perf_counter() > until:
            raise _Enough

    handle = nn.modules.module.register_module_forward_pre_hook(check_time)
    try:
        with torch.no_grad():
            model.eval()(torch.empty((2, *shape), device="meta"))
    except (_Enough, SystemExit):
        return None
    except Exception as error:
        return error
    finally:
        handle.remove()
    return None


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
