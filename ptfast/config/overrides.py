"""Parse `key=value` arguments before Hydra does, and expand presets into arguments."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ptfast.config.files import paths
from ptfast.config.files.yaml_file import lineage, read_yaml
from ptfast.config.schema import lies_in
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError, did_you_mean, together
from ptfast.core.sections.secret_values import is_secret

_SET_BY_US = {
    "hydra.run": "Use run.dir={} for the run's own folder",
    "hydra.sweep": "Use run.root={} for the folder of all runs: a sweep lies in its sweeps/",
    "hydra.output_subdir": "Leave it out: the run's config.yaml has the config, without secrets",
    "hydra.job.chdir": "Leave it out: a run stays in the folder that it was started in",
    "hydra.mode": "Use -m to sweep",
}
"""Hydra settings that ptfast controls, including the keys below them, and a hint for each."""


@dataclass(frozen=True)
class Argument:
    """One argument, in the form that Hydra gets."""

    kind: Literal["value", "group", "recipe", "delete", "hydra"]
    key: str
    """The dotted key or the group, without prefix; `task` also for `task.name`."""
    values: tuple[str, ...]
    """The value, or each point of a sweep, as text that Hydra can read."""
    is_sweep: bool
    text: str
    """The whole argument in Hydra's grammar."""
    value: Any = None
    """The parsed value, for the kind `value`."""

    @property
    def set_key(self) -> str:
        """The key that it sets, such as `task.name` for `task`."""
        return self.text.partition("=")[0].lstrip("+")

    @property
    def is_interval(self) -> bool:
        """Whether it sweeps over an interval, from which only some sweepers can choose points."""
        return self.is_sweep and self.values == (self.text.partition("=")[2],)

    @property
    def option(self) -> str:
        """The first value as plain text: the name of an option, the name or the path of a recipe."""
        return _plain(self.values[0])

    def at(self, value: str) -> str:
        return f"{self.text.partition('=')[0]}={value}"


def parse(arguments: Sequence[str], *, sweep: bool = False) -> list[Argument]:
    """Parse the arguments of a command, and check that the named options and recipes exist.

    Any other `key=value`, with or without `+`, becomes `++key=value`: Hydra accepts it, and validation
    rejects unknown keys. Several values (`key=a,b`) need `sweep`.
    """
    given, errors = sift(arguments, sweep=sweep)
    if errors:
        raise together(errors)
    return given


def sift(arguments: Sequence[str], *, sweep: bool = False) -> tuple[list[Argument], list[PtfastError]]:
    """Return the valid arguments, as `parse` does, and the errors of the others."""
    groups = paths.groups()
    result: dict[str, Argument] = {}
    errors: list[PtfastError] = []
    for written in arguments:
        try:
            argument = _parse_one(written, groups)
            _check_single(argument, written, result.get(argument.key), sweep)
            result[argument.key] = argument
        except PtfastError as error:
            if error.code == "C001":
                # The words around it may belong to it: `epochs = 3`.
                return [], [error]
            errors.append(error)
    return list(result.values()), errors


def _check_single(argument: Argument, written: str, before: Argument | None, sweep: bool) -> None:
    """Reject several values in a single run, and a key that `before` sets to another value."""
    if argument.is_sweep and not sweep:
        value = written.partition("=")[2]
        otherwise = f", write [{value}] for a list, or quote it twice for a text"
        otherwise = "" if "(" in value or is_secret(argument.key) else otherwise
        sweeper = " and hydra/sweeper=optuna" if argument.is_interval else ""
        what, hint = "several values, but this is a single run", f"Add -m{sweeper} to sweep over them"
        hint += otherwise
        raise ConfigError("C014", what, key=argument.key, value=value, place=COMMAND_LINE, suggestion=hint)
    if before and before.values != argument.values:
        both = f", with {' '.join(before.values)} and {' '.join(argument.values)}"
        what = f"given twice{'' if is_secret(argument.key) else both}"
        raise ConfigError("C006", what, key=argument.key, place=COMMAND_LINE, suggestion="Keep one of them")


