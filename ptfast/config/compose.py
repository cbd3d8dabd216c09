"""Compose a config: merge arguments, preset, recipe and option files into one tree, with each key's place."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ptfast.config.checks.interpolations import (
    check_grammar,
    check_used,
    drop_inherited,
    resolve,
    variable_sections,
)
from ptfast.config.files import paths
from ptfast.config.files.yaml_file import lineage
from ptfast.config.hydra_loader import PRIMARY, TracingLoader
from ptfast.config.overrides import Argument, expand_preset, parse, read
from ptfast.config.schema import VARIABLES, defaults, flatten
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError, did_you_mean
from ptfast.core.sections.secret_values import is_secret, keep_secret

_PLUGINS = {
    "hydra/launcher": ("submitit_slurm", "submitit_local", "joblib", "ray", "ray_aws", "rq"),
    "hydra/sweeper": ("optuna", "ax", "nevergrad"),
}
"""Options of Hydra's own plugins (hydra.cc/docs/plugins), each in a package such as hydra-ray-launcher."""
DEFAULT = "default"
"""The place of a key that was never set."""


@dataclass(frozen=True)
class Composed:
    """A whole config as plain values, not validated yet."""

    tree: dict[str, Any]
    tree_unresolved: dict[str, Any]
    """The tree with interpolations as text, such as `${oc.env:HOME}`."""
    places: dict[str, str]
    """`file:line` or `command line` of each dotted key."""
    warnings: list[str]
    arguments: tuple[str, ...]

    def place(self, key: str) -> str:
        """Return the place where `key` was set, or else that of the nearest section around it."""
        return place_of(key, self.places)

    def placed(self, error: PtfastError) -> PtfastError:
        """Return `error` with the place where its key was given, if the key is in this config."""
        if error.place is not None or error.key is None:
            return error
        with contextlib.suppress(LookupError, TypeError, ValueError):
            value_of(self.tree, error.key)
            return error.changed(place=self.place(error.key))
        return error

    @contextlib.contextmanager
    def naming_places(self) -> Iterator[None]:
        """Add to errors raised in this block the place where their key was given."""
        try:
            yield
        except PtfastError as error:
            raise self.placed(error) from error.__cause__


def value_of(tree: Any, key: str) -> Any:
    """Return the value at a dotted key; raise LookupError, TypeError or ValueError if there is none."""
    for name in key.split("."):
        tree = tree[int(name)] if isinstance(tree, list) else tree[name]
    return tree


def place_of(key: str, places: dict[str, str]) -> str:
    """Return the place of `key`, of all keys below it if they share one, or of the nearest key above it."""
    below = {place for inside, place in places.items() if inside.startswith(f"{key}.")}
    if key not in places and len(below) == 1:
        return below.pop()
    above = key
    while above:
        if above in places:
            return places[above]
        above = above.rpartition(".")[0]
    return COMMAND_LINE


def compose(arguments: Sequence[str] = (), *, complete: bool = True) -> Composed:
    """Compose the config of one run.

    Precedence: arguments, then a preset among them, then the recipe, then the default preset.

    Args:
        complete: False keeps interpolations as text, for printing.
    """
    given = parse(arguments)
    recipe = next((paths.find_recipe(a.option) for a in given if a.kind == "recipe"), None)
    if recipe and paths.own_groups():
        # Typed options of the user's own groups replace those that the recipe chooses.
        chosen = {group for file in lineage(paths.RECIPES, recipe) for group in file.choices}
        given = [
            replace(a, text=a.text.lstrip("+")) if a.kind == "group" and a.key in chosen else a for a in given
        ]
    expanded, preset_places = expand_preset(given)
    tree, loader = _load([a for a in expanded if a.kind != "hydra"])
    places = {**dict.fromkeys(flatten(defaults()), DEFAULT), **loader.places()}
    with_value = set(places)
    for key, place in preset_places.items():
        if "." not in key or key in with_value:
            _set_place(places, key, place)
            continue
        # A preset's key applies only to options that have it: not every optimizer can be fused.
        *above, name = key.split(".")
        section = tree
        for part in above:
            section = section.get(part) or {}
        section.pop(name, None)
    for argument in given:
        if argument.kind == "value":
            _set_places(places, argument)
        elif argument.kind == "group":
            places[argument.key] = COMMAND_LINE
    of_options = {place for package, file in loader.files if package for place in file.places.values()}
    of_options |= set(preset_places.values())
    drop_inherited(tree, lambda key: places.get(key) in of_options)
    if recipe:
        tree["recipe"] = recipe.stem
    warnings = list(dict.fromkeys(line for _, file in loader.files for line in file.warnings))
    return finish(tree, places, warnings, arguments, complete=complete)


