"""Operators of a forward pass: attention and GELU in single ones, where torch has one for all; float64."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ptfast.core.tensors.torch_internals import TorchDispatchMode
from ptfast.core.tensors.trees import tensors_in, tree_leaves
from ptfast.measure.audit.call_trace import CallTrace
from ptfast.measure.audit.finding import code_place

_PRODUCTS = ("mm", "bmm")
_MOVES = (
    *("view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze"),
    *("clone", "_to_copy", "detach", "alias", "contiguous", "slice", "select", "as_strided"),
)
"""Operators whose result holds the values of their first argument."""
_ELEMENTWISE = (
    *("mul", "div", "add", "sub", "masked_fill", "where", "native_dropout"),
    *("mul_", "div_", "add_", "sub_", "masked_fill_"),
)
_SAMPLED = 4096
"""Values by which a formula is told from others."""


class AttentionShape(NamedTuple):
    """One call of attention."""

    batch: tuple[int, ...]
    """Sizes before those of a product, such as of samples and heads."""
    queries: int
    keys: int
    depth: int
    values: int
    dtype: torch.dtype


class GeluShape(NamedTuple):
    """One call of GELU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    approximate: str
    """`tanh` or `none`, as `F.gelu` takes it."""


class _Scores(NamedTuple):
    """The part of a product of queries and keys, and what comes of it up to the softmax."""

    depth: int


@dataclass(eq=False)
class _Weights:
    """What became of the result of one softmax of products."""

    place: str
    depth: int
    module: str = ""
    shape: AttentionShape | None = None
    """Once it was multiplied with values."""
    elsewhere: bool = False
    """Something but a product with values has read it."""


