"""Private names of torch that are needed here, each with its reason; a test looks for all that any file uses.

Kernels (`torch._foreach_*`) are called where they are; only `techniques/compile/` imports the compiler.
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

# Imported for others:
__all__ = ["BatchNorm", "InstanceNorm", "data_worker", "worker_signals"]
# BatchNorm, InstanceNorm: the bases of the layers of all dimensions, which have no public name.
# worker_signals: names the processes of a loader of ours to the handler that tells of one that was killed.
# data_worker: sets what `torch.utils.data.get_worker_info` gives in a process of ours.
OpOverload = torch._ops.OpOverload
"""One operator for arguments of given types, as dispatch modes and graphs name it."""
is_profiling = torch.autograd._profiler_enabled
"""Return True under a profiler."""


class DispatchMode(TorchDispatchMode):
    """Sees each operator that runs. Torch documents its base, in a module with a private name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, for three seconds, to hide this mode from it.
        return False


def hide_from_compiler(method: Any) -> None:
    """Have a method of torch's optimizers count as hidden from the compiler already.

    Torch hides it when it is first called, importing the compiler, and keeps the result under this name.
    """
    setattr(method, "__dynamo_disable", method)


def set_allocator(settings: str) -> None:
    """Change settings of the GPU's allocator in this process, as PYTORCH_ALLOC_CONF does before it starts."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (change or torch.cuda.memory._set_allocator_settings)(settings)


def dump_nccl_trace() -> bytes:
    """The content of NCCL's flight recorder, pickled, without stacks, which need Python's lock for long."""
    from torch._C import _distributed_c10d as c10d

    return c10d._dump_nccl_trace(True, False, False)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def quick_gradcheck() -> Iterator[None]:
    """Let torch's fast gradcheck name a wrong gradient at once.

    For its message it would compute a whole Jacobian, with a forward pass for each number of a parameter.
    """
    module: Any = sys.modules[gradcheck.__module__]
    before, module._run_slow_mode_and_get_error = module._run_slow_mode_and_get_error, lambda *_: ""
    try:
        yield
    finally:
        module._run_slow_mode_and_get_error = before


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` once the running backward pass has computed all gradients: later than any hook."""
    Variable._execution_engine.queue_callback(callback)


def backward(loss: Tensor, weight: Tensor) -> None:
    """Run `loss.backward(weight)` without its check that both have one shape, that of a 0-d loss.

    The check imports the compiler's symbolic shapes at its first call, which takes a third of a second.
    """
    Variable._execution_engine.run_backward(
        (loss,), (weight,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
