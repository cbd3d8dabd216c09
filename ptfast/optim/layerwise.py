"""What the layer-wise optimizers share: many layers in one operation, in portions that the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ptfast.errors import ConfigError

Group: TypeAlias = dict[str, Any]
Tensors: TypeAlias = list[Tensor]
Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]

CPU_PORTION = 1 << 19
"""Elements that all passes of a step go over before the next ones do: what a CPU's cache keeps in between."""
DEVICE_PORTION = 1 << 26
"""The same elsewhere, where it bounds the memory a step takes for a while: to 256 MiB in float32."""
HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass
class Portion:
    """Layers that are updated together: of one group, device and type, all with a gradient.

    They are 1-d all or none. Either they are whole, in one piece, or it is a single long layer in several.
    """

    layers: int
    """How many they are."""
    ndim: int
    """Their number of dimensions, or the largest of them."""
    pieces: list[list[Tensors]]
    """Per piece: weights, gradients (unscaled still), then the state that has a layer's shape, by name."""
    scalars: list[Tensors]
    """State that is one number per layer, by name."""
    grad_factor: Tensor | None
    """0-d; what gradients are to be multiplied by, None for 1."""
    found_inf: Tensor | None
    """0-d, 1 where the step is to change nothing, None for 0."""

    def norms(self, parts: Sequence[Tensor]) -> Tensor:
        """Norm of every layer, from those of its parts in the order of the pieces."""
        norms = torch.stack(list(parts))
        return norms if len(self.pieces) == 1 else torch.linalg.vector_norm(norms).view(1)

    def scaled(self, grads: Tensors) -> Tensors:
        """The gradients times their factor, as new tensors where there is one."""
        return grads if self.grad_factor is None else list(torch._foreach_mul(grads, self.grad_factor))

    def unless_found_inf(self, new: Tensor, old: Tensor | float) -> Tensor:
        """`new`, or `old` where an infinity was found; chosen on the device."""
        return new if self.found_inf is None else torch.where(self.found_inf > 0, old, new)


