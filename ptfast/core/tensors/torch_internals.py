"""The private names of torch that ptfast uses, each with its reason; a test finds all other uses.

Kernels (`torch._foreach_*`) are called directly; only `techniques/compile/` imports the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, gradcheck
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils import signal_handling as worker_signals
from torch.utils.data._utils import worker as data_worker

# Imported for other modules:
__all__ = ["BatchNorm", "InstanceNorm", "data_worker", "worker_signals"]
# BatchNorm, InstanceNorm: the base classes of the layers of all dimensions, which have no public name.
# worker_signals: registers our loader's workers with the handler that reports a killed one.
# data_worker: sets the result of `torch.utils.data.get_worker_info` in our workers.
OpOverload = torch._ops.OpOverload
"""An operator overload, as in dispatch modes and graphs."""
is_profiling = torch.autograd._profiler_enabled
"""Return True under a profiler."""


class DispatchMode(TorchDispatchMode):
    """Base class of modes that see each operator. torch documents its base, whose module is private."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler (3 s) to hide this mode from it.
        return False


def hide_from_compiler(method: Any) -> None:
    """Mark a method of torch's optimizers as already hidden from the compiler.

    On the first call torch would import the compiler to hide it, and would keep the result under this name.
    """
    setattr(method, "__dynamo_disable", method)


def set_allocator(settings: str) -> None:
    """Change the GPU allocator's settings in this running process, like PYTORCH_ALLOC_CONF at its start."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings)


def dump_nccl_trace() -> bytes:
    """Return NCCL's flight recorder, pickled, without stacks, which would hold Python's lock for long."""
    from torch._C import _distributed_c10d as c10d

    return c10d._dump_nccl_trace(True, False, False)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def quick_gradcheck() -> Iterator[None]:
    """Let torch's fast gradcheck report a wrong gradient without computing a whole Jacobian.

    Its message would need that Jacobian, with a forward pass for each number of a parameter.
    """
    module: Any = sys.modules[gradcheck.__module__]
    before, module._run_slow_mode_and_get_error = module._run_slow_mode_and_get_error, lambda *_: ""
    try:
        yield
    finally:
        module._run_slow_mode_and_get_error = before


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward pass has computed all gradients, after all hooks."""
    Variable._execution_engine.queue_callback(callback)


def backward(loss: Tensor, weight: Tensor) -> None:
    """Run `loss.backward(weight)` for a 0-d loss, without the check that both shapes are equal.

    The first check imports the compiler's symbolic shapes, which takes 0.3 s.
    """
    Variable._execution_engine.run_backward(
        (loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
