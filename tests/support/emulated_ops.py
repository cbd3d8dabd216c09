"""The values of CUDA ops whose kernels do nothing, computed on the CPU in the same memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What calls no kernel through these is what the CPU can compute, too.
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cuda.enable_mem_efficient_sdp(False)
torch.backends.cuda.enable_cudnn_sdp(False)

FAKE = torch._C._TorchDispatchModeKey.FAKE
WRITE_NOTHING = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_"}
WRITE_NOTHING |= {"record_stream", "pin_memory", "_pin_memory"}


class EmulatedOps(TorchDispatchMode):
    """Runs each CUDA op as it is, which allocates, records and waits, and then the CPU's for its values.

    It holds for one thread and its backward passes. The CPU draws random numbers, seeded by the state of the
    GPU's generator.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each op imports the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(FAKE) is not None:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a DTensor passes on ops of what it holds
        given = _tensors((args, kwargs))
        device = kwargs.get("device")
        if not any(tensor.is_cuda for tensor in given) and (device is None or _is_host(torch.device(device))):
            return func(*args, **kwargs)
        with self:  # inference mode passes on ops that are made of others
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        seed = _seed(torch.cuda.default_generators[torch.cuda.current_device()])
        if _is_shaped_by_values(func, args):
            torch.cuda.current_stream().synchronize()  # as the op would, to count its elements
            values = _on_cpu(func, args, kwargs, seed)
            return args[0] if func._schema.is_mutable else tree_map(_on_gpu, values)
        results = func(*args, **kwargs)
        if isinstance(results, bool):
            return _on_cpu(func, args, kwargs, seed)
        taken = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = [_is_made(leaf, taken) for leaf in tree_leaves(results)]
        if (func._schema.is_mutable or any(made)) and func.overloadpacket.__name__ not in WRITE_NOTHING:
            values = tree_leaves(_on_cpu(func, args, kwargs, seed))
            for out, is_new, value in zip(tree_leaves(results), made, values, strict=True):
                # The CPU leaves out statistics that nobody reads, and may add gradients that nobody reads.
                if is_new and value.numel():
                    _on_host(out).copy_(value)
        return results


def _on_cpu(func: Any, args: Any, kwargs: Any, seed: int) -> Any:
    """What the CPU makes of an op; it writes in place where the op does."""
    kwargs = {**kwargs, "pin_memory": None} if "pin_memory" in kwargs else kwargs
    args, kwargs = tree_map(_on_host, (args, kwargs))
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return func(*args, **kwargs)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        return func(*args, **kwargs)


def _is_made(value: Any, taken: set[int]) -> bool:
    return isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in taken


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_host(device: torch.device) -> bool:
    return device.type != "cuda"


def _is_shaped_by_values(func: Any, args: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        masked = any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
        return masked and (name == "index" or args[2].numel() > 1)
    return torch.Tag.dynamic_output_shape in func.tags


def _seed(generator: torch.Generator) -> int:
    return (generator.initial_seed() * 1_000_003 + generator.get_offset()) % 2**63


def _on_host(value: Any) -> Any:
    """The CPU's view of a tensor's memory; the CPU in place of a GPU, and a generator of its own."""
    if isinstance(value, torch.device):
        return value if _is_host(value) else torch.device("cpu")
    if isinstance(value, torch.Generator):
        return value if _is_host(value.device) else torch.Generator().manual_seed(_seed(value))
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    view = torch.empty(0, dtype=value.dtype)
    memory = value.untyped_storage()
    if memory.nbytes():
        block = (ctypes.c_char * memory.nbytes()).from_address(memory.data_ptr())
        held = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        return view.set_(held, value.storage_offset(), value.shape, value.stride())
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _on_gpu(value: Any) -> Any:
    """A copy on the current GPU that the host does not wait for."""
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    _on_host(copy).copy_(value)
    return copy
