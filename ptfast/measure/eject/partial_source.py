"""The part of a module's source that a config uses: branches decided, and what the rest needs gathered."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any

_OURS = "ptfast"
_REFUSALS = {"ConfigError", "DataError", "MachineError"}


@dataclass
class Gathered:
    """Source that stands by itself.

    Args:
        constants: values of names in capitals, which decide branches and are defined elsewhere.
        modules: modules in place of others, by name.
    """

    constants: Mapping[str, Any]
    modules: Mapping[str, str] = field(default_factory=dict)
    definitions: list[str] = field(default_factory=list)
    """In an order in which each comes after what it needs."""
    assignments: list[str] = field(default_factory=list)
    """Of constants that the config does not decide."""
    imports: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    """Constants that what was gathered reads."""
    _seen: dict[str, str] = field(default_factory=dict)

    def add(self, module: str, name: str) -> None:
        """Gather a function, class or constant of a module of ours, and all that it needs.

        Raises:
            NameClashError: two modules have different things of one name.
        """
        module = self.modules.get(module, module)
        if name in self.constants:
            self.used.add(name)
            return
        bindings = _bindings(module)
        node = bindings[name]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _OURS:
            self.add(str(node.module), name)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.imports.add(_import_of(node, name))
            return
        if (before := self._seen.get(name)) is not None:
            if before != module:
                raise NameClashError(name)
            return
        self._seen[name] = module
        source = decided(_source_of(module, node), self.constants)
        for needed in _names(source):
            if needed in bindings and needed != name:
                self.add(module, needed)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            self.definitions.append(source)
        elif source not in self.assignments:
            self.assignments.append(source)


class NameClashError(Exception):
    """Two things of one name that a script would need."""


def decided(source: str, constants: Mapping[str, Any]) -> str:
    """`source` without the branches that are never taken if its constants have these values.

    Refusals of a config are left out too: that of the script has passed them. Of docstrings what they say
    first is kept, and their source.
    """
    lines = source.splitlines()
    changes = _Changes(len(lines))
    tree = ast.parse(source)
    changes.block(tree.body, len(lines), constants)
    changes.shorten_docstrings(tree, lines)
    kept = [
        line[4 * indents :] if line.strip() else ""
        for line, drops, indents in zip(lines, changes.drops, changes.indents, strict=True)
        if not drops
    ]
    return "\n".join(kept)


class _Changes:
    """Lines to drop, and how far each of the others moves to the left."""

    def __init__(self, num_lines: int) -> None:
        self.drops, self.indents = [False] * num_lines, [0] * num_lines

    def block(self, statements: list[ast.stmt], last_line: int, constants: Mapping[str, Any]) -> None:
        """Decide the branches of statements that go up to `last_line`."""
        for statement in statements:
            end = statement.end_lineno or statement.lineno
            if _refuses(statement):
                self._drop(statement.lineno, end)
            elif isinstance(statement, ast.If) and (code := _decidable(statement.test, constants)):
                taken = statement.body if eval(code, {}, dict(constants)) else statement.orelse
                self._take(statement, taken, constants)
                if taken and isinstance(taken[-1], ast.Return):
                    self._drop(end + 1, last_line)
                    return
            else:
                for name in ("body", "orelse", "finalbody"):
                    inner = getattr(statement, name, [])
                    if inner:
                        inner_end = inner[-1].end_lineno or end
                        self.block(inner, inner_end, constants)

    def shorten_docstrings(self, tree: ast.Module, lines: list[str]) -> None:
        """Keep the first paragraph of each docstring, and those that name a source."""
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or ast.get_docstring(node) is None:
                continue
            first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
            paragraphs = "\n".join(lines[first - 1 : last]).removesuffix('"""').rstrip().split("\n\n")
            kept = [text for text in paragraphs[1:] if text.lstrip().startswith("Source:")]
            if len(kept) + 1 < len(paragraphs):
                end = "\n" + " " * node.body[0].col_offset if kept else ""
                lines[first - 1] = "\n\n".join([paragraphs[0], *kept]) + end + '"""'
                self._drop(first + 1, last)

    def _take(self, branch: ast.If, taken: list[ast.stmt], constants: Mapping[str, Any]) -> None:
        end = branch.end_lineno or branch.lineno
        before = self.drops[branch.lineno - 1 : end]
        self._drop(branch.lineno, end)
        if not taken:
            return
        # Comments in front of the first statement belong to it.
        first = (branch.test.end_lineno or branch.lineno) + 1 if taken is branch.body else taken[0].lineno
        last = taken[-1].end_lineno or end
        self.drops[first - 1 : last] = before[first - branch.lineno : last - branch.lineno + 1]
        if taken[0].col_offset > branch.col_offset:
            for line in range(first - 1, last):
                self.indents[line] += 1
        self.block(taken, last, constants)

    def _drop(self, first: int, last: int) -> None:
        self.drops[first - 1 : last] = [True] * (last - first + 1)


def _decidable(test: ast.expr, constants: Mapping[str, Any]) -> CodeType | None:
    """The test, compiled, if it asks for nothing but constants."""
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    calls = any(isinstance(node, (ast.Call, ast.Attribute)) for node in ast.walk(test))
    return (
        None if calls or not names or names - constants.keys() else compile(ast.Expression(test), "", "eval")
    )


def _refuses(statement: ast.stmt) -> bool:
    """Return True for `if ...: raise ConfigError(...)`."""
    if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.body[-1], ast.Raise):
        return False
    raised = statement.body[-1].exc
    return isinstance(raised, ast.Call) and getattr(raised.func, "id", "") in _REFUSALS


def _names(source: str) -> list[str]:
    """Names that `source` reads, in their order, those in its annotations too."""
    loads = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    loads.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.id for node in loads))


@cache
def _bindings(module: str) -> dict[str, ast.stmt]:
    """What binds each name at the top of a module."""
    found: dict[str, ast.stmt] = {}
    statements = list(ast.parse(_text(module)).body)
    for statement in statements:
        if isinstance(statement, ast.If):  # TYPE_CHECKING
            statements += statement.body
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                found[alias.asname or alias.name.split(".")[0]] = statement
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            found[statement.name] = statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (node for target in targets for node in ast.walk(target)):
                if isinstance(node, ast.Name):
                    found[node.id] = statement
    return found


@cache
def _text(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def _source_of(module: str, node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(_text(module).splitlines()[first - 1 : node.end_lineno])


def _import_of(node: ast.Import | ast.ImportFrom, name: str) -> str:
    alias = next(each for each in node.names if name in (each.asname, each.name, each.name.split(".")[0]))
    renamed = f" as {alias.asname}" if alias.asname else ""
    if isinstance(node, ast.Import):
        return f"import {alias.name}{renamed}"
    return f"from {node.module} import {alias.name}{renamed}"
