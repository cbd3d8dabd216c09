"""Tasks: the meaning of a batch and of its loss."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ptfast.core.sections.section import Section


class TaskSection(Section):
    """The meaning of a batch and of its loss: a name or import path, and the task's keywords beside it."""

    name: str = "auto"
    """A built-in task, `auto` for what the data is for, or the import path of your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the task's constructor, some of them targets to build."""


def panel(task: TaskSection) -> dict[str, object]:
    """Techniques that make the targets softer."""
    return {"label smoothing": task.options.get("label_smoothing") or None}
