"""Nests of tensors in a file of each rank that has a part of them: safetensors, and JSON for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ptfast.core.errors import ConfigError, described
from ptfast.core.tensors.dtensors import SavedTensor, is_sharded, is_sharded_by_rows


def pack(nest: Any, *, is_first: bool) -> tuple[Any, dict[str, Tensor]]:
    """`nest` for JSON, and the tensors by name that this rank has to write.

    Of a tensor that is shared out, each rank writes its rows, from the memory where they are; what is whole
    is written by the first, from a copy. Each object in the JSON has one key, which says what it stands for:
    the items of a `dict`, a `tuple`, `bytes` in hexadecimal, a whole `tensor` or the `rows` of one, by name.

    To be called on all ranks, with nests that differ at most in what is not shared out.

    Raises:
        ConfigError: C017 for a value that is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def pack_tensor(tensor: Any, path: str) -> dict[str, str]:
        if is_sharded_by_rows(tensor) and tensor.numel():
            own = tensor.to_local()
            # Layers may share a tensor, which is written once.
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
    """Write tensors of any device by way of main memory."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    # Newer versions leave a file that nobody but its owner may read.
    path.chmod(mode)


def unpack(packed: Any, files: Sequence[Path]) -> dict[str, Any]:
    """What `pack` was given, with a `SavedTensor` in place of each tensor that was shared out.

    Args:
        files: of all ranks that have written, in their order.
    """
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
