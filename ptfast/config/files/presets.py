"""Presets: named sets of choices, expanded into arguments that stand before the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from ptfast.config.checks.options import check_option
from ptfast.config.files import paths
from ptfast.config.files.lineage import chosen_groups, lineage
from ptfast.config.files.yaml_file import YamlFile, read_yaml
from ptfast.config.overrides import Argument
from ptfast.core.errors import ConfigError


def expand(arguments: Sequence[Argument]) -> tuple[list[Argument], dict[str, str]]:
    """Put what the preset sets before `arguments`, less what they set themselves.

    A preset named on the command line goes over the recipe; one that the recipe names goes under what else
    the recipe says. The default preset needs no expanding: the primary config holds its values.

    Returns:
        The arguments, and the place in the preset's file of each key that it sets.
    """
    given = {a.key: a for a in arguments}
    taken = set(given)
    if paths.PRESETS in given:
        name = given[paths.PRESETS].option
    elif paths.RECIPES in given:
        name, recipe_keys = _of_recipe(given[paths.RECIPES])
        taken |= recipe_keys
    else:
        name = None
    if name is None:
        return list(arguments), {}
    file = content(name)
    places = {key: file.places[key] for key in file.data if key not in taken}
    groups = paths.groups()
    expanded = [_argument(key, file.data[key], file.places[key], groups) for key in places]
    return [*expanded, *arguments], places


def content(name: str) -> YamlFile:
    """The file of a preset, whose data holds what it chooses by group and by dotted key."""
    return read_yaml(paths.options(paths.PRESETS)[name])


def _of_recipe(recipe: Argument) -> tuple[str | None, set[str]]:
    """The preset that a recipe names, or one that it inherits, and what all of these set themselves."""
    file = paths.recipe_file(recipe.option)
    name, taken = None, set[str]()
    for recipe_file in lineage(paths.RECIPES, file) if file else []:
        if (own := recipe_file.data.get(paths.PRESETS)) is not None:
            check_option(paths.PRESETS, own, [paths.PRESETS], recipe_file.places[paths.PRESETS])
            name = own
        taken |= {*recipe_file.places, *chosen_groups([recipe_file])}
    return (name, taken) if name is not None else (None, set())


def _argument(key: str, value: Any, place: str, groups: Sequence[str]) -> Argument:
    if "." not in key and key in groups:
        check_option(key, value, groups, place)
        return Argument("group", key, (value,), False, f"{key}={value}")
    if isinstance(value, (dict, list)):
        what = "a preset holds `group: option` and `dotted.key: value` lines"
        raise ConfigError("C007", what, key=key, place=place)
    text = OmegaConf.to_yaml(OmegaConf.create([value])).removeprefix("- ").strip()
    return Argument("value", key, (text,), False, f"++{key}={text}")
