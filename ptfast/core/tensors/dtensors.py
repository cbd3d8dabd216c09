"""Tensors that lie on several ranks (DTensors) or in several files in parts: a rank's own, and the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


@dataclass(frozen=True)
class SavedTensor:
    """A tensor on disk, each of whose files holds some of its rows; no more is read than what is asked for.

    Args:
        parts: slices of safetensors (`safe_open(...).get_slice(name)`), in the order of the rows.
    """

    parts: tuple[Any, ...]

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        _, *others = self.parts[0].get_shape()
        return torch.Size([sum(part.get_shape()[0] for part in self.parts), *others])

    def rows(self, start: int, stop: int) -> Tensor:
        """Read the rows from `start` up to `stop`."""
        found, first = [self.parts[0][:1][:0]], 0
        for part in self.parts:
            last = first + part.get_shape()[0]
            if max(start, first) < min(stop, last):
                found.append(part[max(start - first, 0) : min(stop, last) - first])
            first = last
        return torch.cat(found)


def whole(value: Any) -> Any:
    """A `SavedTensor` as read from disk; anything else as it is."""
    return value.rows(0, value.shape[0]) if isinstance(value, SavedTensor) else value


def is_sharded_by_rows(tensor: Any) -> bool:
    """Return True if every rank has rows of `tensor` that follow those of the rank before."""
    return is_sharded(tensor) and [placement.is_shard(0) for placement in tensor.placements] == [True]


def shard_like(tensor: Any, value: Any) -> Any:
    """`value`, which every rank has or can read, shared out as `tensor` is.

    Of a `SavedTensor` only this rank's rows are read. What is of another shape, or no tensor, is left whole;
    so is everything where `tensor` is not sharded.
    """
    if not is_sharded(tensor) or is_sharded(value) or getattr(value, "shape", None) != tensor.shape:
        return whole(value)
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements
    if isinstance(value, SavedTensor) and is_sharded_by_rows(tensor):
        # As torch.chunk cuts: the last parts may be smaller, or empty.
        start = mesh.get_local_rank() * -(-len(tensor) // mesh.size())
        own = value.rows(start, start + len(tensor.to_local())).to(tensor.device)
        return DTensor.from_local(own, mesh, placements, shape=tensor.shape, stride=tensor.stride())
    # Every rank takes its own part: nothing is sent.
    return distribute_tensor(whole(value).to(tensor.device), mesh, placements, src_data_rank=None)
