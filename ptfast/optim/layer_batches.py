"""The layers of an optimizer step in batches: many in one operation, as much as the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ptfast.core.errors import ConfigError

Group: TypeAlias = dict[str, Any]
Tensors: TypeAlias = list[Tensor]

CPU_CHUNK_SIZE = 1 << 19
"""Elements that all passes of a step go over before the next ones do: what a CPU's cache keeps in between."""
DEVICE_CHUNK_SIZE = 1 << 26
"""The same elsewhere, where it bounds the memory a step takes for a while: to 256 MiB in float32."""
HALF_TYPES = (torch.float16, torch.bfloat16)


class LayerBatch:
    """Layers that are updated together: of one group, device and type, all with a gradient, all 1-d or none.

    A batch holds whole layers in one piece, or a single long layer in several. On the CPU all tensors are
    flat views in memory order, made once, because 20 us of Python per layer and step would count there.
    `weights` are updated: views of the layers, or copies in float32.
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
            [weights, [], *kept] for weights, *kept in zip(*map(self._cut, columns), strict=True)
        ]
        """Per piece: weights, gradients (not yet multiplied by `grad_factor`), then each of `layer_state`."""
        self.grad_factor: Tensor | None = None
        """0-d; None for 1."""
        self.found_inf: Tensor | None = None
        """0-d; 1 if the step must change nothing. None for 0."""
        self._buffers: list[Any] | None = None
        self._made_from = [
            (layer, layer.data_ptr(), layer.stride(), state, [*state.values()])
            for layer, state in zip(layers, states, strict=True)
        ]

    def holds(self, layers: Tensors, states: dict[Tensor, Group]) -> bool:
        """Return True if the batch is of these layers, and they and their state lie where they did."""
        if len(layers) != len(self.layers):
            return False
        for layer, (known, address, strides, state, values) in zip(layers, self._made_from, strict=True):
            if layer is not known or layer.data_ptr() != address or layer.stride() != strides:
                return False
            if states.get(layer) is not state or not all(map(is_, state.values(), values)):
                return False
        return True

    def load_grads(self) -> None:
        """Take the gradients that the layers have now; C011 for a sparse one."""
        grads: Tensors = []
        for layer, weight in zip(self.layers, self._weights, strict=True):
            grad = layer.grad
            assert grad is not None
            if grad.is_sparse:
                raise no_sparse("it does")
            grads.append(laid_out_as(weight, grad if grad.dtype == weight.dtype else grad.to(weight.dtype)))
        for piece, cut in zip(self.pieces, self._cut(grads), strict=True):
            piece[1] = cut

    def finish(self, *, copied: bool) -> None:
        """Release the gradients, and write copied weights back."""
        for piece in self.pieces:
            piece[1] = []
        if copied:
            torch._foreach_copy_([layer.detach() for layer in self.layers], self._weights)

    def sizes(self, tensors: Tensors) -> Tensors:
        """What `norms` makes norms from: one 0-d tensor each; on the CPU squares, which BLAS sums quickly."""
        return [torch.dot(t, t) for t in tensors] if self.on_cpu else list(torch._foreach_norm(tensors))

    def norms(self, sizes: Sequence[Tensor]) -> Tensor:
        """Norm of every layer, from the sizes of its tensors in the order of the pieces."""
        stacked = torch.stack(list(sizes))
        if not self.on_cpu:
            return stacked
        return (stacked if len(self.pieces) == 1 else stacked.sum(0, keepdim=True)).sqrt_()

    def counted_steps(self) -> Tensors:
        """Step counts, raised by 1 unless an infinity was found."""
        (steps,) = self.scalars
        torch._foreach_add_(steps, [1.0 - self.found_inf] * len(steps) if self.found_inf is not None else 1)
        return steps

    def scaled(self, grads: Tensors, out: Tensors | None = None) -> Tensors:
        """The gradients times their factor where there is one, in `out` or as new tensors."""
        return grads if self.grad_factor is None else multiplied(grads, self.grad_factor, out)

    def buffers(self, shared: dict[torch.dtype, Tensors]) -> list[tuple[Tensors | None, Tensors | None]]:
        """Scratch memory for each piece's weights: one lasts for the batch, the other for the piece.

        Kept and `shared` by all batches on the CPU, where mapping it takes longer than computing. Else none.
        """
        if not self.on_cpu:
            return [(None, None)] * len(self.pieces)
        if self._buffers is None:
            weight = self.pieces[0][0][0]
            memory = shared.setdefault(weight.dtype, [])
            memory += [weight.new_empty(CPU_CHUNK_SIZE) for _ in range(len(memory), len(self.pieces) + 1)]
            passing, *kept = memory
            self._buffers = []
            for (weights, *_), buffer in zip(self.pieces, kept, strict=False):
                lengths = [len(weight) for weight in weights]
                pair = (list(each[: sum(lengths)].split(lengths)) for each in (buffer, passing))
                self._buffers.append(tuple(pair))
        return self._buffers

    def _cut(self, column: Tensors) -> list[Tensors]:
        """A column as one piece; a layer longer than `CPU_CHUNK_SIZE` in pieces of that many elements."""
        if not self.on_cpu:
            return [column]
        # All columns share one layout, so the order of elements does not matter.
        flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in column]
        if len(flat) > 1 or flat[0].numel() <= CPU_CHUNK_SIZE:
            return [flat]
        return [[piece] for piece in flat[0].split(CPU_CHUNK_SIZE)]


@dataclass
class PlannedBatch:
    """Layers of a group that are updated together, as far as they have gradients."""

    layers: Tensors
    copied: bool
    """A copy of them is updated and written back."""
    batch: LayerBatch | None = None
    """That of the last step."""


def plan_batches(layers: Tensors) -> list[PlannedBatch]:
    """Batches that fit the cache, each of one device and type, with 1-d layers apart."""
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


def multiplied(tensors: Tensors, factor: float | Tensor, out: Tensors | None) -> Tensors:
    """`tensors` times `factor`, in `out` if given."""
    if out is None:
        return list(torch._foreach_mul(tensors, factor))
    return [torch.mul(tensor, factor, out=each) for tensor, each in zip(tensors, out, strict=True)]


def no_sparse(who: str) -> ConfigError:
    hint = "Build the embedding with sparse=False, or use optimizer=sgd optimizer.weight_decay=0"
    return ConfigError("C011", f"{who} not support sparse gradients", key="optimizer", suggestion=hint)


def is_dense(tensor: Tensor) -> bool:
    """Return True if `tensor` fills its part of the memory: kernels may go by addresses."""
    return torch.ops.aten.is_non_overlapping_and_dense.default(tensor)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def laid_out_as(weight: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it in the memory layout of `weight`: torch's fused kernels go by addresses."""
    if tensor.stride() == weight.stride():
        return tensor
    sizes = zip(weight.shape, weight.stride(), tensor.stride(), strict=True)
    if all(size == 1 or ours == theirs for size, ours, theirs in sizes):
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)
