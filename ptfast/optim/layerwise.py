"""Base of layer-wise optimizers, which step over batches of layers and keep torch's interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ptfast.core.errors import ConfigError

Group: TypeAlias = dict[str, Any]
Tensors: TypeAlias = list[Tensor]
Params: TypeAlias = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Group]

CPU_CHUNK_SIZE = 1 << 19
"""Elements that all passes of a step process before the next ones, so that they stay in a CPU's cache."""
DEVICE_CHUNK_SIZE = 1 << 26
"""The same on other devices, where it limits a step's temporary memory to 256 MiB in float32."""
HALF_TYPES = (torch.float16, torch.bfloat16)


class LayerBatch:
    """Layers of one group, device and type that are updated together: all with a gradient, all 1-d or none.

    A batch has whole layers in one piece, or a single long layer in several pieces. On the CPU all tensors
    are flat views in memory order, built once to save 20 us of Python per layer and step. `weights` are the
    tensors to update: views of the layers, or copies, in float32 for half precision.
    """

    def __init__(
        self,
        layers: Tensors,
        weights: Tensors,
        states: list[Group],
        layer_state: Sequence[str],
        scalar_state: Sequence[str],
    ) -> None:
        self.layers, self._weights = layers, weights
        self.ndim = max(layer.ndim for layer in layers)
        """The largest number of dimensions of a layer."""
        self.on_cpu = layers[0].is_cpu
        self.scalars: list[Tensors] = [[state[name] for state in states] for name in scalar_state]
        """State that is one number per layer, by name."""
        columns = [weights, *([state[name] for state in states] for name in layer_state)]
        self.pieces: list[list[Tensors]] = [
            [weights, [], *kept] for weights, *kept in zip(*map(self._pieces_of, columns), strict=True)
        ]
        """Per piece: weights, gradients (not yet multiplied by `grad_factor`), then each of `layer_state`."""
        self.grad_factor: Tensor | None = None
        """0-d; None for 1."""
        self.found_inf: Tensor | None = None
        """0-d; 1 if the step must change nothing. None for 0."""
        self._made_from = [
            (layer, layer.data_ptr(), layer.stride(), state, [*state.values()])
            for layer, state in zip(layers, states, strict=True)
        ]

    def is_current(self, layers: Tensors, states: dict[Tensor, Group]) -> bool:
        """Return True if the batch has these layers, and their addresses and state are unchanged."""
        if len(layers) != len(self.layers):
            return False
        for layer, (known, address, strides, state, values) in zip(layers, self._made_from, strict=True):
            if layer is not known or layer.data_ptr() != address or layer.stride() != strides:
                return False
            if states.get(layer) is not state or not all(map(is_, state.values(), values)):
                return False
        return True

    def load_grads(self) -> None:
        """Load the current gradients of the layers; C011 for a sparse one."""
        grads: Tensors = []
        for layer, weight in zip(self.layers, self._weights, strict=True):
            grad = layer.grad
            assert grad is not None
            if grad.is_sparse:
                raise no_sparse("it does")
            grads.append(laid_out_as(weight, grad if grad.dtype == weight.dtype else grad.to(weight.dtype)))
        for piece, part in zip(self.pieces, self._pieces_of(grads), strict=True):
            piece[1] = part

    def finish(self, *, copied: bool) -> None:
        """Release the gradients, and write copied weights back."""
        for piece in self.pieces:
            piece[1] = []
        if copied:
            torch._foreach_copy_([layer.detach() for layer in self.layers], self._weights)

    def sizes(self, tensors: Tensors) -> Tensors:
        """Return each tensor's norm, 0-d, or on the CPU its square, which BLAS sums quickly, for `norms`."""
        return [torch.dot(t, t) for t in tensors] if self.on_cpu else list(torch._foreach_norm(tensors))

    def norms(self, sizes: Sequence[Tensor]) -> Tensor:
        """Return the norm of every layer, given the `sizes` of its tensors in the order of the pieces."""
        stacked = torch.stack(list(sizes))
        if not self.on_cpu:
            return stacked
        return (stacked if len(self.pieces) == 1 else stacked.sum(0, keepdim=True)).sqrt_()

    def counted_steps(self) -> Tensors:
        """Increment the step counts unless an infinity was found, and return them."""
        (steps,) = self.scalars
        torch._foreach_add_(steps, [1.0 - self.found_inf] * len(steps) if self.found_inf is not None else 1)
        return steps

    def scaled(self, grads: Tensors) -> Tensors:
        """Return the gradients times `grad_factor`, if there is one."""
        return grads if self.grad_factor is None else list(torch._foreach_mul(grads, self.grad_factor))

    def _pieces_of(self, column: Tensors) -> list[Tensors]:
        """Return a column as one piece, or a layer longer than `CPU_CHUNK_SIZE` in pieces of that size."""
        if not self.on_cpu:
            return [column]
        # All columns share one layout, so the order of elements does not matter.
        flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in column]
        if len(flat) > 1 or flat[0].numel() <= CPU_CHUNK_SIZE:
            return [flat]
        return [[piece] for piece in flat[0].split(CPU_CHUNK_SIZE)]


