"""Convert values from a Python program to the words of a command line."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptfast.config.files import paths
from ptfast.config.overrides import quoted
from ptfast.core.durations import Duration
from ptfast.core.errors import cannot_write
from ptfast.core.machine import cache_folder
from ptfast.core.run_directory import write_text
from ptfast.core.sections.given import give

_CUSTOM = ("data", "model")
"""Groups with an option `custom` for the user's own classes."""
_FILES = ("path", "val_path", "test_path")
"""Keys of a table's files, in the order of a tuple of DataFrames."""
_BARE = re.compile(r"[A-Za-z_/][\w./-]*")
_READ_AS_OTHERS = ("null", "true", "false", "nan", "inf")


class PythonWords:
    """Command-line words for values from Python, and the objects they name, which must be kept during a run.

    Args:
        sweeps: lists are the values of a sweep, each trained in its own run.
    """

    def __init__(self, *, sweeps: bool = False) -> None:
        self.words: list[str] = []
        self.objects: dict[str, Any] = {}
        """Objects, by the import path that names them."""
        self._sweeps = sweeps

    def add(self, key: str, value: Any) -> None:
        """Add words that set `key`; a mapping sets the keys inside. `target` is a table's `data.target`."""
        frames = value if isinstance(value, tuple) else (value,)
        if key == "data" and all(map(is_frame, frames)) and len(frames) <= len(_FILES):
            self.words.append("data=table")
            for name, frame in zip(_FILES, frames, strict=False):
                self.add(f"data.{name}", frame)
        elif key == "target":
            self.add("data.target", value)
        elif isinstance(value, Mapping) and value:
            for name, item in value.items():
                self.add(key if name == "_target_" and key in _CUSTOM else f"{key}.{name}", item)
        elif re.fullmatch(r"evals\.[\w-]+", key) and _is_object(value, key):
            self.words.append(f"{key}.{'path' if is_frame(value) else '_target_'}={self._text(value, key)}")
        elif key in _CUSTOM and _is_object(value, key):
            self.words += [f"{key}=custom", f"{key}._target_={self._text(value, key)}"]
        elif key in paths.groups() and _is_object(value, key):
            self.words.append(f"{key}._target_={self._text(value, key)}")
        elif self._sweeps and isinstance(value, (list, tuple)):
            self.words.append(f"{key}={','.join(self._text(item, key) for item in value)}")
        else:
            self.words.append(f"{key}={self._text(value, key)}")

    def _text(self, value: Any, key: str) -> str:
        """Return `value` in Hydra's grammar."""
        value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        if value is None or isinstance(value, bool):
            return {None: "null", True: "true", False: "false"}[value]
        if isinstance(value, (int, float)):
            return repr(value)
        if is_frame(value):
            value = _stored(value)
        if isinstance(value, (str, Path, Duration)):
            text = str(value)
            bare = _BARE.fullmatch(text) and text.lower() not in _READ_AS_OTHERS
            return text if bare else quoted(text)
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{name}:{self._text(item, key)}' for name, item in value.items())}}}"
        if isinstance(value, (list, tuple)) and key != "data":
            return f"[{','.join(self._text(item, key) for item in value)}]"
        if isinstance(value, tuple) and len(value) in (2, 3):
            # Datasets of training, validation and test.
            whole = copy.copy(value[0])
            whole.val, whole.test = (*value[1:], None)[:2]
            value = whole
        path, kept = give(value, key, self.objects)
        self.objects[path] = kept
        return path


def is_frame(value: Any) -> bool:
    """Return True for a pandas DataFrame."""
    return hasattr(value, "to_csv") and hasattr(value, "columns")


def _stored(frame: Any) -> Path:
    """Write a DataFrame without its index to a CSV file in the cache folder, named by its digest."""
    text = frame.set_axis([str(name) for name in frame.columns], axis=1).to_csv(index=False)
    path = cache_folder() / "frames" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.csv"
    if not path.is_file():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(error, str(path.parent), suggestion="Set PTFAST_CACHE to another") from error
        write_text(path, text)
    return path


def _is_object(value: Any, key: str) -> bool:
    """Return True for values that YAML cannot represent: a module, a dataset, a class, a function."""
    plain = (str, Path, bool, int, float, Mapping, type(None))
    return not isinstance(value, plain) and (key == "data" or not isinstance(value, (list, tuple)))
