"""Count the operators of training steps, and the floating-point operations of their matrix products."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptfast.core.distributed import sum_over_ranks
from ptfast.core.machine import available_memory, peak_memory_bytes
from ptfast.core.protocols import StepBatch
from ptfast.core.tensors.torch_internals import DispatchMode, OpOverload
from ptfast.core.tensors.trees import tree_map
from ptfast.profiling.step_phases import Phases, saved_for_backward, watched
from ptfast.run import Run
from ptfast.techniques.compile.compilation import num_compiled

COUNTED = ("forward", "backward", "optimizer")
MANY_LENGTHS = 8
"""Number of steps to count if sequence lengths vary, because steps then differ."""


PRODUCTS = ("mm", "conv", "attention")
"""Parts of the names of operators that multiply matrices."""


@dataclass(frozen=True)
class Product:
    """A call of an operator that multiplies matrices, with its tensors replaced by meta tensors."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any

    @property
    def name(self) -> str:
        """The operator's short name, such as `mm`."""
        return self.op.overloadpacket.__name__


class Operators(DispatchMode):
    """Counts the operators that run inside it while `recording`, after decomposition and kernel selection."""

    def __init__(self, recording: bool = True) -> None:
        super().__init__()
        self.recording, self.calls, self.products = recording, Counter[str](), list[Product]()

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if self.recording and isinstance(func, OpOverload) and "c10d" not in func.namespace:
            name = func.overloadpacket.__name__
            self.calls[name] += 1
            if any(part in name for part in PRODUCTS):
                # Custom tensor classes may lack attributes read here, and training must continue.
                with contextlib.suppress(Exception):
                    self.products.append(Product(func, *tree_map(_on_meta, (args, kwargs, outputs))))
        return outputs


def _on_meta(value: Any) -> Any:
    is_tensor = isinstance(value, Tensor)
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_tensor else value


def flops(product: Product) -> int:
    """Return the floating-point operations of a call, by `torch.utils.flop_counter`; 0 without a formula.

    A multiply-add counts as two. The first call takes 0.2 s, for an import.
    """
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(product.op.overloadpacket)
    if formula is None and product.name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        # Older versions of torch have no formula for it.
        formula = flop_registry.get(getattr(torch.ops.aten, product.name.replace("_for_cpu", "")))
    return int(formula(*product.args, **product.kwargs, out_val=product.outputs)) if formula else 0


class Counted(Phases):
    """Counts over some steps: operators, and the bytes saved for backward, except for weights."""

    def __init__(self, run: Run) -> None:
        super().__init__(self._enter, self._leave)
        self.operators = Operators(recording=False)
        self.steps = self.kept_bytes = 0
        # Sharded weights cannot be distinguished from activations: their memory comes and goes.
        self._saved: dict[int, int] = {}
        self._saving = None if run.sharded else saved_for_backward(run.model, self._saved)

    def _enter(self, name: str) -> None:
        self.operators.recording = name in COUNTED
        if name == "forward" and self._saving is not None:
            self._saved.clear()
            self._saving.__enter__()

    def _leave(self, name: str) -> None:
        self.operators.recording = False
        if name == "forward" and self._saving is not None:
            self._saving.__exit__(None, None, None)
            self.kept_bytes += sum(self._saved.values())


class StepCounter:
    """Counts the operators of a process's second step, whose result stays bit-identical.

    The first step selects kernels and fills caches. The operators of a compiled model are not visible, so it
    runs one step uncompiled before training, which is then undone.

    Cost: about 20 us per operator of one step, or of eight steps if sequence lengths vary; booked as
    `measuring`, together with that step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.counted: Counted | None = None
        self.why_not: str | None = None
        self.compiled = run.compilation is not None
        self.first_counted = run.progress.step + 1
        is_padded = run.choices.get("padding_share") is not None
        self._last = self.first_counted + (MANY_LENGTHS if is_padded else 1)
        self._graphs = num_compiled()
        if run.choices.get("curriculum"):
            self.why_not = "its inputs grow"

    def due(self, step: int) -> bool:
        """Return True if the step after `step` should be counted; all ranks return the same."""
        if not self.first_counted <= step < self._last or self.why_not or self.compiled:
            return False
        if num_compiled() > self._graphs:
            # The compiled parts would run uncompiled in a counted step, and round differently.
            self.why_not = "the model compiles parts of itself"
        return self.why_not is None

    @contextmanager
    def counting(self, batches: Iterator[StepBatch]) -> Iterator[Iterator[StepBatch]]:
        """Count one step inside this context, which trains on `batches`."""
        run = self.run
        with run.clock.gathering("measuring"):
            if not run.ranks.is_first:
                yield batches
                return
            counted = self.counted or Counted(run)
            with counted.operators, watched(run, counted):
                yield batches
            counted.steps += 1
            self.counted = counted

    @contextmanager
    def uncompiled(self, batches: Iterator[StepBatch]) -> Iterator[Iterator[StepBatch] | None]:
        """Run and count one step of a compiled model, uncompiled, inside this context.

        Yields None if memory might run out, because a compiled step needs less.
        """
        device, ranks = self.run.device, self.run.ranks
        if self.why_not is None:
            # Assume that it fits if free memory is at least the peak use so far.
            taken = peak_memory_bytes(device.type)
            if device.type == "cuda":
                lacks = 2 * taken > torch.cuda.get_device_properties(device).total_memory
            else:
                lacks = taken > available_memory()
            # All ranks must agree.
            if sum_over_ranks(torch.tensor(float(lacks), device=device), ranks):
                self.why_not = "an uncompiled step might not fit in memory"
        if self.why_not is not None:
            yield None
            return
        with self.run.uncompiled(), self.counting(batches):
            yield batches