@dataclass
class PlannedBatch:
    """Layers of a group that are updated together if they have gradients."""

    layers: Tensors
    copied: bool
    """Whether copies of the layers are updated and written back."""
    batch: LayerBatch | None = None
    """The batch of the last step."""


def plan_batches(layers: Tensors) -> list[PlannedBatch]:
    """Split layers into batches that fit the cache, each of one device and type, with 1-d layers separate."""
    current: dict[tuple[Any, ...], PlannedBatch] = {}
    batches: list[PlannedBatch] = []
    for layer in layers:
        copied = layer.dtype in HALF_TYPES or not is_dense(layer)
        kind = (layer.device, layer.dtype, layer.ndim <= 1, copied)
        batch = current.get(kind)
        limit = CPU_CHUNK_SIZE if layer.is_cpu else DEVICE_CHUNK_SIZE
        full = batch is None or sum(other.numel() for other in batch.layers) + layer.numel() > limit
        # Copies of layers that share memory would overwrite each other's step.
        if batch is None or full or (copied and any(map(partial(_share_memory, layer), batch.layers))):
            batch = current[kind] = PlannedBatch([], copied)
            batches.append(batch)
        batch.layers.append(layer)
    return batches


def no_sparse(who: str) -> ConfigError:
    hint = "Build the embedding with sparse=False, or use optimizer=sgd optimizer.weight_decay=0"
    return ConfigError("C011", f"{who} not support sparse gradients", key="optimizer", suggestion=hint)


