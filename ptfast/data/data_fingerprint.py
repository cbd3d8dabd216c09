"""Fingerprints of data, to detect changes, and arrays cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Contents = dict[str, list[Any]]
"""Maps a part, such as `train` or `train/cat`, to a count, its unit and a digest. JSON-serializable."""
FULL_BYTES = 64 * 2**20
"""Arrays up to this size are digested as a whole, in 45 ms; larger ones by this many bytes, spread out."""
_BLOCK_BYTES = 2**20


def describe_part(count: int, unit: str, *digested: Any) -> list[Any]:
    """Return the fingerprint of one part: `count`, `unit`, and a digest of arrays and plain values."""
    found = hashlib.sha256()
    for value in digested:
        text = f"{_sum_of(value):08x} {value.dtype} {value.shape}" if isinstance(value, np.ndarray) else value
        found.update(f"{text}\n".encode(errors="surrogateescape"))
    return [count, unit, found.hexdigest()[:24]]


def class_parts(
    split: str, root: Path, classes: Sequence[str], paths: Sequence[str], labels: Sequence[int], most: int
) -> tuple[Contents, int]:
    """Return a part for each class, by its files' names and sizes, and the latest change of a file in ns.

    Names are relative to `root`, so the tree may be moved. Above `most` files, only every k-th is inspected.
    """
    step, skipped, newest_ns = -(-len(paths) // most), len(str(root)) + 1, 0
    bounds = [*np.searchsorted(labels, range(len(classes))).tolist(), len(paths)]
    contents: Contents = {}
    for name, first, end in zip(classes, bounds[:-1], bounds[1:], strict=True):
        found = [size_and_time(path) for path in paths[first:end:step]]
        newest_ns = max(newest_ns, *(time_ns for _, time_ns in found))
        names = "\n".join(path[skipped:] for path in paths[first:end])
        sizes = np.array([size for size, _ in found], np.int64)
        contents[f"{split}/{name}"] = describe_part(end - first, "files", names, sizes)
    return contents, newest_ns


def size_and_time(path: str) -> tuple[int, int]:
    """Return the size and last change (ns) of a file; 0, 0 if missing, which is reported when it is read."""
    try:
        # Creating Path objects for 60,000 files would take a second.
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def differing(before: Contents, now: Contents) -> dict[str, str]:
    """Return the changed parts, each with its change in words."""
    changed = {}
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            changed[name] = f"{name} ({'new' if old is None else 'gone'})"
        elif old[0] != new[0]:
            changed[name] = f"{name} ({old[0]:,} {old[1]}, now {new[0]:,})"
        elif old != new:
            changed[name] = f"{name} (other {old[1]} than before)"
    return changed


def same_training_data(before: Contents, now: Contents) -> bool:
    """Return whether two fingerprints have the same training data, or the same size if one is of a pack."""
    old, new = (
        {name: facts for name, facts in contents.items() if name.partition("/")[0] == "train"}
        for contents in (before, now)
    )
    counts, units = ([[facts[place] for facts in part.values()] for part in (old, new)] for place in (0, 1))
    return old == new or ({*units[0]} != {*units[1]} and sum(counts[0]) == sum(counts[1]))


def _sum_of(array: NDArray[Any]) -> int:
    """Return a checksum of an array's bytes."""
    if array.dtype.hasobject:
        return 0
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if flat.nbytes <= FULL_BYTES:
        return zlib.crc32(flat.data)
    found = 0
    for start in np.linspace(0, flat.nbytes - _BLOCK_BYTES, FULL_BYTES // _BLOCK_BYTES).astype(np.int64):
        found = zlib.crc32(flat[start : start + _BLOCK_BYTES].data, found)
    return found


def load_arrays(path: Path) -> dict[str, NDArray]:
    """Load the arrays that `save_arrays` wrote to `path`; empty if the file is missing or damaged."""
    damages = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
    with contextlib.suppress(*damages), path.open("rb") as file, np.load(file, allow_pickle=False) as entry:
        return dict(entry)
    return {}


def save_arrays(path: Path, **arrays: NDArray) -> None:
    """Write arrays to `path` atomically; I/O errors are ignored, as this is only a cache."""
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] # no array is called so
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