def apply(
    tree: dict[str, Any], places: dict[str, str], arguments: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Apply arguments to a whole config; a chosen option replaces its whole section."""
    given = parse(arguments)
    chosen = [a.text for a in given if a.kind == "group"]
    places, result = dict(places), dict(tree)
    if chosen:
        options = compose(chosen, complete=False)
        for group in (a.key for a in given if a.kind == "group"):
            _set_place(places, group, COMMAND_LINE)
            places |= {k: v for k, v in options.places.items() if k.split(".")[0] == group}
            if group not in options.tree_unresolved:
                what = "an option with keys of all groups cannot be laid over a whole config"
                raise ConfigError("C011", what, key=group, place=COMMAND_LINE)
            result[group] = options.tree_unresolved[group]
    for argument in given:
        if argument.kind in ("recipe", "delete"):
            is_recipe = argument.kind == "recipe"
            what = "a recipe cannot be laid over a whole config" if is_recipe else "cannot delete here"
            raise ConfigError("C011", what, key=argument.key, place=COMMAND_LINE)
        if argument.kind == "value":
            _set_places(places, argument)
    with translated():
        result = copy.deepcopy(_with_values(result, [a.text for a in given if a.kind == "value"]))
    drop_inherited(result, lambda key: place_of(key, places) != COMMAND_LINE)
    return result, places


def finish(
    tree: dict[str, Any],
    places: dict[str, str],
    warnings: list[str],
    arguments: Sequence[str],
    *,
    complete: bool,
) -> Composed:
    """Return a `Composed` of a tree: resolve its interpolations, and report those that fail."""
    tree = {str(key): value for key, value in tree.items()}
    # Hydra has already read the tree: only its interpolations can fail.
    resolves = complete and "${" in str(tree)
    resolved = resolve(tree, lambda key: place_of(key, places)) if resolves else copy.deepcopy(tree)
    if complete:
        warnings = [*warnings, *check_used(tree, places)]
    for key, value in flatten(resolved).items():
        if isinstance(value, str) and any(map(is_secret, key.split("."))):
            keep_secret(value)
    for name in variable_sections() - {VARIABLES}:
        resolved.pop(name, None)
    return Composed(resolved, tree, places, warnings, tuple(arguments))


def _load(arguments: Sequence[Argument]) -> tuple[dict[str, Any], TracingLoader]:
    """Return the tree of the arguments, interpolations as text, and the loader that read its files."""
    # A deletion may remove a group from the defaults list, so Hydra gets all arguments.
    whole = any(a.kind == "delete" for a in arguments)
    options = [a for a in arguments if whole or a.kind in ("group", "recipe")]
    values = [a.text for a in arguments if a not in options]
    chosen = tuple(a.text for a in options)
    recipes = {a.values[0] for a in options if a.kind == "recipe"}
    # Hydra takes most of the time. Merges of only the package's files are cached: they do not change.
    are_shipped = not paths.has_own() and recipes <= {*paths.options(paths.RECIPES)}
    load = _load_options if are_shipped else _load_options.__wrapped__
    with translated(OSError, RecursionError):
        tree, loader = load(chosen, paths.shown(paths.builtin_root().conf))
        return copy.deepcopy(_with_values(tree, values)), loader


def _with_values(tree: dict[str, Any], values: Sequence[str]) -> dict[str, Any]:
    """Return `tree` with `++key=value` arguments applied."""
    overrides = [read(text) for text in values]
    # Convert only the sections that change: OmegaConf takes most of the time.
    roots = {str(each.key_or_group).partition(".")[0] for each in overrides}
    config = OmegaConf.create({key: value for key, value in tree.items() if key in roots})
    TracingLoader._apply_overrides_to_config(overrides, config)
    return {**tree, **cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))}


@functools.lru_cache(maxsize=256)
def _load_options(chosen: tuple[str, ...], folder: str) -> tuple[dict[str, Any], TracingLoader]:
    """Load the config of the chosen options; `folder` is only part of the cache key."""
    loader = TracingLoader()
    try:
        config = loader.load_options(list(chosen))
    except (HydraException, OmegaConfBaseException):
        # A recipe may choose options of Hydra's own section.
        loader = TracingLoader()
        config = loader.load_configuration(PRIMARY, list(chosen), RunMode.RUN)
    tree = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    tree.pop("hydra", None)
    return tree, loader


@contextlib.contextmanager
def translated(*others: type[Exception]) -> Iterator[None]:
    """Convert errors of Hydra and OmegaConf, and of the types `others`, to a `ConfigError`."""
    try:
        yield
    except PtfastError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError, *others) as error:
        raise _translate(error) from error


def _translate(error: Exception) -> ConfigError:
    if isinstance(error, RecursionError):
        return ConfigError("C007", "option files whose defaults select each other in a circle")
    cause = error.__cause__ if str(error) in ("", "None") and error.__cause__ else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    message = re.sub(r"\s+", " ", lines[0] if lines else type(error).__name__).rstrip(".")
    override = re.search(r"override '?(\S+?)=(\S*)", str(error))
    key = override.group(1).lstrip("+~") if override else None
    if key and override:
        check_grammar(key, override[2], COMMAND_LINE)
    deleted = re.search(r"Could not delete (?:from config\. )?'([^']+)'", message)
    if deleted:
        return ConfigError("C002", "there is nothing to delete", key=f"~{deleted[1]}", place=COMMAND_LINE)
    if plugin := re.search(r"Could not find '(hydra/\w+)/(\w+)'", message):
        group, name = plugin.groups()
        there = re.findall(r"^\t(\w+)$", str(cause), re.MULTILINE)
        known = _PLUGINS.get(group, ())
        hint = did_you_mean(name, [*there, *known]) or f"Options of {group}: {', '.join(there)}"
        if name in known:
            package = f"hydra-{name.partition('_')[0]}-{group.removeprefix('hydra/')}"
            hint = f"Install it with pip install {package}"
        what = "there is no such plugin"
        return ConfigError("C003", what, key=group, value=name, place=COMMAND_LINE, suggestion=hint)
    return ConfigError("C001", message, key=key, place=COMMAND_LINE if key else None)


def _set_place(places: dict[str, str], key: str, place: str) -> None:
    """Record that `key` and all keys below it were set at `place`."""
    for below in [k for k in places if k.startswith(f"{key}.")]:
        del places[below]
    places[key] = place


def _set_places(places: dict[str, str], argument: Argument) -> None:
    """Record the keys that a `key=value` argument sets; a mapping sets the keys inside it."""
    key, value = argument.set_key, argument.value
    for inside in flatten({key: value}) if isinstance(value, dict) and value else [key]:
        _set_place(places, str(inside), COMMAND_LINE)
    if key != argument.key:
        places[argument.key] = COMMAND_LINE
