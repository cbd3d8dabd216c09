"""The operators of training steps: which, of which shapes and types, and how often, without their values."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptfast.core.tensors.torch_internals import OpOverload, TorchDispatchMode
from ptfast.core.tensors.trees import tree_leaves, tree_map


@dataclass(frozen=True)
class TensorMeta:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements; those that broadcasting repeats are counted once."""
        size = self.dtype.itemsize
        for length, stride in zip(self.shape, self.stride, strict=True):
            size *= length if stride else min(length, 1)
        return size


@dataclass(eq=False)
class Operator:
    """Calls of one operator that agree in everything but the values of tensors."""

    op: Any
    """`torch.ops.aten.mm.default`, say."""
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    """By name; tensors, there and in `args`, are `TensorMeta`, and lists are tuples."""
    outputs: Any
    phase: str
    """Phase of a step: `forward`, `backward` or `optimizer`."""
    count: int = 0

    @property
    def name(self) -> str:
        """Its short name, such as `mm`."""
        return str(self.op.overloadpacket.__name__)

    @property
    def tensors(self) -> list[TensorMeta]:
        """Those it reads."""
        return _shaped_in((self.args, self.kwargs))

    @property
    def results(self) -> list[TensorMeta]:
        """Those it returns; what it writes in place is among them."""
        return _shaped_in(self.outputs)

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the first floating-point tensor that it reads."""
        return next((spec.dtype for spec in self.tensors if spec.dtype.is_floating_point), None)

    @property
    def is_view(self) -> bool:
        """Return True if its result is a view of what it is given, so that nothing is moved."""
        returns = self.op._schema.returns
        return bool(returns) and all(
            value.alias_info is not None and not value.alias_info.is_write for value in returns
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that one call reads and writes."""
        if self.is_view:
            return 0
        return sum(spec.num_bytes for spec in (*self.tensors, *self.results))


class Operators(TorchDispatchMode):
    """Records the operators that run inside it, which compute what they would without it.

    What PyTorch decomposes stays decomposed, and kernels are chosen as ever: it stands where all of that has
    been decided.

    Args:
        phase: recorded with each; None to record nothing, until `phase` is set.

    Cost: some 20 us on the host for each call.
    """

    def __init__(self, phase: str | None = "forward") -> None:
        super().__init__()
        self.found: dict[Hashable, Operator] = {}
        self.phase = phase

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What keeps the compiler out of a mode imports it, for three seconds; nothing is compiled in here.
        return False

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        phase = self.phase
        if phase is not None and isinstance(func, OpOverload) and "c10d" not in func.namespace:
            # A tensor of a user's class may lack what is read here: training continues.
            with contextlib.suppress(Exception):
                self._note(phase, func, args, kwargs, outputs)
        return outputs

    def _note(self, phase: str, func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        plain = (func, shaped(args), tuple((name, shaped(value)) for name, value in kwargs.items()))
        key: Hashable = (*plain, phase)
        try:
            known = self.found.get(key)
        except TypeError:
            # An argument that is no plain value, such as a generator of random numbers.
            key, known = object(), None
        if known is None:
            known = self.found[key] = Operator(*plain, shaped(outputs), phase)
        known.count += 1


def shaped(value: Any) -> Any:
    """`value`, with `TensorMeta` for tensors and tuples for lists."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            return TensorMeta(tuple(value.shape), (1,) * value.dim(), value.dtype)
        return TensorMeta(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(shaped(item) for item in value)
    return value


def _shaped_in(value: Any) -> list[TensorMeta]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, TensorMeta)]


def total_flops(operators: Iterable[Operator]) -> int:
    """Floating-point operations of all calls."""
    return sum(operator.count * flops(operator) for operator in operators)


def flops(operator: Operator) -> int:
    """Floating-point operations of one call, by the formulas of `torch.utils.flop_counter`; 0 without one.

    Products and convolutions have one: two operations for each multiplication and sum. What is computed
    element by element has none.

    Cost: the first call takes 0.2 s, for an import.
    """
    from torch.utils.flop_counter import flop_registry

    packet = operator.op.overloadpacket
    formula = flop_registry.get(packet)
    if formula is None and operator.name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        # Older versions of torch have none of its own.
        formula = flop_registry.get(getattr(torch.ops.aten, operator.name.replace("_for_cpu", "")))
    if formula is None:
        return 0
    args, kwargs, outputs = tree_map(_on_meta, (operator.args, dict(operator.kwargs), operator.outputs))
    return int(formula(*args, **kwargs, out_val=outputs))


def _on_meta(value: Any) -> Any:
    if isinstance(value, TensorMeta):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value
