"""Options and recipes with their first comments, for help, `ptfast recipes` and `ptfast copy`.

Imports neither Hydra nor YAML, so that help is quick.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from ptfast.config.files import paths
from ptfast.core.errors import ConfigError, MachineError, cannot_write
from ptfast.core.protocols import TASKS
from ptfast.core.sections.nearest_name import did_you_mean


@dataclass(frozen=True)
class Entry:
    """An option or a recipe: its name, its file, and what its opening comment says."""

    name: str
    file: Path
    comment: tuple[str, ...]

    @property
    def summary(self) -> str:
        """The first paragraph of the comment, on one line."""
        paragraph: list[str] = []
        for line in self.comment:
            if not line and paragraph:
                break
            paragraph.append(line)
        return " ".join(paragraph)

    @property
    def command(self) -> str:
        """The first command that the comment names, without what is said behind it, or an empty text."""
        commands = (line for line in self.comment if line.startswith("ptfast "))
        return next(commands, "").partition("  ")[0]


def entries(group: str) -> list[Entry]:
    """The options of one group, or the built-in tasks."""
    if group == "task":
        return [_task(name, path) for name, path in TASKS.items()]
    return [Entry(name, file, _opening_comment(file)) for name, file in paths.options(group).items()]


def recipes() -> list[Entry]:
    """Every recipe, the user's own included."""
    return entries(paths.RECIPES)


def copy_recipe(name: str, file: Path) -> str:
    """Copy a recipe to a file of the user's own, whose comment then names that file.

    Returns:
        What `+recipe=` takes for the copy: its name in `./recipes`, its path elsewhere.

    Raises:
        ConfigError: there is no such recipe (C003), or `file` is not named `.yaml` (C001).
        MachineError: the file exists already or cannot be written (E001).
    """
    known = paths.options(paths.RECIPES)
    if name not in known:
        hint = did_you_mean(name, known) or f"Recipes: {', '.join(known)}"
        raise ConfigError("C003", "no such recipe", key=name, suggestion=hint)
    if file.suffix != ".yaml":
        what = "a recipe's file ends in .yaml"
        raise ConfigError("C001", what, key=str(file), suggestion=f"Write {file.with_suffix('.yaml')}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as target:
            copied = {path.resolve(): own for own, path in paths.options(paths.RECIPES).items()}
            called = copied.get(file.resolve()) or str(file if file.is_absolute() else f"./{file}")
            text = known[name].read_text(encoding="utf-8")
            target.write(re.sub(rf"\+recipe={re.escape(name)}(?=\s|$)", lambda _: f"+recipe={called}", text))
    except FileExistsError:
        what = "exists already and is not overwritten"
        raise MachineError("E001", what, key=str(file), suggestion="Choose another name") from None
    except OSError as error:
        raise cannot_write(error, str(file)) from None
    return called


def _task(name: str, path: str) -> Entry:
    """A built-in task with the first line of its module, which is not imported: that loads torch."""
    file = Path(__file__).parents[2] / "tasks" / f"{path.split('.')[-2]}.py"
    text = ast.get_docstring(ast.parse(file.read_bytes())) or ""
    return Entry(name, file, (text.partition("\n")[0].removesuffix("."),))


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
