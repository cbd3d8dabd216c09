"""The base of layer-wise optimizers: steps over batches of layers, and manners like torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ptfast.optim.layer_batches import Group, LayerBatch, Tensors, batch_layers, laid_out_as, working_copy

Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]


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
        self._plans: dict[int, list[_Planned]] = {}
        self._buffers: dict[torch.dtype, Tensors] = {}
        """For what a step computes on the way, by the type of the weights."""
        super().__init__(params, defaults)

    def _update(self, group: Group, batch: LayerBatch) -> None:
        """Update weights and state of `batch` in place."""
        raise NotImplementedError

    def _grad_factor(self, device: torch.device) -> Tensor | None:
        """The factor on all gradients, before anything else: 0-d, on `device`; None for 1."""
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        return None if grad_scale is None else grad_scale.to(device, non_blocking=True).reciprocal()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, after a call of `closure`, whose loss is returned; C011 for a sparse gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factors: dict[torch.device, tuple[Tensor | None, Tensor | None]] = {}
        for index, group in enumerate(self.param_groups):
            for planned in self._plan(index, group["params"]):
                layers = [layer for layer in planned.layers if layer.grad is not None]
                if not layers:
                    continue
                device = layers[0].device
                if device not in factors:
                    factor = self._grad_factor(device)
                    # Looking is free on the CPU, where a pass over the gradients is not.
                    needless = factor is not None and factor.is_cpu and factor.item() == 1
                    found_inf: Tensor | None = getattr(self, "found_inf", None)
                    if found_inf is not None:
                        # A sum over devices, while torch's kernels skip the step at exactly 1.
                        found_inf = found_inf.to(device, non_blocking=True).clamp(max=1)
                    factors[device] = None if needless else factor, found_inf
                batch = self._batch(planned, layers)
                batch.grad_factor, batch.found_inf = factors[device]
                batch.load_grads()
                self._update(group, batch)
                batch.finish(copied=planned.copied)
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch; not of parameters that are not floating-point, nor of shards."""
        super().add_param_group(param_group)
        self._plans.clear()
        for layer in self.param_groups[-1]["params"]:
            if not layer.is_floating_point():
                raise ValueError(f"{type(self).__name__} takes floating-point parameters, not {layer.dtype}")
            if hasattr(layer, "to_local"):
                raise ValueError(f"{type(self).__name__} steps over whole layers, not shards")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state, as in torch, but in the type it was saved in: torch casts it to the parameter's."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        layers = (layer for group in self.param_groups for layer in group["params"])
        for number, layer in zip(numbers, layers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[layer][name] = value.to(layer.device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plans, self._buffers = {}, {}
        super().__setstate__(state)

    def _plan(self, index: int, layers: Tensors) -> list[_Planned]:
        """The layers of a group in batches, found once."""
        plan = self._plans.get(index)
        if plan is None:
            plan = self._plans[index] = [_Planned(*planned) for planned in batch_layers(layers)]
        return plan

    def _batch(self, planned: _Planned, layers: Tensors) -> LayerBatch:
        """The batch of those of the planned layers that have a gradient."""
        if planned.batch is None or planned.copied or not planned.batch.holds(layers, self.state):
            weights = [working_copy(layer) if planned.copied else layer.detach() for layer in layers]
            states = [self._state_of(*pair) for pair in zip(layers, weights, strict=True)]
            planned.batch = LayerBatch(layers, weights, states, self.layer_state, self.scalar_state)
        return planned.batch

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


@dataclass
class _Planned:
    """Layers that are updated together, if they have gradients."""

    layers: Tensors
    copied: bool
    """A copy of them is updated, and written back."""
    batch: LayerBatch | None = None
    """As of the last step."""


def defaults_of(arguments: Group) -> Group:
    """A constructor's keywords by name, from its `locals()`: what groups that do not set them get."""
    return {name: arguments[name] for name in arguments if name not in ("self", "params", "__class__")}


def step_by_momentum(
    batch: LayerBatch,
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

    The pieces of `batch` are `w`, `g` and `v`; factors are one per layer, above 0, on the device, None for 1.

    Cost: one fused pass on the CPU; up to two before it elsewhere and with Nesterov.
    """
    sgd = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "maximize": False, "is_first_step": False}
    sgd |= {"found_inf": batch.found_inf}
    if factors is not None and factors.is_cpu and momentum and not nesterov:
        # No host waits for a CPU: with the factor as its own dampening the kernel needs no pass before it.
        unscale = 1.0 if batch.grad_factor is None else batch.grad_factor.item()
        whole = factors if unscale == 1 else factors * unscale
        numbers, decays = whole.tolist(), [decay_within / unscale] * len(batch.layers)
        if decay_beside:
            decays = (whole.reciprocal() * decay_beside + decays[0]).tolist()
        for columns in batch.pieces:
            for weight, grad, velocity, number, decay in zip(*columns, numbers, decays, strict=True):
                kernel = {"weight_decay": decay, "dampening": 1 - number, **sgd}
                torch._fused_sgd_([weight], [grad], [velocity], **kernel)
        return
    for weights, grads, velocities in batch.pieces:
        update, decay = batch.scaled(grads), decay_beside + decay_within
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
