"""Keywords of classes and functions, read from their source: importing them may load torch, which is slow."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_keywords(path: str) -> list[str] | None:
    """Return the names of the parameters of `path` that can be given by name; import nothing.

    Follows imports from one file to the next, base classes, and the fields of dataclasses.

    Args:
        path: import path of a class or function.

    Returns:
        The names in their order, or None where only an import can tell, as for `**kwargs`.
    """
    module, _, name = path.rpartition(".")
    file = _file(module)
    if file is None:
        return None
    tree = ast.parse(file.read_bytes())
    for node in reversed(tree.body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node, module)
        if isinstance(node, _Function) and node.name == name:
            return _of_function(node)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return source_keywords(f"{node.module}.{alias.name}")
    return None


def _file(module: str) -> Path | None:
    """The file of a module, beside its top-level package: to find what lies below a package imports it."""
    package, *parts = module.split(".")
    spec = find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        return None
    place = Path(spec.submodule_search_locations[0], *parts)
    candidates = (place.with_name(f"{place.name}.py"), place / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _of_class(node: ast.ClassDef, module: str) -> list[str] | None:
    """The keywords of a class's constructor, its own or that of the one class it is derived from."""
    for part in reversed(node.body):
        if isinstance(part, _Function) and part.name == "__init__":
            names = _of_function(part)
            return names and names[1:]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    if len(bases) != len(node.bases) or len(bases) > 1:
        return None
    inherited = source_keywords(f"{module}.{bases[0]}") if bases else []
    if inherited is None or not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return inherited
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    own = [ast.unparse(field.target) for field in fields if "ClassVar" not in ast.unparse(field.annotation)]
    return list(dict.fromkeys([*inherited, *own]))


def _of_function(node: _Function) -> list[str] | None:
    return None if node.args.kwarg else [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
