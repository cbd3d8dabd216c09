"""What a batch is and what its loss means, by name or import path."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from ptfast.errors import ConfigError
from ptfast.run import DataInfo, Task

__all__ = ["TASKS", "build_task"]

TASKS = {
    "classification": "ptfast.tasks.classification.Classification",
}
"""Built-in tasks by name."""


def build_task(name: str, info: DataInfo, **options: Any) -> Task:
    """Construct the task of a run.

    Args:
        name: a key of `TASKS`, `auto` for what the data is for, or the import path of a class that fulfils
            `Task`, constructed with `info` and the options.
        info: what the data says.
        options: keywords of the task's constructor, such as `label_smoothing`.
    """
    chosen = info.task if name == "auto" else name
    if "." not in chosen and chosen not in TASKS:
        nearest = difflib.get_close_matches(chosen, TASKS, n=1)
        suggestion = f"Did you mean {nearest[0]}?" if nearest else f"Choose one of {', '.join(TASKS)}"
        raise ConfigError("C003", "unknown task", key="task", value=name, suggestion=suggestion)
    module_name, _, class_name = TASKS.get(chosen, chosen).rpartition(".")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("C009", f"cannot be imported ({error})", key="task", value=name) from error
    return factory(info, **options)
