"""Write a recipe from arguments and the values that a measurement found for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ptfast.config.compose import compose
from ptfast.config.files import paths
from ptfast.config.overrides import parse
from ptfast.config.schema import lies_in
from ptfast.core.errors import ConfigError, MachineError, cannot_write
from ptfast.core.sections.secret_values import is_secret

OWN = ("run", "recipe")
"""Keys about a single run, which are left out of recipes."""


def check_overlay(file: Path, flag: str = "--write") -> None:
    """Reject a file that `write_overlay` could not write; called before a command's long part."""
    if file.suffix != ".yaml":
        hint = f"Write {flag} {file.with_suffix('.yaml')}"
        raise ConfigError("C001", "a recipe's file ends in .yaml", key=flag, value=file, suggestion=hint)
    if file.exists():
        what, hint = "exists already and is not overwritten", "Choose another name"
        raise MachineError("E001", what, key=flag, value=file, suggestion=hint)
    _check_writable(file.absolute().parent, flag, file)


def check_out(folder: Path | None) -> None:
    """Raise E001 if the folder of `--out` cannot be written to; called before a command's long part."""
    if folder is not None:
        _check_writable(folder.absolute(), "--out", folder)


def _check_writable(folder: Path, flag: str, given: Path) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        what, hint = "cannot be written to", "Choose another one"
        raise MachineError("E001", what, key=flag, value=given, suggestion=hint)


def write_overlay(
    file: Path,
    arguments: Sequence[str],
    found: Mapping[str, Any],
    comment: Sequence[str],
    flag: str = "--write",
) -> str:
    """Write a recipe with the options and values of the arguments, overridden by `found`.

    Secrets and the keys of `run` are left out.

    Args:
        found: values by dotted key.
        comment: lines at the head of the file; `ptfast recipes` shows its first paragraph.

    Returns the value of `recipe=` that selects it.
    """
    check_overlay(file, flag)
    called = str(file if file.is_absolute() else f"./{file}")
    defaults: list[Any] = []
    values = OmegaConf.create()
    for argument in parse(arguments):
        if argument.kind == "recipe":
            # Make paths absolute: they are relative to the folder of the command.
            known = argument.option in paths.options(paths.RECIPES)
            defaults.insert(0, argument.option if known else str(paths.find_recipe(argument.option)))
        elif argument.kind == "group":
            defaults.append({f"override /{argument.key}": argument.option})
        elif argument.kind == "value" and not lies_in(argument.key, OWN) and not is_secret(argument.key):
            OmegaConf.update(values, argument.set_key, argument.value, merge=True, force_add=True)
    for key, value in found.items():
        OmegaConf.update(values, key, value, merge=True, force_add=True)
    head = "".join(f"# {line}".rstrip() + "\n" for line in [*comment, "", f"  ptfast train recipe={called}"])
    choices = OmegaConf.to_yaml(OmegaConf.create({"defaults": defaults})) + "\n" if defaults else ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as target:
            target.write(head + choices + (OmegaConf.to_yaml(values) if values else ""))
    except OSError as error:
        raise cannot_write(error, flag, file) from error
    # Do not announce a recipe that cannot be read.
    compose([f"recipe={called}"], complete=False)
    return called