def is_dense(tensor: Tensor) -> bool:
    """Return True if `tensor` has no gaps or overlaps in memory, so that kernels may index raw memory."""
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def laid_out_as(weight: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` in the memory layout of `weight`, copied if needed: fused kernels index raw memory."""
    if tensor.stride() == weight.stride():
        return tensor
    sizes = zip(weight.shape, weight.stride(), tensor.stride(), strict=True)
    if all(size == 1 or ours == theirs for size, ours, theirs in sizes):
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)


class LayerwiseOptimizer(Optimizer):
    """Base of optimizers whose step depends on the norm of each layer (one parameter tensor).

    A step runs every operation over a list of layers (multi-tensor) and never waits for the device. On the
    CPU the lists are short enough for the cache, and longer layers are split.

    `None` gradients, groups, closures, saving, loading and fp16 scaling work as in torch's fused optimizers;
    a group may override every keyword. Half-precision parameters are updated in float32 and have float32
    state, but the weights are rounded after every step: there are no master weights.
    """

    needs_whole_layers = True
    """Whether `parallel=fsdp`, where a rank has only a part of each layer, rejects it."""
    _step_supports_amp_scaling = True
    layer_state: tuple[str, ...] = ()
    """Names of the state that has its layer's shape; starts at zero."""
    scalar_state: tuple[str, ...] = ()
    """Names of the state that is one number per layer; starts at zero."""

    def __init__(self, params: Params, defaults: Group) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if name in defaults and not defaults[name] >= 0:
                raise ValueError(f"{name} must be at least 0, not {defaults[name]}")
        for beta in (*defaults.get("betas", ()), defaults.get("momentum", 0.0)):
            if not 0 <= beta < 1:
                raise ValueError(f"betas and momentum must be in [0, 1), not {beta}")
        self._plans: dict[int, list[PlannedBatch]] = {}
        """The batches of each group, by its index."""
        super().__init__(params, defaults)

    def _update(self, group: Group, batch: LayerBatch) -> None:
        """Update weights and state of `batch` in place."""
        raise NotImplementedError

    def _grad_factor(self, device: torch.device) -> Tensor | None:
        """Return the factor on all gradients, applied first: 0-d, on `device`; None for 1."""
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        return None if grad_scale is None else grad_scale.to(device, non_blocking=True).reciprocal()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure`, if given, take a step, and return the loss; C011 for a sparse gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factors: dict[torch.device, tuple[Tensor | None, Tensor | None]] = {}
        for index, group in enumerate(self.param_groups):
            if index not in self._plans:
                self._plans[index] = plan_batches(group["params"])
            for planned in self._plans[index]:
                layers = [layer for layer in planned.layers if layer.grad is not None]
                if not layers:
                    continue
                device = layers[0].device
                if device not in factors:
                    factor = self._grad_factor(device)
                    # Reading the factor is free on the CPU, and may save a pass over the gradients.
                    needless = factor is not None and factor.is_cpu and factor.item() == 1
                    found_inf: Tensor | None = getattr(self, "found_inf", None)
                    if found_inf is not None:
                        # It is a sum over devices, but torch's kernels skip the step only at exactly 1.
                        found_inf = found_inf.to(device, non_blocking=True).clamp(max=1)
                    factors[device] = None if needless else factor, found_inf
                batch = planned.batch
                if batch is None or planned.copied or not batch.is_current(layers, self.state):
                    batch = planned.batch = self._build_batch(layers, copied=planned.copied)
                batch.grad_factor, batch.found_inf = factors[device]
                batch.load_grads()
                self._update(group, batch)
                batch.finish(copied=planned.copied)
        return loss

    def _build_batch(self, layers: Tensors, *, copied: bool) -> LayerBatch:
        """Return the batch of `layers` with their state, which their first step creates."""
        weights, states = [], []
        for layer in layers:
            weight = layer.detach()
            if copied:
                dtype = torch.float32 if layer.dtype in HALF_TYPES else layer.dtype
                weight = torch.empty_like(layer, dtype=dtype, requires_grad=False).copy_(layer)
            state = self.state[layer]
            if not state:
                for name in self.scalar_state:
                    # Torch's kernels read step counts as float32, whatever the type of the weights.
                    state[name] = weight.new_zeros((), dtype=torch.float32 if name == "step" else None)
                for name in self.layer_state:
                    state[name] = torch.zeros_like(weight)
            for name in self.layer_state:
                # State that was loaded or created earlier may have another memory layout.
                state[name] = laid_out_as(weight, state[name])
            weights.append(weight)
            states.append(state)
        return LayerBatch(layers, weights, states, self.layer_state, self.scalar_state)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch; ValueError for shards, or parameters that are not floating-point."""
        super().add_param_group(param_group)
        self._plans.clear()
        for layer in self.param_groups[-1]["params"]:
            if not layer.is_floating_point():
                raise ValueError(f"{type(self).__name__} takes floating-point parameters, not {layer.dtype}")
            if hasattr(layer, "to_local"):
                raise ValueError(f"{type(self).__name__} steps over whole layers, not shards")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state in the type it was saved in; torch would cast it to the parameter's type."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        layers = (layer for group in self.param_groups for layer in group["params"])
        for number, layer in zip(numbers, layers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[layer][name] = value.to(layer.device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plans = {}
        super().__setstate__(state)


def defaults_of(arguments: Group) -> Group:
    """Return a constructor's keywords, taken from its `locals()`, as the defaults of its groups."""
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
    """Step by SGD with a factor per layer. For weights `w`, gradients `g` and velocities `v`:

        v <- momentum * v + factor * (g + decay_within * w) + decay_beside * w;    w <- w - lr * v

    The pieces of `batch` are `w`, `g` and `v`. `factors` has one per layer, above 0 and on the device.

    Cost: one fused pass on the CPU; up to two more elsewhere and with Nesterov.
    """
    sgd = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "maximize": False, "is_first_step": False}
    sgd |= {"found_inf": batch.found_inf}
    if factors is not None and factors.is_cpu and momentum and not nesterov:
        # Reading from the CPU is free, and with the factor as its dampening the kernel needs no other pass.
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
