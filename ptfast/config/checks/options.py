"""Refuse options and recipes that do not exist, with the nearest that do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ptfast.config.files import paths
from ptfast.core.errors import ConfigError, shorten
from ptfast.core.sections.nearest_name import did_you_mean

# Names that other programs use for what is called differently here.
_ELSEWHERE = {("checkpointing", "last"): "saving=last", ("checkpointing", "best"): "saving=default"}
_TORCHVISION = (
    *(
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "vit_",
        "vgg",
        "convnext",
        "efficientnet",
    ),
    *("mobilenet", "densenet", "regnet", "swin", "alexnet"),
)


def check_option(group: str, option: Any, groups: Iterable[str], place: str | None) -> None:
    """Refuse an option that its group does not have, or a group that does not exist.

    Args:
        option: a name; of a group that may take several a list of them, or as typed: `[csv,tensorboard]`.

    Raises:
        ConfigError: C003, with the nearest name and the list of what there is.
    """
    if group not in groups:
        known = [name for name in groups if name != paths.PRESETS]
        hint = did_you_mean(group, known) or f"Groups: {', '.join(known)}"
        raise ConfigError("C003", "no such config group", key=group, place=place, suggestion=hint)
    if group in paths.SEVERAL and isinstance(option, str) and option[:1] + option[-1:] == "[]":
        option = [name.strip() for name in option[1:-1].split(",")]
    if group in paths.SEVERAL and isinstance(option, list) and option:
        for name in option:
            check_option(group, name, groups, place)
        return
    known = paths.options(group)
    if not isinstance(option, str) or option not in known:
        raise ConfigError(
            "C003",
            f"no such option of {group}",
            key=group,
            value="null" if option is None else option,
            place=place,
            suggestion=_hint(group, str(option), list(known), groups),
        )


def check_recipe(name: str, place: str | None, folder: Path | None = None) -> None:
    """Refuse a recipe, given by name or path, that does not exist (C003); `folder` as in `recipe_file`."""
    if paths.recipe_file(name, folder) is None:
        known = list(paths.options(paths.RECIPES))
        is_path = name.endswith(".yaml") or "/" in name
        everything = f"Recipes: {', '.join(known)}"
        hint = did_you_mean(name, known)
        raise ConfigError(
            "C003",
            "no such recipe file" if is_path else "no such recipe",
            key="+recipe" if folder is None else "defaults",
            value=name,
            place=place,
            suggestion=f"{hint} {everything}" if hint else everything,
        )


def _hint(group: str, option: str, known: list[str], groups: Iterable[str]) -> str:
    everything = f"Options of {group}: {', '.join(known)}"
    if group == "model" and option.startswith(_TORCHVISION):
        return f"Did you mean model=torchvision model.name={option}? {everything}"
    if (group, option) in _ELSEWHERE:
        # The two meanings of the word are the commonest mix-up: say what each is.
        return (
            f"Did you mean {_ELSEWHERE[group, option]}? `checkpointing` is activation checkpointing; "
            f"the state on disk is `saving`. {everything}"
        )
    if option.lower() in ("none", "null", "off", "false", "no") and "none" in known:
        return f"Did you mean {group}=none? {everything}"
    whole = next((name for name in known if option in name.split("_")[1:]), None)
    near = f"Did you mean {group}={whole}?" if whole else did_you_mean(option, known, f"{group}={{}}")
    if near:
        return f"{near} {everything}"
    elsewhere = [f"{other}={option}" for other in groups if other != group and option in paths.options(other)]
    if elsewhere and option not in ("none", "default", "custom"):
        return f"Did you mean {shorten(' or '.join(elsewhere))}? {everything}"
    return everything
