"""A recipe that says what some arguments say, with values that were found for it."""

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
"""Sections of a single run, which no recipe has."""


def check_overlay(file: Path, flag: str = "--write") -> None:
    """Reject a file, given by `flag`, that `write_overlay` could not write; before a command's long part."""
    if file.suffix != ".yaml":
        hint = f"Write {flag} {file.with_suffix('.yaml')}"
        raise ConfigError("C001", "a recipe's file ends in .yaml", key=flag, value=file, suggestion=hint)
    if file.exists():
        what, hint = "exists already and is not overwritten", "Choose another name"
        raise MachineError("E001", what, key=flag, value=file, suggestion=hint)
    _check_writable(file.absolute().parent, flag, file)


def check_out(folder: Path | None) -> None:
    """Reject (E001) a folder for `--out` that cannot be written to, before a command's long part."""
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
    """Write a recipe that chooses and sets what the arguments do, with `found` over it.

    Secrets and the folder of a run are left out.

    Args:
        found: values by dotted key.
        comment: lines at its head, the first of which `ptfast recipes` shows.

    Returns what `recipe=` takes for it.
    """
    check_overlay(file, flag)
    called = str(file if file.is_absolute() else f"./{file}")
    defaults: list[Any] = []
    values = OmegaConf.create()
    for argument in parse(arguments):
        if argument.kind == "recipe":
            # A path means the folder that the command was given in.
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
    # A recipe that cannot be read must not be announced.
    compose([f"recipe={called}"], complete=False)
    return called
