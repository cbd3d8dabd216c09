"""Traces of an audit: calls of torch by Python code, and the operators of a forward pass."""

from __future__ import annotations

import contextlib
import inspect
import sys
import sysconfig
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ptfast.core.errors import PACKAGE
from ptfast.core.tensors.torch_internals import DispatchMode
from ptfast.core.tensors.trees import tensors_in, tree_leaves
from ptfast.run import Run

_OUR_MODELS = (f"{PACKAGE}/models/", f"{PACKAGE}/tasks/")
"""ptfast code that stands in for user code: models and tasks."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_HIDDEN = ("<", f"{Path(__file__).parent}/", f"{Path(torch.__file__).parent}/")
_READS = {
    **dict.fromkeys(("item", "tolist", "__int__", "__float__", "__index__", "__complex__"), "item"),
    **dict.fromkeys(("__bool__", "is_nonzero"), "if or while on a tensor"),
    **dict.fromkeys(("__repr__", "__format__"), "print of a tensor"),
    **dict.fromkeys(("cpu", "numpy", "__array__"), "cpu"),
    **dict.fromkeys(("nonzero", "argwhere"), "nonzero"),
    **{name: name for name in ("masked_select", "unique", "unique_consecutive", "equal", "allclose")},
}
"""Kinds of calls that read a value on the host for any arguments, by function name."""
_MAKERS = (
    *("zeros", "ones", "empty", "full", "eye", "tensor", "as_tensor", "arange", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "normal"),
)
_MOVES = ("to", "cuda", "type_as")
_DEVICES = (Tensor, str, torch.device, int)
"""Types of arguments that name a device."""


def code_place() -> str | None:
    """Return the running line of user, library or ptfast model code, as `file.py:12`."""
    frame = sys._getframe(1)
    while frame is not None and _is_framework(frame.f_code.co_filename):
        frame = frame.f_back
    file = None if frame is None else _shown(frame.f_code.co_filename)
    return None if frame is None or file is None else f"{file}:{frame.f_lineno}"


def source_place(thing: Any) -> str:
    """Return where a class or function is defined, as `file.py:12`, or its name if it has no file."""
    with contextlib.suppress(OSError, TypeError):
        _, line = inspect.getsourcelines(thing)
        if file := _shown(inspect.getsourcefile(thing) or "<>"):
            return f"{file}:{line}"
    return f"{thing.__module__}.{thing.__qualname__}"


@cache
def _is_framework(file: str) -> bool:
    """Return True for files of torch, Python's standard library or this package."""
    return file.startswith(_HIDDEN) or (file.startswith(_STANDARD) and not file.startswith(_LIBRARIES))


@cache
def _shown(file: str) -> str | None:
    """Return the name to show for a source file; None for ptfast's own, except models and tasks."""
    path = Path(file)
    if file.startswith(f"{PACKAGE}/"):
        return str(path.relative_to(Path(PACKAGE).parent)) if file.startswith(_OUR_MODELS) else None
    for folder in (*_LIBRARIES, Path.cwd()):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return path.name


