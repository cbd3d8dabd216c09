"""Calls of torch by Python code: values read on the host, tensors made there, arrays copied."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ptfast.core.tensors.trees import tensors_in
from ptfast.measure.audit.finding import code_place

_VALUES = ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "tolist", "is_nonzero")
_PRINTS = ("__repr__", "__format__")
_COPIES = ("cpu", "numpy", "__array__")
_SIZES = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose")
_MAKERS = (
    *("zeros", "ones", "empty", "full", "eye", "tensor", "as_tensor", "arange", "linspace", "logspace"),
    *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "normal"),
)
_MOVES = ("to", "cuda", "type_as")


@dataclass
class Calls:
    """Calls of one kind at one place."""

    count: int = 0
    seconds: float = 0.0
    names: set[str] = field(default_factory=set)

    def add(self, name: str, seconds: float) -> None:
        """Count one more."""
        self.count += 1
        self.seconds += seconds
        self.names.add(name)


class CallTrace(TorchFunctionMode):
    """Records calls that cost speed, by place, while it is entered; they do what they do without it.

    A call inside another of torch's is the outer one's.

    Args:
        device_type: of the run; a value read from a tensor elsewhere makes nothing wait.

    Cost: about 2 us for each call.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._on_host: Any = WeakIdKeyDictionary()
        self.reads: defaultdict[tuple[str, str], Calls] = defaultdict(Calls)
        """Reads of values on the host, by what reads and the place."""
        self.moved: defaultdict[str, Calls] = defaultdict(Calls)
        """Tensors made on the host and moved to the device, by place."""
        self.copied: defaultdict[str, Calls] = defaultdict(Calls)
        """Arrays that torch.tensor copied, by place."""
        self.arithmetic: defaultdict[str, Calls] = defaultdict(Calls)
        """Operations on float tensors of more than one element, by place."""
        self.with_gradients: str | None = None
        """The first place of an operation while gradients are recorded."""
        self.current: tuple[str, Any, dict[str, Any]] = ("", (), {})
        """Name, arguments and keywords of the call that is running."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") or (place := code_place()) is None:
            return func(*args, **kwargs)
        self.current = name, args, kwargs
        start = time.perf_counter()
        try:
            result = func(*args, **kwargs)
        finally:
            self.current = ("", (), {})
        self._note(name, place, args, kwargs, result, time.perf_counter() - start)
        return result

    def _note(
        self, name: str, place: str, args: Any, kwargs: dict[str, Any], result: Any, seconds: float
    ) -> None:
        given = [*tensors_in(args), *tensors_in(kwargs)]
        from_host = bool(given) and all(tensor in self._on_host for tensor in given)
        if self.with_gradients is None and torch.is_grad_enabled() and given:
            self.with_gradients = place
        if not from_host and (what := self._read(name, args, kwargs, result)):
            self.reads[what, place].add(name, seconds)
        if name == "tensor" and args and isinstance(args[0], np.ndarray) and args[0].ndim:
            self.copied[place].add(name, seconds)
        if isinstance(result, Tensor):
            made = name in _MAKERS and not given and kwargs.get("device") is None
            moves = name in _MOVES and from_host and _names_device(name, args, kwargs)
            if moves:
                self.moved[place].add(name, seconds)
            elif (made or from_host) and result.device.type == "cpu":
                self._on_host[result] = True
            if given and result.is_floating_point() and result.numel() > 1 and name not in _MOVES:
                self.arithmetic[place].add(name, seconds)

    def _read(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> str | None:
        """Return what a call reads on the host, in words; None where it leaves all on the device."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or first.device.type != self._device_type:
            return None
        if name in _VALUES:
            return {"__bool__": "if or while on a tensor", "is_nonzero": "if or while on a tensor"}.get(
                name, "item"
            )
        if name in _PRINTS:
            return "print of a tensor"
        if name in _COPIES or (name == "to" and _to_cpu(args, kwargs)):
            return "cpu"
        if name in _SIZES or (name == "where" and len(args) == 1 and not kwargs):
            return "nonzero" if name in ("nonzero", "argwhere", "where") else name
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            repeats = args[1] if len(args) > 1 else kwargs.get("repeats", first)
            return "repeat_interleave" if isinstance(repeats, Tensor) else None
        if name in ("__getitem__", "__setitem__") and _has_mask(args[1]):
            # One value for all that a mask selects is filled in without counting them.
            fills = name == "__setitem__" and _is_single(args[2])
            return None if fills else "boolean mask"
        return None


def _names_device(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "cuda":
        return True
    named = (*args[1:], *kwargs.values())
    return any(isinstance(value, (Tensor, str, torch.device, int)) and value is not True for value in named)


def _to_cpu(args: Any, kwargs: dict[str, Any]) -> bool:
    named = (*args[1:2], kwargs.get("device"))
    return any(isinstance(value, (str, torch.device)) and str(value) == "cpu" for value in named)


def _has_mask(index: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) and tensor.dim() for tensor in tensors_in(index))


def _is_single(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() == 1


@contextmanager
def cuda_syncs() -> Iterator[dict[str, int]]:
    """Count by place what makes the host wait for a CUDA device inside, by torch's own debugging mode.

    It sees waits inside torch's kernels, which have no name in Python; it does not say how long they take.
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