class OperatorTrace(TorchDispatchMode):
    """Records what operators of the forward pass show, while it is entered.

    Formulas written by hand are followed from operator to operator: attention by its chain of product,
    softmax and product of activations, where nothing else reads the weights; GELU by its values, once erf or
    tanh have been shifted by one and multiplied.

    Args:
        model: whose modules are named, and whose parameters are no activations.
        calls: entered too; says what torch's own functions are at.

    Cost: about 20 us for each operator.
    """

    def __init__(self, model: nn.Module, calls: CallTrace) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._calls = calls
        self._stack: list[str] = []
        self._roles: Any = WeakIdKeyDictionary()
        for tensor in (*model.parameters(), *model.buffers()):
            self._roles[tensor] = "parameter"
        self._softmaxes: list[_Weights] = []
        self.recording = False
        """Whether the forward pass is at work."""
        self.gelus: defaultdict[str, list[GeluShape]] = defaultdict(list)
        """Calls of GELU by hand, by place."""
        self.doubles: defaultdict[str, int] = defaultdict(int)
        """Operators with a float64 tensor for a result, by place."""
        self.normalises = False
        self.weighted = 0
        """Products and convolutions with a parameter."""

    @property
    def attentions(self) -> dict[str, list[tuple[str, AttentionShape]]]:
        """Calls of attention by hand of which nothing else reads the weights, with their module, by place."""
        found: defaultdict[str, list[tuple[str, AttentionShape]]] = defaultdict(list)
        for weights in self._softmaxes:
            if weights.shape is not None and not weights.elsewhere:
                found[weights.place].append((weights.module, weights.shape))
        return found

    @contextmanager
    def naming_modules(self) -> Iterator[None]:
        """Know which module of the model is at work inside."""

        def enter(module: nn.Module, inputs: Any) -> None:
            self._stack.append(self._names.get(module, ""))

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._stack.pop()

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # What keeps the compiler out of a mode imports it, for three seconds; nothing is compiled in here.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.recording:
            self._note(func.overloadpacket.__name__, func, args, kwargs, result)
        return result

    def _note(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if "norm" in name or name == "rsqrt":
            self.normalises = True
        first = next(tensors_in(result), None)
        if first is None:
            return
        if first.dtype == torch.float64 and first.numel() > 1 and (place := code_place()) is not None:
            self.doubles[place] += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        roles = [self._roles.get(tensor) for tensor in given]
        if name in ("mm", "bmm", "addmm", "baddbmm", "convolution") and "parameter" in roles:
            self.weighted += 1
        if not self._in_fused_attention():
            role = self._attention(name, args, roles)
            if role is None:
                role = self._gelu(name, args, given, roles, first)
            if role is not None:
                self._roles[first] = role

    def _in_fused_attention(self) -> bool:
        """Return True inside torch's own attention, which may take these very operators."""
        name, _, kwargs = self._calls.current
        whole = name == "multi_head_attention_forward" and not kwargs.get("need_weights", True)
        return whole or name == "scaled_dot_product_attention"

    def _attention(self, name: str, args: Any, roles: list[Any]) -> Any:
        """Return the part that the result plays: `parameter`, `_Scores`, `_Weights` or none."""
        weights = next((role for role in roles if isinstance(role, _Weights)), None)
        if name in _PRODUCTS:
            if weights is not None:
                if roles[0] is weights and roles[1] != "parameter" and weights.shape is None:
                    queries, keys = args[0].shape[-2:]
                    values, dtype = args[1].shape[-1], args[0].dtype
                    weights.module = self._stack[-1] if self._stack else ""
                    batch = self._batch_of_product(args[0])
                    weights.shape = AttentionShape(batch, queries, keys, weights.depth, values, dtype)
                else:
                    weights.elsewhere = True
                return None
            return None if name == "mm" or "parameter" in roles else _Scores(args[0].shape[-1])
        if name == "_softmax" and isinstance(roles[0], _Scores) and args[1] in (-1, args[0].dim() - 1):
            found = _Weights(code_place() or "", roles[0].depth)
            self._softmaxes.append(found)
            return found
        if name in _MOVES or name in _ELEMENTWISE:
            scores = next((role for role in roles if isinstance(role, _Scores)), None)
            return weights or scores or (roles[0] if name in _MOVES and roles else None)
        if weights is not None and not name.endswith("_like"):
            weights.elsewhere = True
        return None

    def _batch_of_product(self, weights: Tensor) -> tuple[int, ...]:
        """Sizes before the last two of a product's first factor, which torch may have merged."""
        given = next(tensors_in(self._calls.current[1]), weights)
        shape = given.shape if given.numel() == weights.numel() else weights.shape
        return tuple(shape[:-2]) or (1,)

    def _gelu(self, name: str, args: Any, given: list[Tensor], roles: list[Any], result: Tensor) -> Any:
        """Return `squashed` for erf or tanh of something, `shifted` once 1 was added; note a GELU."""
        if name in ("erf", "tanh"):
            return "squashed"
        if (
            name in ("add", "add_")
            and "squashed" in roles
            and 1 in [a for a in args if isinstance(a, (int, float))]
        ):
            return "shifted"
        if name not in ("mul", "mul_") or "shifted" not in roles:
            return None
        others = [tensor for tensor, role in zip(given, roles, strict=True) if role != "shifted"]
        if not others or others[0].numel() == 1:
            return "shifted"
        if others[0].shape == result.shape and (place := code_place()) is not None:
            approximate = _approximation(others[0], result)
            if approximate is not None:
                self.gelus[place].append(GeluShape(tuple(result.shape), result.dtype, approximate))
        return None


def _approximation(factor: Tensor, product: Tensor) -> str | None:
    """Return `none` or `tanh` if a product is that GELU of its factor, up to constants before or after it."""
    factor, product = (tensor.detach().flatten()[:_SAMPLED].float() for tensor in (factor, product))
    if not bool(factor.any()):
        return None
    for approximate in ("none", "tanh"):
        for inputs in (factor, 2 * factor):
            gelu = F.gelu(inputs, approximate=approximate)
            if any(torch.allclose(product, n * gelu, rtol=1e-2, atol=1e-3) for n in (1, 2)):
                return approximate
    return None