class LayerwiseOptimizer(Optimizer):
    """Base of optimizers whose step looks at the norm of each layer (one parameter tensor).

    A step runs every operation over a list of layers (multi-tensor) and never waits for the device to read a
    value. On the CPU the lists are as short as the cache is small, and a layer longer than that is cut: a
    step costs what it moves through memory, and most passes then find their operands in the cache.

    `None` gradients, groups, closures, saving and loading are as in torch. Gradient scaling is that of
    torch's fused optimizers: `GradScaler` hands over `grad_scale` and `found_inf` on the device, and a step
    for which an infinity was found changes nothing, step counts included. Gradients themselves are left
    unscaled. Half-precision parameters are updated in float32 and have float32 state, but the weights are
    rounded after every step: there are no master weights.
    """

    _step_supports_amp_scaling = True
    layer_state: tuple[str, ...] = ()
    """Names of the state that has its layer's shape; begins at zero."""
    scalar_state: tuple[str, ...] = ()
    """Names of the state that is one number per layer; begins at zero."""

    def __init__(self, params: Params, defaults: Group) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if name in defaults and not defaults[name] >= 0:
                raise ValueError(f"{name} must be at least 0, not {defaults[name]}")
        for beta in (*defaults.get("betas", ()), defaults.get("momentum", 0.0)):
            if not 0 <= beta < 1:
                raise ValueError(f"betas and momentum must be in [0, 1), not {beta}")
        self._plans: dict[int, list[tuple[Tensors, bool]]] = {}
        super().__init__(params, defaults)

    def _update(self, group: Group, portion: Portion) -> None:
        """Update weights and state of `portion` in place."""
        raise NotImplementedError

    def _grad_factor(self, device: torch.device) -> Tensor | None:
        """What all gradients are multiplied by before anything else: 0-d, on `device`; None for 1."""
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        return None if grad_scale is None else grad_scale.to(device, non_blocking=True).reciprocal()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: computes the loss and its gradients; called first, and its loss returned.

        Raises:
            ConfigError: C011 for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factors: dict[torch.device, tuple[Tensor | None, Tensor | None]] = {}
        for index, group in enumerate(self.param_groups):
            for planned, copied in self._plan(index, group["params"]):
                layers = [layer for layer in planned if layer.grad is not None]
                if not layers:
                    continue
                device = layers[0].device
                if device not in factors:
                    factors[device] = self._useful_factor(device), self._found_inf(device)
                self._update_layers(group, layers, copied, *factors[device])
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch.

        Raises:
            ValueError: for parameters that are not floating-point, or are shards of what they stand for.
        """
        super().add_param_group(param_group)
        self._plans.clear()
        for layer in self.param_groups[-1]["params"]:
            if not layer.is_floating_point():
                raise ValueError(f"{type(self).__name__} takes floating-point parameters, not {layer.dtype}")
            if hasattr(layer, "to_local"):
                raise ValueError(f"{type(self).__name__} takes the norm of whole layers, not of shards")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, as in torch, but in the type it was saved in: torch casts it to the parameter's."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        layers = (layer for group in self.param_groups for layer in group["params"])
        for number, layer in zip(numbers, layers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[layer][name] = value.to(layer.device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plans = {}
        super().__setstate__(state)

    def _useful_factor(self, device: torch.device) -> Tensor | None:
        factor = self._grad_factor(device)
        # Looking is free on the CPU, where a pass over the gradients is not.
        return None if factor is not None and factor.is_cpu and factor.item() == 1 else factor

    def _found_inf(self, device: torch.device) -> Tensor | None:
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        # A sum over devices, while torch's kernels skip the step at exactly 1.
        return None if found_inf is None else found_inf.to(device, non_blocking=True).clamp(max=1)

    def _plan(self, index: int, layers: Tensors) -> list[tuple[Tensors, bool]]:
        """The layers of a group in portions, and whether those are updated in a copy; found once."""
        plan = self._plans.get(index)
        if plan is None:
            plan = self._plans[index] = _part(layers)
        return plan

    def _update_layers(
        self,
        group: Group,
        layers: Tensors,
        copied: bool,
        grad_factor: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        weights = [_working_copy(layer) for layer in layers] if copied else [p.detach() for p in layers]
        states = [self._state_of(*pair) for pair in zip(layers, weights, strict=True)]
        columns = [weights, [self._grad_of(*pair) for pair in zip(layers, weights, strict=True)]]
        columns += [[state[name] for state in states] for name in self.layer_state]
        scalars = [[state[name] for state in states] for name in self.scalar_state]
        ndim = max(layer.ndim for layer in layers)
        self._update(group, Portion(len(layers), ndim, _cut(columns), scalars, grad_factor, found_inf))
        if copied:
            torch._foreach_copy_([layer.detach() for layer in layers], weights)

    def _state_of(self, layer: Tensor, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[layer]
        if not state:
            for name in self.scalar_state:
                # Torch's kernels read step counts as float32, whatever the weights are.
                state[name] = weight.new_zeros((), dtype=torch.float32 if name == "step" else None)
            for name in self.layer_state:
                state[name] = torch.zeros_like(weight)
        for name in self.layer_state:
            # Loaded, or made before the weights were laid out anew.
            state[name] = laid_out_as(weight, state[name])
        return state

    def _grad_of(self, layer: Tensor, weight: Tensor) -> Tensor:
        grad = layer.grad
        assert grad is not None
        if grad.is_sparse:
            what = f"{type(self).__name__} takes no sparse gradients"
            raise ConfigError(
                "C011", what, key="optimizer", suggestion="Build the embedding with sparse=False"
            )
        return laid_out_as(weight, grad if grad.dtype == weight.dtype else grad.to(weight.dtype))


def step_by_momentum(
    portion: Portion,
    factors: Tensor | None,
    *,
    lr: float | Tensor,
    momentum: float,
    nesterov: bool = False,
    decay_within: float = 0.0,
    decay_beside: float = 0.0,
) -> None:
    """SGD with a factor per layer. For weights `w`, gradients `g` and velocities `v`:

        v <- momentum * v + factor * (g + decay_within * w) + decay_beside * w;    w <- w - lr * v

    Args:
        portion: what to update; its pieces are `w`, `g` and `v`.
        factors: one per layer, above 0, on the device; None for 1.
        lr: learning rate.
        momentum: in [0, 1).
        nesterov: step along what the velocity will be.
        decay_within: L2 coefficient that is scaled like the gradient.
        decay_beside: L2 coefficient that is not.

    Cost: one fused pass on the CPU; up to two before it elsewhere and with Nesterov.
    """
    sgd = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "maximize": False, "is_first_step": False}
    sgd |= {"found_inf": portion.found_inf}
    if factors is not None and factors.is_cpu and momentum and not nesterov:
        # No host waits for a CPU: with the factor as its own dampening the kernel needs no pass before it.
        unscale = 1.0 if portion.grad_factor is None else portion.grad_factor.item()
        whole = factors if unscale == 1 else factors * unscale
        numbers, decays = whole.tolist(), [decay_within / unscale] * portion.layers
        if decay_beside:
            decays = (whole.reciprocal() * decay_beside + decays[0]).tolist()
        for columns in portion.pieces:
            for weight, grad, velocity, number, decay in zip(*columns, numbers, decays, strict=True):
                kernel = {"weight_decay": decay, "dampening": 1 - number, **sgd}
                torch._fused_sgd_([weight], [grad], [velocity], **kernel)
        return
    for weights, grads, velocities in portion.pieces:
        update, decay = portion.scaled(grads), decay_beside + decay_within
        if factors is not None:
            if decay_within:
                update = torch._foreach_add(update, weights, alpha=decay_within)
            update, decay = torch._foreach_mul(update, factors.unbind()), decay_beside
        torch._fused_sgd_(
            weights, update, velocities if momentum else [], weight_decay=decay, dampening=0.0, **sgd
        )


def trust_ratios(layer_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Length of each layer over that of its update, 1 where either is zero."""
    return torch.where(torch.minimum(layer_norms, update_norms) > 0, layer_norms / update_norms, 1.0)


