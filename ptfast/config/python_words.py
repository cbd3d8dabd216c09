"""The words of a command line that say what a Python program gives as values."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptfast.config.files import paths
from ptfast.config.overrides import quoted
from ptfast.core.durations import Duration
from ptfast.core.sections.given import give

_CUSTOM = ("data", "model")
"""Groups with an option for parts of a user's own."""
_BARE = re.compile(r"[A-Za-z_/][\w./-]*")
_READ_AS_OTHERS = ("null", "true", "false", "nan", "inf")


class PythonWords:
    """The words of values given in Python, and the objects among them, which have to be held while they run.

    Args:
        sweeps: a list is a choice of values, each of which is trained with.
    """

    def __init__(self, *, sweeps: bool = False) -> None:
        self.words: list[str] = []
        self.objects: dict[str, Any] = {}
        """What is found under an import path, by that path."""
        self._sweeps = sweeps

    def add(self, key: str, value: Any) -> None:
        """Add what sets `key`; a mapping sets the keys inside."""
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                self.add(key if name == "_target_" and key in _CUSTOM else f"{key}.{name}", item)
        elif key in _CUSTOM and _is_object(value, key):
            self.words += [f"{key}=custom", f"{key}._target_={self._text(value, key)}"]
        elif key in paths.groups() and _is_object(value, key):
            self.words.append(f"{key}._target_={self._text(value, key)}")
        elif self._sweeps and isinstance(value, (list, tuple)):
            self.words.append(f"{key}={','.join(self._text(item, key) for item in value)}")
        else:
            self.words.append(f"{key}={self._text(value, key)}")

    def _text(self, value: Any, key: str) -> str:
        """`value` in Hydra's grammar."""
        value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        if value is None or isinstance(value, bool):
            return {None: "null", True: "true", False: "false"}[value]
        if isinstance(value, (int, float)):
            return repr(value)
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
        path, held = give(value, key, self.objects)
        self.objects[path] = held
        return path


def _is_object(value: Any, key: str) -> bool:
    """Return True for what YAML cannot say: a module, a dataset, a class, a function."""
    plain = (str, Path, bool, int, float, Mapping, type(None))
    return not isinstance(value, plain) and (key == "data" or not isinstance(value, (list, tuple)))
