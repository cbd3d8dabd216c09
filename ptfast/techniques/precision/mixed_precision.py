"""The number formats of weights, autocast and float32 products."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.auto_choices import AutoChoices
from ptfast.core.devices import cannot_run, check_precision, multiplies_bf16
from ptfast.core.errors import import_extra
from ptfast.core.tensors.torch_internals import BatchNorm, DispatchMode
from ptfast.core.tensors.trees import map_tensors, tree_leaves
from ptfast.techniques.precision import Precision
from ptfast.techniques.rewrites.model_rewrites import undisturbed


@dataclass(frozen=True)
class MixedPrecision:
    """The number formats of a run, and how to apply them."""

    autocast: AbstractContextManager[object]
    """Entered around each micro-batch's forward pass and loss, and left before backward. It caches converted
    weights until it, or `kept_conversions`, is left, so they are never stale after a step."""
    autocast_dtype: torch.dtype | None
    """The type of autocast; None without autocast."""
    scaler: torch.amp.GradScaler | None
    """Scales the loss so that fp16 gradients do not underflow; None for other types."""
    note: str
    """One line for the panel, e.g. `bf16 autocast`."""
    half_weights: bool
    """Whether to call `apply_half_weights`."""
    matmul: str
    """Torch's setting for float32 matrix products."""
    warning: str | None
    """A warning to show before training, if any."""


def build_precision(
    section: Precision, device: torch.device, choices: AutoChoices | None = None
) -> MixedPrecision:
    """Resolve a precision option on `device`, and set torch's process-wide switches accordingly.

    Half-precision types halve memory traffic and run on matrix units: 1.5 to 3 times the speed on a GPU with
    matrix units, 2 times on a CPU with native bf16. E005 if the device cannot run the mode.

    `amp` becomes `bf16` if that is faster on the device, else `amp_fp16` on CUDA and `fp32` on a CPU; this is
    recorded in `choices`.
    """
    mode, choices = section.mode, choices or AutoChoices()
    lack = check_precision(mode, device.type)
    if problem := cannot_run(lack, "precision", mode):
        raise problem
    if device.type != "cpu" or choices.began_with("device", str) != "cpu":
        choices.previous.pop("precision.mode", None)
    wanted = "auto" if mode == "amp" else mode
    kind = choices.resolve("precision.mode", wanted, str, lambda: _choose_amp(device.type))
    set_float32(section.matmul_precision, tf32_convolutions=section.tf32_convolutions)
    text = {"fp32": "fp32", "tf32": "fp32 with TF32 products", "bf16_true": "bf16 weights"}.get(kind, "")
    if mode == "fp32" and section.tf32_convolutions and check_precision("tf32", device.type) is None:
        text += " with TF32 convolutions, torch's default"
    half: torch.dtype | None = {"bf16": torch.bfloat16, "amp_fp16": torch.float16}.get(kind)
    context: AbstractContextManager[object] = nullcontext()
    if half is not None:
        context = torch.autocast(device.type, dtype=half)
        text = "bf16 autocast" if half == torch.bfloat16 else "fp16 autocast with gradient scaling"
    scaler = torch.amp.GradScaler(device.type) if half == torch.float16 else None
    warning = None
    if lack is not None:
        warning = f"precision={mode}: {lack.what}. {lack.remedy}"
    matmul = section.matmul_precision
    text += f", matrix products at `{matmul}`" * (matmul != ("high" if mode == "tf32" else "highest"))
    return MixedPrecision(context, half, scaler, text, mode == "bf16_true", matmul, warning)


def _choose_amp(device_type: str) -> tuple[str, str]:
    """Return the mode that `precision=amp` selects on a device, and the reason."""
    if multiplies_bf16(device_type):
        return "bf16", f"amp is on, and this {device_type.upper()} multiplies bf16"
    mode = "amp_fp16" if device_type == "cuda" else "fp32"
    return mode, f"amp is on, and bf16 is no faster on this {device_type.upper()}"


