"""Tasks: classes that define the loss and the metrics of a batch, built by name or import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from pydantic import Field

from ptfast.core.errors import ConfigError, did_you_mean
from ptfast.core.protocols import TASKS, DataInfo, Task, takes_own_steps
from ptfast.core.sections.section import Section


class TaskSection(Section):
    """The task, which defines the loss and the metrics: a name or import path, and its keywords."""

    name: str = "auto"
    """A built-in task, `auto` to choose by the data, or the import path of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the task's constructor; targets among them are built."""


def build_task(name: str, info: DataInfo, **options: Any) -> Task:
    """Construct the task of a run.

    Args:
        name: a key of `TASKS`, `auto` for the data's own task, or the import path of a class that implements
            `Task`, constructed with `info` and the options.
        options: keywords of the task's constructor, such as `label_smoothing`, or `loss`, a function of
            outputs and targets.

    Raises:
        ConfigError: unknown task (C003), a class that cannot be imported or is not a task (C009), or an
            unknown option (C002).
    """
    chosen = info.task if name == "auto" else name
    factory = _find(name, chosen)
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for option, value in options.items():
        if option not in parameters and not takes_any:
            what = f"the task {chosen} takes no such option"
            raise ConfigError("C002", what, key=f"task.{option}", value=value)
    task = factory(info, **options)
    if hasattr(task, "figures"):
        hint = "Rename it to log_values; its arguments are the same"
        raise ConfigError(
            "C009", "its method figures has a new name", key="task", value=name, suggestion=hint
        )
    trains = ("step",) if takes_own_steps(task) else ("count", "loss")
    missing = [part for part in ("metric", "mode", *trains, "metrics", "evaluate") if not hasattr(task, part)]
    if missing:
        raise ConfigError("C009", f"is not a task: it has no {missing[0]}", key="task", value=name)
    return task


def collate_of(name: str) -> Callable[[list[Any]], Any] | None:
    """Return the static method `collate` of a user's task, which batches samples; None without one.

    Raises:
        ConfigError: C017 if it is an instance method.
    """
    factory = _find(name, name) if "." in name else None
    collate = getattr(factory, "collate", None)
    if collate is not None and inspect.isfunction(inspect.getattr_static(factory, "collate")):
        what = "collate is not a static method, but samples are collated before the task exists"
        hint = "Write @staticmethod above it, and leave out self"
        raise ConfigError("C017", what, key="task", value=name, suggestion=hint)
    return collate


def _find(name: str, chosen: str) -> Any:
    if "." not in chosen and chosen not in TASKS:
        hint = did_you_mean(chosen, TASKS) or f"Choose one of {', '.join(TASKS)}"
        raise ConfigError("C003", "unknown task", key="task", value=name, suggestion=hint)
    module_name, _, class_name = TASKS.get(chosen, chosen).rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("C009", f"cannot be imported ({error})", key="task", value=name) from error
