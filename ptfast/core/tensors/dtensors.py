"""Tensors that lie on several ranks in parts (DTensors): a rank's own part, and the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ptfast.core.tensors.trees import map_tensors


def is_sharded(tensor: Tensor) -> bool:
    """Return True if each rank holds only a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """This rank's part of `tensor`, in the same memory; of a tensor that is whole, itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """This rank's parts of `tensors`, of which all are sharded or none; then the list itself."""
    return [local_part(tensor) for tensor in tensors] if is_sharded(tensors[0]) else tensors


def norm_over_ranks(norm: Tensor) -> Tensor:
    """Euclidean norm of what lies on all ranks, from that of each rank's part: 0-d, on the device."""
    square = norm.square()
    torch.distributed.all_reduce(square)
    return square.sqrt()


def gather_whole(nest: Any, keep: bool) -> Any:
    """A nest of mappings, lists and values with every sharded tensor in it made whole, in main memory.

    All ranks have to call it, with nests of one form: each tensor is gathered by itself.

    Args:
        keep: whether this rank wants the result; the others get None in the place of sharded tensors.
    """

    def gather(tensor: Any) -> Any:
        if not is_sharded(tensor):
            return tensor
        whole: Tensor = tensor.detach().full_tensor()
        return whole.cpu() if keep else None

    return map_tensors(gather, nest)


def shard_like(tensor: Any, whole: Tensor) -> Tensor:
    """`whole`, which every rank has, shared out as `tensor` is; as it is where that is not."""
    if not is_sharded(tensor) or is_sharded(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Every rank takes its own part: nothing is sent.
    return distribute_tensor(
        whole.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
    )