@dataclass
class Calls:
    """Calls of one kind at one place."""

    count: int = 0
    seconds: float = 0.0
    names: set[str] = field(default_factory=set)

    def add(self, name: str, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        self.names.add(name)


class CallTrace(TorchFunctionMode):
    """Records slow calls by place in the code.

    Calls that torch makes internally count as part of the outer call. Only reads of tensors on `device_type`
    make the host wait. Cost: about 2 us per call.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._on_host: Any = WeakIdKeyDictionary()
        self.reads: defaultdict[tuple[str, str], Calls] = defaultdict(Calls)
        """Reads on the host, by kind and place; the counters below are keyed by place only."""
        self.moved: defaultdict[str, Calls] = defaultdict(Calls)
        """Tensors created on the host and moved to the device."""
        self.copied: defaultdict[str, Calls] = defaultdict(Calls)
        """Arrays that torch.tensor copied."""
        self.arithmetic: defaultdict[str, Calls] = defaultdict(Calls)
        """Operations on float tensors of more than one element."""
        self.with_gradients: str | None = None
        """The place of the first operation that records gradients."""
        self.current: tuple[str, Any, dict[str, Any]] = ("", (), {})
        """The running call: name, arguments and keywords."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or (place := code_place()) is None:
            return func(*args, **kwargs)
        self.current, start = (name, args, kwargs), time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = ("", (), {})
        seconds = time.perf_counter() - start
        given = [*tensors_in(args), *tensors_in(kwargs)]
        from_host = bool(given) and all(tensor in self._on_host for tensor in given)
        if self.with_gradients is None and torch.is_grad_enabled() and given:
            self.with_gradients = place
        if not from_host and (what := self._read(name, args, kwargs)):
            self.reads[what, place].add(name, seconds)
        if name == "tensor" and args and isinstance(args[0], np.ndarray) and args[0].ndim:
            self.copied[place].add(name, seconds)
        if isinstance(result, Tensor):
            made = name in _MAKERS and not given and kwargs.get("device") is None
            named = (each for each in (*args[1:], *kwargs.values()) if each is not True)
            to_device = name == "cuda" or any(isinstance(each, _DEVICES) for each in named)
            if name in _MOVES and from_host and to_device:
                self.moved[place].add(name, seconds)
            elif (made or from_host) and result.device.type == "cpu":
                self._on_host[result] = True
            if given and result.is_floating_point() and result.numel() > 1 and name not in _MOVES:
                self.arithmetic[place].add(name, seconds)
        return result

    def _read(self, name: str, args: Any, kwargs: dict[str, Any]) -> str | None:
        """Return the kind of read if a call reads a device tensor on the host; None otherwise."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or first.device.type != self._device_type:
            return None
        if name in _READS:
            return _READS[name]
        if name == "to":
            targets = *args[1:2], kwargs.get("device")
            to_cpu = any(isinstance(each, (str, torch.device)) and str(each) == "cpu" for each in targets)
            return "cpu" if to_cpu else None
        if name == "where":
            return "nonzero" if len(args) == 1 and not kwargs else None
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats", first)
            return "repeat_interleave" if isinstance(repeats, Tensor) else None
        masks = (index for index in tensors_in(args[1:2]) if index.dtype in (torch.bool, torch.uint8))
        if name in ("__getitem__", "__setitem__") and any(mask.dim() for mask in masks):
            # Assigning a single value does not need the number of selected elements.
            fills = name == "__setitem__" and (not isinstance(args[2], Tensor) or args[2].numel() == 1)
            return None if fills else "boolean mask"
        return None


@contextlib.contextmanager
def cuda_syncs() -> Iterator[dict[str, int]]:
    """Count the calls at each place that make the host wait for a CUDA device, using torch's sync debug mode.

    This includes waits inside torch's operators, but not their duration.
    """
    found: defaultdict[str, int] = defaultdict(int)
    before = torch.cuda.get_sync_debug_mode()

    def note(message: Warning | str, *others: Any, **named: Any) -> None:
        if "synchronizing CUDA operation" in str(message) and (place := code_place()) is not None:
            found[place] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


_CARRIERS = (
    *("view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze", "squeeze"),
    *("clone", "_to_copy", "detach", "alias", "contiguous", "slice", "select", "as_strided"),
)
"""Operators that return the values of their first argument."""
_ELEMENTWISE = (
    *("mul", "div", "add", "sub", "masked_fill", "where", "native_dropout"),
    *("mul_", "div_", "add_", "sub_", "masked_fill_"),
)
_SAMPLED = 4096
"""Number of values used to recognize a formula."""


@dataclass(eq=False)
class AttentionWeights:
    """A softmax of products of activations, and how its result is used."""

    place: str
    weighs: bool = False
    """Whether it is multiplied by the values of attention."""
    elsewhere: bool = False
    """Whether another operator reads it."""


class OperatorTrace(DispatchMode):
    """Records the operators of the forward pass of a run; `calls` must be entered as well.

    Hand-written attention is followed from operator to operator: product, softmax and product of activations,
    if no other operator reads the weights. Hand-written GELU is recognized by the values of its last product.
    Cost: about 20 us per operator, 200 us per product.
    """

    def __init__(self, run: Run, calls: CallTrace) -> None:
        super().__init__()
        self._clock, self._calls = run.clock, calls
        self._roles: Any = WeakIdKeyDictionary()
        """`parameter`, `scores` or `AttentionWeights`, by tensor.

        Scores are a product of queries and keys, or elementwise results of it before the softmax.
        """
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            self._roles[tensor] = "parameter"
        self.softmaxes: list[AttentionWeights] = []
        """Hand-written softmaxes of products of activations, and where their results are used."""
        self.gelus: Counter[tuple[str, str]] = Counter()
        """Counts by place and by the `approximate` argument of `F.gelu`."""
        self.doubles: Counter[str] = Counter()
        """Operators that return a float64 tensor, by place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, first = func.overloadpacket.__name__, next(tensors_in(result), None)
        if self._clock.cause != "forward" or first is None:
            return result
        if first.dtype == torch.float64 and first.numel() > 1 and (place := code_place()) is not None:
            self.doubles[place] += 1
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        roles = [self._roles.get(tensor) for tensor in given]
        calling, _, keywords = self._calls.current
        whole = calling == "multi_head_attention_forward" and not keywords.get("need_weights", True)
        # Torch's own attention may use the same operators.
        if not whole and calling != "scaled_dot_product_attention":
            if (role := self._attention(name, args, roles)) is not None:
                self._roles[first] = role
            if name in ("mul", "mul_") and len(given) == 2 and calling != "gelu":
                found = filter(None, (_gelu_of(factor, first) for factor in given))
                if (approximate := next(found, None)) and (place := code_place()) is not None:
                    self.gelus[place, approximate] += 1
        return result

    def _attention(self, name: str, args: Any, roles: list[Any]) -> Any:
        weights = next((role for role in roles if isinstance(role, AttentionWeights)), None)
        if name in ("mm", "bmm"):
            if weights is None:
                return None if name == "mm" or "parameter" in roles else "scores"
            if roles[0] is not weights or roles[1] == "parameter" or weights.weighs:
                weights.elsewhere = True
            weights.weighs = True
            return None
        if name == "_softmax" and roles[0] == "scores" and args[1] in (-1, args[0].dim() - 1):
            found = AttentionWeights(code_place() or "")
            self.softmaxes.append(found)
            return found
        if name in _CARRIERS or name in _ELEMENTWISE:
            scores = "scores" if "scores" in roles else None
            return weights or scores or (roles[0] if name in _CARRIERS and roles else None)
        if weights is not None and not name.endswith("_like"):
            weights.elsewhere = True
        return None


def _gelu_of(factor: Tensor, product: Tensor) -> str | None:
    """Return the `approximate` argument if a product is a GELU of its factor, up to constant factors."""
    factor, product = (tensor.detach().flatten()[:_SAMPLED].float() for tensor in (factor, product))
    # GELU differs clearly from its inputs only below 0.
    if factor.shape != product.shape or not bool((factor < -0.1).any()):
        return None
    for approximate in ("none", "tanh"):
        for inputs in (factor, 2 * factor):
            gelu = F.gelu(inputs, approximate=approximate)
            if any(torch.allclose(product, n * gelu, rtol=1e-2, atol=1e-3) for n in (1, 2)):
                return approximate
    return None
