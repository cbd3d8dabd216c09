"""Texts for `--help`: options and recipes with their first comments, and arguments with their docstrings.

Imports neither Hydra nor YAML, so that help is quick.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.config.files import paths
from ptfast.core.protocols import TASKS


@dataclass(frozen=True)
class Entry:
    """An option or a recipe: its name, its file and its opening comment."""

    name: str
    file: Path
    comment: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first paragraph of the comment, on one line."""
        return "\n".join(self.comment).strip().partition("\n\n")[0].replace("\n", " ")

    @property
    def command(self) -> str:
        """The first command in the comment, without its explanation; empty if there is none."""
        commands = (line for line in self.comment if line.startswith("ptfast "))
        return next(commands, "").partition("  ")[0]


def entries(group: str) -> list[Entry]:
    """Return the options of one group, the recipes (for the group `recipe`), or the built-in tasks."""
    if group != "task":
        return [Entry(name, file, _opening_comment(file)) for name, file in paths.options(group).items()]
    found: list[Entry] = []
    for name, path in TASKS.items():
        # Parse the task's module for its first line: importing it would load torch.
        file = Path(__file__).parents[2] / "tasks" / f"{path.split('.')[-2]}.py"
        text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
        found.append(Entry(name, file, (text.partition("\n")[0].removesuffix("."),)))
    return found


def _opening_comment(file: Path) -> tuple[str, ...]:
    comment: list[str] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = line.strip()
            if text.startswith("# @") or (not text and not comment):
                continue
            if not text.startswith("#"):
                break
            comment.append(text.lstrip("#").strip())
    return tuple(comment)


_SECTION = re.compile(r"^Arg(?:uments|s):\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*)(?: \([^)]*\))?: *(.*?)(?=^    \S|\Z)", re.MULTILINE | re.DOTALL)


def argument_docs(function: Any) -> dict[str, str]:
    """Map arguments to their text in `Args:`, or to the first paragraph if it names them in backquotes."""
    initializer = getattr(function, "__init__", None) if inspect.isclass(function) else None
    found: dict[str, str] = {}
    for documented in (initializer, function):
        text = (inspect.getdoc(documented) if documented is not None else None) or ""
        summary = " ".join(text.partition("\n\n")[0].split())
        found |= dict.fromkeys(re.findall(r"`(\w+)`", summary), summary)
        section = _SECTION.search(text)
        for names, description in _ARGUMENT.findall(section[1] if section else ""):
            found |= dict.fromkeys(names.split(", "), " ".join(description.split()))
    return found
