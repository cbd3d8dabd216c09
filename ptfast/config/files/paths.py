"""Find option files and recipes, the user's own first, and reject unknown names."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.core.errors import COMMAND_LINE, ConfigError, did_you_mean, shorten
from ptfast.core.sections.spelling import nearest

# Presets are expanded into overrides before Hydra composes, so Hydra must not see them as a group.
PRESETS = "preset"
RECIPES = "recipe"
CONFIG_DIR = "PTFAST_CONFIG_DIR"
"""Environment variable that `--config-dir` sets, so that child processes use the folder too."""
SEVERAL = ("logger",)
"""Groups that allow several options at once: `logger=[csv,tensorboard]`."""


@dataclass(frozen=True)
class Root:
    """A folder of option files, `<group>/<option>.yaml`, and the folder of recipes next to it."""

    conf: Path
    recipes: Path


@functools.cache
def builtin_root() -> Root:
    """Return the package's folders: inside it if installed, at the top of the repository otherwise."""
    package = Path(__file__).resolve().parents[2]
    if (package / "_conf").is_dir():
        return Root(package / "_conf", package / "_recipes")
    return Root(package.parent / "conf", package.parent / "recipes")


def roots() -> list[Root]:
    """Return all roots in search order: the folder of `--config-dir`, `./conf`, the package's."""
    own = [Root(Path.cwd() / "conf", Path.cwd() / "recipes")]
    if named := os.environ.get(CONFIG_DIR):
        own.insert(0, Root(Path(named), Path(named) / "recipes"))
    builtin = builtin_root()
    return [*(root for root in own if root.conf.resolve() != builtin.conf), builtin]


def has_own() -> bool:
    """Return True if the user has option files or recipes of their own."""
    return any(root != builtin_root() and (root.conf.is_dir() or root.recipes.is_dir()) for root in roots())


def groups() -> list[str]:
    """Return the sorted names of all config groups, `preset` included."""
    there = roots()
    found = {
        folder.name
        for root in there
        if root.conf.is_dir()
        for folder in root.conf.iterdir()
        if folder != root.recipes
    }
    return sorted(name for name in found if _options(name, there))


def own_groups() -> list[str]:
    """Return the names of the user's own groups, which the package does not have."""
    return [name for name in groups() if not (builtin_root().conf / name).is_dir()] if has_own() else []


def options(group: str) -> dict[str, Path]:
    """Return the sorted options of a group (or recipes, for the group `recipe`) and their files."""
    return _options(group, roots())


def _options(group: str, there: list[Root]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for root in reversed(there):
        # The package's own files do not change; composing a config lists them some fifty times.
        found |= _shipped(root, group) if root == builtin_root() else _listed(root, group)
    return dict(sorted(found.items()))


def _listed(root: Root, group: str) -> dict[str, Path]:
    folder = root.recipes if group == RECIPES else root.conf / group
    files = folder.glob("**/*.yaml" if group == RECIPES else "*.yaml")
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


_shipped = functools.cache(_listed)


def recipe_file(name: str, folder: Path | None = None) -> Path | None:
    """Return the file of a recipe given by name (`resnet_cifar`) or by path (`./mine.yaml`), or None.

    Paths are relative to the working folder, or to the `folder` of the recipe that inherits it. Bare names
    are looked up in `folder`, too.
    """
    if name in (known := options(RECIPES)):
        return known[name]
    if folder is not None or name.endswith(".yaml") or "/" in name:
        file = (folder or Path.cwd()) / Path(name).expanduser()
        file = file if file.suffix == ".yaml" else file.with_name(file.name + ".yaml")
        # A typed path stays as typed, because it names the run; an inherited one only appears in messages.
        file = file if folder is None else file.resolve()
        return file if file.is_file() else None
    return None


def shown(file: Path) -> str:
    """Return `file` as shown in messages: relative to the working folder or the package's root, if inside."""
    builtin = builtin_root()
    for base in (Path.cwd(), builtin.conf.parent):
        if file.is_relative_to(base):
            return file.relative_to(base).as_posix()
    return str(file)


# Names that other programs use for options with another name here.
_ELSEWHERE = {("checkpointing", "last"): "saving=last", ("checkpointing", "best"): "saving=default"}
_TORCHVISION = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "vit_", "vgg", "convnext"),
    *("efficientnet", "mobilenet", "densenet", "regnet", "swin", "alexnet"),
)


def check_option(group: str, option: Any, groups: Iterable[str], place: str | None) -> None:
    """Raise C003 for an option that its group does not have, or for an unknown group.

    For a group in `SEVERAL`, `option` may be a list, or its typed form `[csv,tensorboard]`.
    """
    if group not in groups:
        known = [name for name in groups if name != PRESETS]
        hint = did_you_mean(group, known) or f"Groups: {', '.join(known)}"
        raise ConfigError("C003", "no such config group", key=group, place=place, suggestion=hint)
    if group in SEVERAL and isinstance(option, str) and option[:1] + option[-1:] == "[]":
        option = [name.strip() for name in option[1:-1].split(",")]
    if group in SEVERAL and isinstance(option, list) and option:
        for name in option:
            check_option(group, name, groups, place)
        return
    known = options(group)
    if not isinstance(option, str) or option not in known:
        what, value = f"no such option of {group}", "null" if option is None else option
        hint = _hint(group, str(option), list(known), groups)
        raise ConfigError("C003", what, key=group, value=value, place=place, suggestion=hint)


def find_recipe(name: str, place: str | None = COMMAND_LINE, folder: Path | None = None) -> Path:
    """Return the `recipe_file` of a name; if there is none, raise C003 at `place` with the nearest name."""
    if file := recipe_file(name, folder):
        return file
    known = list(options(RECIPES))
    hint = " ".join(filter(None, (did_you_mean(name, known), f"Recipes: {', '.join(known)}")))
    what = "no such recipe file" if name.endswith(".yaml") or "/" in name else "no such recipe"
    key = RECIPES if folder is None else "defaults"
    raise ConfigError("C003", what, key=key, value=name, place=place, suggestion=hint)


def _hint(group: str, option: str, known: list[str], groups: Iterable[str]) -> str:
    everything = f"Options of {group}: {', '.join(known)}"
    whole = next((name for name in known if option in name.split("_")[1:]), None)
    elsewhere = [f"{other}={option}" for other in groups if other != group and option in options(other)]
    if group == "model" and option.startswith(_TORCHVISION):
        meant = f"model=torchvision model.name={option}"
    elif meant := _ELSEWHERE.get((group, option)):
        # Users often confuse the two meanings of the word: explain both.
        everything = f"`{group}` is activation checkpointing; checkpoints on disk are `saving`. {everything}"
    elif option.lower() in ("none", "null", "off", "false", "no") and "none" in known:
        meant = f"{group}=none"
    elif near := whole or nearest(option, known):
        meant = f"{group}={near}"
    elif elsewhere and option not in ("none", "default", "custom"):
        meant = shorten(" or ".join(elsewhere))
    else:
        return everything
    return f"Did you mean {meant}? {everything}"
