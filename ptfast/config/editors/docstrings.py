"""Descriptions of arguments and fields, read from docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from typing import Any

_SECTION = re.compile(r"^Arg(?:uments|s):\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*)(?: \([^)]*\))?: *(.*?)(?=^    \S|\Z)", re.MULTILINE | re.DOTALL)


def argument_docs(function: Any) -> dict[str, str]:
    """Argument -> its description in the docstring of a class or function.

    That is what `Args:` says, or else the first paragraph if it names the argument in backquotes.
    """
    initialiser = getattr(function, "__init__", None) if inspect.isclass(function) else None
    found: dict[str, str] = {}
    for documented in (initialiser, function):
        text = (inspect.getdoc(documented) if documented is not None else None) or ""
        summary = " ".join(text.partition("\n\n")[0].split())
        found |= dict.fromkeys(re.findall(r"`(\w+)`", summary), summary)
        section = _SECTION.search(text)
        for names, description in _ARGUMENT.findall(section[1] if section else ""):
            found |= dict.fromkeys(names.split(", "), " ".join(description.split()))
    return found


@functools.cache
def field_docs(owner: type) -> dict[str, str]:
    """Field -> the text below it in the class body."""
    (body,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body.body, body.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
