"""Arrays that took a while to make, cached on disk for the next run."""

from __future__ import annotations

import contextlib
import os
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DAMAGES = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


def load_arrays(path: Path) -> dict[str, NDArray]:
    """The arrays that `save_arrays` has written to `path`; empty where there is nothing, or it is damaged."""
    with contextlib.suppress(*_DAMAGES), path.open("rb") as file, np.load(file, allow_pickle=False) as entry:
        return dict(entry)
    return {}


def save_arrays(path: Path, **arrays: NDArray) -> None:
    """Write arrays to `path`, under another name first: what is broken off is no entry.

    A full disk, say, costs no more than making them again.
    """
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] # no array is called so
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