def merge(arguments: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Merge `overrides` into `arguments`, keeping the last value of each key."""
    words = (*arguments, *overrides)
    return [*{word.partition("=")[0].lstrip("+"): word for word in words}.values()]


def quoted(text: str | Path) -> str:
    """Return `text` quoted as a value on the command line, whatever characters it contains."""
    return QuotedString(str(text), Quote.single).with_quotes()


def _parse_one(written: str, groups: list[str]) -> Argument:
    _check_shape(written, groups)
    override = read(written)
    key = override.key_or_group
    if override.package is not None:
        raise _rejected(written, "packages (`@`) are not supported")
    if override.is_hydra_override():
        for theirs, ours in _SET_BY_US.items():
            if lies_in(key, [theirs]):
                what = "ptfast decides where runs are kept and what is written there"
                raise _rejected(written, what, ours.format(written.partition("=")[2]), code="C011")
        return Argument("hydra", key, (written,), override.is_sweep_override(), written)
    values = _points(override, written)
    text = override.input_line or written
    value = text.partition("=")[2]
    if override.is_delete():
        return Argument("delete", key, ("deleted",), False, text)
    is_sweep = override.is_sweep_override()
    if key == paths.RECIPES:
        for name in map(_plain, values):
            paths.find_recipe(name)
        return Argument("recipe", key, values, is_sweep, f"+{key}={value}")
    is_mapping = isinstance(override.value(), dict)
    if key in groups and not is_mapping:
        for option in map(_plain, values):
            paths.check_option(key, option, groups, COMMAND_LINE)
        if key != paths.PRESETS:
            own = not (paths.builtin_root().conf / key).is_dir()
            return Argument("group", key, values, is_sweep, f"{'+' * own}{key}={value}")
    set_key = key
    if key in ("task", "task.name", "task._target_") and not is_mapping:
        key, set_key = "task", "task.name"
    return Argument("value", key, values, is_sweep, f"++{set_key}={value}", override.value())


def _check_shape(written: str, groups: list[str]) -> None:
    """Reject words that are not `key=value`, and suggest the intended form."""
    key, equals, _ = written.partition("=")
    if not equals and not written.startswith("~"):
        recipes = paths.options(paths.RECIPES)
        before, colon, after = written.partition(":")
        if written in recipes or written.endswith(".yaml"):
            hint = f"Write recipe={written}"
        elif colon:
            hint = f"Write {before.strip()}={after.strip()}"
        else:
            near = did_you_mean(written, recipes, "recipe={}")
            is_recipe = near and written not in groups and "." not in written
            hint = near if is_recipe else f"Write {written}=VALUE"
        what = "not of the form key=value"
        raise ConfigError("C001", what, key=written, place=COMMAND_LINE, suggestion=hint)
    if equals and (not key.lstrip("+~") or key != key.strip()):
        what = "no spaces around the equals sign" if key.strip() else "no key before the ="
        raise _rejected(written, what)


@functools.lru_cache(maxsize=1024)
def read(written: str) -> Override:
    """Parse an argument in Hydra's grammar; cached, because its parser takes a millisecond."""
    parser = OverridesParser.create()
    with contextlib.suppress(HydraException, ValueError):
        return parser.parse_override(written)
    key, _, value = written.partition("=")
    # Hydra's grammar accepts paths with brackets or non-ASCII letters only if they are quoted.
    if value and not re.search(r"^(\w+\(|[\[{'\"])|[,'\"]|\$\{", value):
        with contextlib.suppress(HydraException, ValueError):
            return parser.parse_override(f"{key}={quoted(value)}")
    if re.match(r"(choice|range|glob|interval|shuffle|sort|tag)\(", value):
        hint = "Write key=a,b or key=choice(a,b) or key=range(1,4)"
        raise _rejected(written, "not a sweep that can be read", hint, code="C014")
    hint = "Check quotes and brackets; quote a text twice: 'key=\"a,b\"'"
    raise _rejected(written, "not a value that can be read", hint)


def _points(override: Override, written: str) -> tuple[str, ...]:
    """Return the value of an argument, or each point of its sweep; an interval stays as written."""
    if not override.is_sweep_override():
        return (override.get_value_element_as_str(),) if not override.is_delete() else ()
    if not override.is_discrete_sweep():
        return (written.partition("=")[2],)
    glob = getattr(override.value(), "filter", None)
    points: tuple[str, ...] = ()
    with contextlib.suppress(HydraException, ValueError, ZeroDivisionError):
        names = glob(list(paths.options(override.key_or_group))) if glob else override.sweep_string_iterator()
        points = tuple(names)
    if not points:
        raise _rejected(written, "a sweep over no values", "Give at least one", code="C014")
    return points


def _plain(value: str) -> str:
    """Remove the quotes of Hydra's grammar from a value, or the backslashes before spaces and colons."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return re.sub(r"\\(\W)", r"\1", value)


def _rejected(written: str, what: str, hint: str | None = None, *, code: str = "C001") -> ConfigError:
    key, _, value = written.partition("=")
    key = key.lstrip("+~")
    return ConfigError(code, what, key=key, value=value, place=COMMAND_LINE, suggestion=hint)


def expand_preset(arguments: Sequence[Argument]) -> tuple[list[Argument], dict[str, str]]:
    """Put the preset's settings before `arguments`; also return the place of each of them.

    A preset named on the command line overrides the recipe; the recipe's own keys override a preset that the
    recipe names. The default preset needs no expanding: the primary config has its values.
    """
    given = {a.key: a for a in arguments}
    name, taken = None, set(given)
    if paths.PRESETS in given:
        name = given[paths.PRESETS].option
    elif paths.RECIPES in given:
        for recipe in lineage(paths.RECIPES, paths.find_recipe(given[paths.RECIPES].option)):
            if (own := recipe.data.get(paths.PRESETS)) is not None:
                paths.check_option(paths.PRESETS, own, [paths.PRESETS], recipe.places[paths.PRESETS])
                name = own
            taken |= {*recipe.places, *recipe.choices}
    if name is None:
        return list(arguments), {}
    preset = read_yaml(paths.options(paths.PRESETS)[name])
    places = {key: preset.places[key] for key in preset.data if key not in taken}
    groups = paths.groups()
    expanded: list[Argument] = []
    for key, place in places.items():
        value = preset.data[key]
        if "." not in key and key in groups:
            paths.check_option(key, value, groups, place)
            expanded.append(Argument("group", key, (value,), False, f"{key}={value}"))
            continue
        if isinstance(value, (dict, list)):
            what = "a preset consists of `group: option` and `dotted.key: value` lines"
            raise ConfigError("C007", what, key=key, place=place)
        text = OmegaConf.to_yaml(OmegaConf.create([value])).removeprefix("- ").strip()
        expanded.append(Argument("value", key, (text,), False, f"++{key}={text}"))
    return [*expanded, *arguments], places
