"""Which files an option or a recipe is made of: its own, and those that its `defaults` inherit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ptfast.config.checks.options import check_recipe
from ptfast.config.files import paths
from ptfast.config.files.yaml_file import YamlFile, read_yaml
from ptfast.core.errors import ConfigError

SELF = "_self_"
"""Entry of a defaults list that stands for the file's own keys, which else come last."""


def lineage(group: str, file: Path) -> list[YamlFile]:
    """The files that `file` is made of, itself included, each laid over those before it.

    Args:
        group: of the option, or `recipe`.
    """
    return list(_lineage(group, file, ()))


def chosen_groups(files: Iterable[YamlFile]) -> set[str]:
    """The groups of which the defaults lists of `files` choose an option."""
    entries = [key for file in files for entry in file.defaults if isinstance(entry, dict) for key in entry]
    return {str(key).removeprefix("override ").strip().lstrip("/") for key in entries}


def base_file(group: str, entry: str, content: YamlFile, place: str | None = None) -> Path | None:
    """The file that a defaults list inherits by an entry such as `sgd` or `./mine.yaml`.

    A recipe's path is taken from the folder of the file that names it. None stands for an option that is not
    in the folders searched, of which Hydra may know more.
    """
    if group != paths.RECIPES:
        return paths.options(group).get(entry)
    check_recipe(entry, place, content.path.parent)
    return paths.recipe_file(entry, content.path.parent)


def _lineage(group: str, file: Path, heirs: tuple[Path, ...]) -> Iterator[YamlFile]:
    content, chain = read_yaml(file, allow_empty=group != paths.RECIPES), (*heirs, file)
    for index, entry in enumerate(content.defaults):
        if entry == SELF:
            yield content
        elif isinstance(entry, str):
            place = content.places[f"defaults.{index}"]
            base = base_file(group, entry, content, place)
            if base is None:
                continue
            if (start := _index(base, chain)) is not None:
                circle = " -> ".join(map(paths.shown, [*chain[start:], base]))
                hint = "Take the entry out, or name another file"
                what = f"inherits itself, {circle}"
                raise ConfigError("C007", what, key="defaults", value=entry, place=place, suggestion=hint)
            yield from _lineage(group, base, chain)
    if SELF not in content.defaults:
        yield content


def _index(file: Path, chain: tuple[Path, ...]) -> int | None:
    return next((index for index, one in enumerate(chain) if one.samefile(file)), None)
