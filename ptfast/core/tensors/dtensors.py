"""Tensors that are sharded over ranks (DTensors) or files, or expanded: local parts and whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, described


def is_sharded(tensor: Tensor) -> bool:
    """Return True if each rank has only a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of `tensor`, in the same memory; a tensor that is not sharded as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_expanded(tensor: Tensor) -> bool:
    """Return True if several entries share one memory location, which torch refuses to write to."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dimensions)


def local_parts(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's parts of `tensors`, which are all sharded or all whole (then the list itself)."""
    return [local_part(tensor) for tensor in tensors] if is_sharded(tensors[0]) else tensors


@dataclass(frozen=True)
class SavedTensor:
    """A tensor on disk, split by rows over several files; only the requested rows are read.

    Args:
        parts: slices of safetensors (`safe_open(...).get_slice(name)`), in row order.
    """

    parts: tuple[Any, ...]

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        _, *others = self.parts[0].get_shape()
        return torch.Size([sum(part.get_shape()[0] for part in self.parts), *others])

    def rows(self, start: int, stop: int) -> Tensor:
        found, first = [self.parts[0][:1][:0]], 0
        for part in self.parts:
            last = first + part.get_shape()[0]
            if max(start, first) < min(stop, last):
                found.append(part[max(start - first, 0) : min(stop, last) - first])
            first = last
        return torch.cat(found)


def whole(value: Any) -> Any:
    """Read a `SavedTensor` from disk; return any other value as it is."""
    return value.rows(0, value.shape[0]) if isinstance(value, SavedTensor) else value


def is_sharded_by_rows(tensor: Any) -> bool:
    """Return True if `tensor` is sharded over one dimension of ranks, by rows."""
    return is_sharded(tensor) and [placement.is_shard(0) for placement in tensor.placements] == [True]


def shard_like(tensor: Any, value: Any) -> Any:
    """Shard `value`, which every rank has or can read, like `tensor`.

    Only this rank's rows of a `SavedTensor` are read. Values of another shape or type stay whole, as does
    everything if `tensor` is not sharded.
    """
    if not is_sharded(tensor) or is_sharded(value) or getattr(value, "shape", None) != tensor.shape:
        return whole(value)
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements
    if isinstance(value, SavedTensor) and is_sharded_by_rows(tensor):
        # Split like torch.chunk: the last parts may be smaller or empty.
        start = mesh.get_local_rank() * -(-len(tensor) // mesh.size())
        own = value.rows(start, start + len(tensor.to_local())).to(tensor.device)
        return DTensor.from_local(own, mesh, placements, shape=tensor.shape, stride=tensor.stride())
    # Every rank takes its own part, without communication.
    return distribute_tensor(whole(value).to(tensor.device), mesh, placements, src_data_rank=None)


def pack(nest: Any, *, is_first: bool) -> tuple[Any, dict[str, Tensor]]:
    """Convert `nest` to JSON values, and return them with the tensors that this rank must write, by name.

    Each rank writes its rows of sharded tensors from their own memory; the first rank writes whole tensors
    from a copy. Each object in the JSON has one key, its kind: the items of a `dict`, a `tuple`, `bytes` in
    hexadecimal, or the name of a whole `tensor` or of the `rows` of one.

    All ranks call this, with nests that may differ only in values that are not sharded. C017 rejects a value
    that is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def pack_tensor(tensor: Any, path: str) -> dict[str, str]:
        if is_sharded_by_rows(tensor) and tensor.numel():
            own = local_part(tensor)
            # Layers may share a tensor: write it once.
            name = names.setdefault((own.data_ptr(), own.dtype, tensor.shape), path)
            if name == path and own.numel():
                tensors[name] = own
            return {"rows": name}
        tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
        if is_first:
            path += f" ({len(tensors)})" * (path in tensors)
            tensors[path] = tensor.clone()
        return {"tensor": path}

    def pack_value(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return pack_tensor(value, path)
        if isinstance(value, dict):
            return {"dict": [[pack_value(k, path), pack_value(v, f"{path}/{k}")] for k, v in value.items()]}
        if isinstance(value, (list, tuple)):
            items = [pack_value(item, f"{path}/{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        what = f"{path} is {described(value)}, where tensors and plain values are saved"
        raise ConfigError("C017", what, key="parallel", value="fsdp")

    packed = {key: pack_value(value, key) for key, value in nest.items()}
    return packed, tensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors of any device to a file, through main memory."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    # Newer versions of safetensors create a file that only its owner may read.
    path.chmod(mode)


def unpack(packed: Any, files: Sequence[Path]) -> dict[str, Any]:
    """Restore the argument of `pack` from the `files` of all ranks; sharded tensors become `SavedTensor`s."""
    from safetensors import safe_open

    holders: dict[str, list[Any]] = {}
    for file in files:
        opened = safe_open(file, framework="pt")
        for name in opened.keys():  # noqa: SIM118 # no mapping
            holders.setdefault(name, []).append(opened)

    def unpack_value(value: Any) -> Any:
        if isinstance(value, list):
            return [unpack_value(item) for item in value]
        if not isinstance(value, dict):
            return value
        [(kind, content)] = value.items()
        if kind == "rows":
            return SavedTensor(tuple(opened.get_slice(content) for opened in holders[content]))
        if kind == "tensor":
            return holders[content][0].get_tensor(content).clone()
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "tuple":
            return tuple(unpack_value(content))
        return {unpack_value(key): unpack_value(item) for key, item in content}

    return {key: unpack_value(value) for key, value in packed.items()}