def _part(layers: Tensors) -> list[tuple[Tensors, bool]]:
    """Portions that stay in the cache, one device and type each, 1-d layers apart; whether each is copied."""
    current: dict[tuple[Any, ...], Tensors] = {}
    portions: list[tuple[Tensors, bool]] = []
    for layer in layers:
        copied = layer.dtype in HALF_TYPES or not _is_dense(layer)
        kind = (layer.device, layer.dtype, layer.ndim <= 1, copied)
        portion = current.get(kind)
        limit = CPU_PORTION if layer.is_cpu else DEVICE_PORTION
        if portion is None or sum(other.numel() for other in portion) + layer.numel() > limit:
            portion = current[kind] = []
            portions.append((portion, copied))
        portion.append(layer)
    return portions


def _cut(columns: list[Tensors]) -> list[list[Tensors]]:
    """The columns as one piece, or in pieces of `CPU_PORTION` elements where they hold one longer layer."""
    first = columns[0][0]
    if len(columns[0]) > 1 or not first.is_cpu or first.numel() <= CPU_PORTION:
        return [columns]
    # All are laid out alike, so that it does not matter in which order elements are gone through.
    flat = [column[0].as_strided((first.numel(),), (1,)).split(CPU_PORTION) for column in columns]
    return [[[piece] for piece in pieces] for pieces in zip(*flat, strict=True)]


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a stretch of memory, in any order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _working_copy(layer: Tensor) -> Tensor:
    dtype = torch.float32 if layer.dtype in HALF_TYPES else layer.dtype
    return torch.empty_like(layer, dtype=dtype, requires_grad=False).copy_(layer)


def laid_out_as(weight: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it in the memory layout of `weight`: torch's fused kernels go by addresses."""
    if tensor.stride() == weight.stride():
        return tensor
    sizes = zip(weight.shape, weight.stride(), tensor.stride(), strict=True)
    if all(size == 1 or ours == theirs for size, ours, theirs in sizes):
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)