@contextmanager
def kept_conversions() -> Iterator[None]:
    """Make autocast convert each weight only once inside this context, however often autocast is entered.

    Weights must not change inside it. Blocks recomputed on a GPU (activation checkpointing) empty the cache,
    because they run in another thread.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def set_float32(matmul: str, *, tf32_convolutions: bool | None = None) -> None:
    """Set the precision of float32 matrix products and, if given, of convolutions, for the process."""
    with warnings.catch_warnings():
        # Torch 2.9 recommends new names for these switches, but its own compiler fails with them.
        warnings.filterwarnings("ignore", "Please use the new API")
        torch.set_float32_matmul_precision(matmul)
        if tf32_convolutions is not None:
            torch.backends.cudnn.allow_tf32 = tf32_convolutions


def apply_half_weights(model: nn.Module) -> nn.Module:
    """Convert `model` to bfloat16: weights, buffers, inputs and all values computed in between.

    A bf16 weight ignores changes below about 1/256 of its size, and the state of torch's optimizers is as
    coarse. ptfast's optimizers and averages keep their state in float32, as does BatchNorm, whose statistics
    change only slightly per step. Hooks convert the model's inputs, except `labels`, and outputs to float32.

    Call it before the optimizer is built and a checkpoint is loaded; `model` is changed in place, ties stay.
    """
    for module in model.modules():
        if not isinstance(module, BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = _converted(parameter.data, torch.bfloat16)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, _converted(buffer, torch.bfloat16))
    model.register_forward_pre_hook(_convert_inputs, with_kwargs=True)
    model.register_forward_hook(_convert_outputs)
    return model


def _convert_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    labels = {name: kwargs[name] for name in ("labels",) if name in kwargs}
    return _converted(args, torch.bfloat16), _converted(kwargs, torch.bfloat16) | labels


# This is not a lambda, because a user may pickle the model.
def _convert_outputs(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
    return _converted(outputs, torch.float32)


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors as `dtype`."""

    def convert(part: Any) -> Any:
        return part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part

    return map_tensors(convert, value)


class _InputUses(DispatchMode):
    """Records whether `inputs` or views of them are cast to `dtype`, and whether anything else is done."""

    def __init__(self, inputs: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._memory = dtype, inputs.untyped_storage().data_ptr()
        self.cast = self.other = False

    def _is_input(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() == self._memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cast = kwargs or {}, torch.ops.aten._to_copy.default
        result = func(*args, **kwargs)
        if any(map(self._is_input, tree_leaves((args, kwargs)))):
            if func is cast and kwargs.get("dtype") == self._dtype:
                self.cast = True
            elif func._schema.is_mutable or not all(map(self._is_input, tree_leaves(result))):
                self.other = True
        return result


def casts_inputs(model: nn.Module, inputs: Tensor, dtype: torch.dtype, forward: Callable[[], object]) -> bool:
    """Return True if `forward`, which calls `model`, does nothing with `inputs` but cast them to `dtype`.

    Such a model gives the same bits for inputs that already have `dtype`, which saves a pass over them.

    Cost: a forward pass.
    """
    uses = _InputUses(inputs, dtype)
    with undisturbed(model), uses:
        forward()
    return uses.cast and not uses.other


def apply_float8(model: nn.Module, **options: Any) -> list[str]:
    """Let the linear layers of `model` multiply in float8, forward and backward, in place.

    Both operands of a product are scaled by their largest magnitude and rounded. The last layer is skipped,
    as are layers whose sizes are not multiples of 16, which the hardware cannot multiply.

    Args:
        model: on its device; inputs to linear layers are bfloat16, through autocast or the weights.
        options: options of torchao's `Float8LinearConfig`; E004 if torchao is not installed.

    Returns the names of these layers. Source: Micikevicius et al. 2022, arXiv:2209.05433; torchao.float8.
    """
    float8 = import_extra("torchao.float8", "float8", "precision.float8", "true")
    layers = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    fits = {name: each.in_features % 16 == each.out_features % 16 == 0 for name, each in layers.items()}
    chosen = [name for name in list(layers)[:-1] if fits[name]]
    # The gradient of a weight sums over a batch's tokens, whose number may not be a multiple of 16.
    config = float8.Float8LinearConfig(pad_inner_dim=True, **options)
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    return chosen
