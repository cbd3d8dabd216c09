"""What a training step costs, from the shapes of its tensors: nothing is computed, no memory is taken."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.tensors.torch_internals import fake_tensors
from ptfast.core.tensors.trees import map_tensors, tensors_in
from ptfast.optim.build_optimizer import KERNELS
from ptfast.profiling.limits.operators import Operator, Operators

LossOf = Callable[[nn.Module, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class StepCosts:
    """Of forward and backward of one micro-batch."""

    operators: list[Operator]
    peak_bytes: int
    """Most that is held at once, the batch among it; without weights, buffers and gradients."""
    is_real: bool = False
    """The step was taken: it asks for values, which shapes alone do not have."""


def count_step(
    model: nn.Module, loss_of: LossOf, data: Any, half_type: torch.dtype | None, *, gathers: bool
) -> StepCosts:
    """Go through forward and backward of a micro-batch on tensors without values.

    A model that asks for values, as by `if mask.any()`, takes the step with them instead.

    Args:
        model: on the CPU; as it was when this returns, but for what a real step leaves in its buffers.
        half_type: of autocast; None for none.
        gathers: weights are gathered in `half_type`: autocast makes no copies of its own.

    Cost: some 100 us for each operator, and two seconds to import, once.
    """
    try:
        mode = fake_tensors()
        with _without_values(model, mode):
            fake = map_tensors(mode.from_tensor, data)
            return StepCosts(*_run(model, loss_of, fake, half_type, gathers, mode))
    except Exception:
        # What is wrong with the model itself, the real step says.
        found = _run(model, loss_of, data, half_type, gathers, nullcontext())
        return StepCosts(*found, is_real=True)


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What `optimizer` remembers after its first step: of most by shape, on the meta device.

    Others, whose kernels want values, take that step. It is of no use afterwards.
    """
    twin = copy.copy(optimizer)
    twin.state, twin.param_groups = defaultdict(dict), [*map(_on_meta, optimizer.param_groups)]
    try:
        _step(twin)
    except Exception:
        _step(twin := optimizer)
    return list(tensors_in([dict(kept) for kept in twin.state.values()]))


def _on_meta(group: dict[str, Any]) -> dict[str, Any]:
    # Fused kernels do not all run there.
    kernels = {name: False for name in KERNELS if name in group}
    return {
        **group,
        **kernels,
        "params": [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]],
    }


def _step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def _run(
    model: nn.Module, loss_of: LossOf, data: Any, half_type: torch.dtype | None, gathers: bool, mode: Any
) -> tuple[list[Operator], int]:
    weights = list(model.parameters())
    meter = _Meter(weights if gathers else ())
    meter.hold([*weights, *model.buffers()], counts=False)
    meter.hold(tensors_in(data))
    # Where gradients lie is counted elsewhere.
    hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in weights if p.requires_grad]
    autocast = nullcontext() if half_type is None else torch.autocast("cpu", dtype=half_type)
    model.train()
    try:
        with mode, meter:
            with autocast:
                loss, _ = loss_of(model, data)
            meter.phase = "backward"
            loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    return list(meter), meter.peak_bytes


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _without_values(model: nn.Module, mode: Any) -> Iterator[None]:
    """Have parameters and buffers without values in the place of the model's own; tied ones stay tied."""
    own: list[tuple[nn.Module, str, Tensor]] = []
    for module in model.modules():
        named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        own += [(module, name, tensor) for name, tensor in named]
    try:
        for module, name, tensor in own:
            setattr(module, name, mode.from_tensor(tensor))
        yield
    finally:
        for module, name, tensor in own:
            setattr(module, name, tensor)


class _Meter(Operators):
    """Records operators, and the most memory that their results take at once.

    Args:
        gathered: weights whose copies in another type are not counted.
    """

    def __init__(self, gathered: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._gathered = {id(weight.untyped_storage()) for weight in gathered}
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))  # asks a tensor without values for its device
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        casts = func is torch.ops.aten._to_copy.default and id(args[0].untyped_storage()) in self._gathered
        self.hold(tensors_in(outputs), counts=not casts)
        return outputs

    def hold(self, tensors: Iterable[Tensor], *, counts: bool = True) -> None:
        """Count the memory of `tensors` until it is let go of; that of which some is known counts once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (key := id(storage)) in self._known:
                continue
            size = storage.nbytes() if counts else 0
            self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._release(key, size))
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int, size: int) -> None:
        del self._known[key]
        self.live_bytes -= size
