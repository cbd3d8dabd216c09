"""Resolve all interpolations of a config at once, so that a broken one is found at the start."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationToMissingValueError, OmegaConfBaseException
from omegaconf.grammar_parser import parse
from omegaconf.resolvers import oc

from ptfast.config.checks.target_checks import SECTIONS
from ptfast.config.files import paths
from ptfast.config.schema import VARIABLES, Config, flatten, lies_in, section_of
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError, did_you_mean, not_set, together
from ptfast.core.sections.secret_values import keep_secret
from ptfast.core.sections.spelling import nearest
from ptfast.core.sections.targets import keywords, locate

ENV = re.compile(r"\$\{oc\.env:[^{}]*\}")
"""A value that is a reference to an environment variable and nothing else."""

_REFERENCE = re.compile(r"\$\{(\.*)([^${}:.][^${}:]*)\}")
_MOST_CHARS = 1_000_000
"""Maximum length of one value after its interpolations are expanded."""
_RESOLVERS = (
    *("oc.env", "oc.select", "oc.decode", "oc.create", "oc.deprecated"),
    *("oc.dict.keys", "oc.dict.values"),
)


def resolve(tree: dict[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """Return a copy of `tree` with interpolations replaced by their values; report all that fail at once."""
    config = OmegaConf.create(tree)
    if (key := _too_large(tree)) is not None:
        what = f"its interpolations expand to more than {_MOST_CHARS:,} characters"
        raise ConfigError("C008", what, key=key, place=place(key))
    found: dict[str, PtfastError] = {}
    for key, parent, name in _interpolations(config, ""):
        try:
            value = parent[name]
            if isinstance(value, (DictConfig, ListConfig)):
                OmegaConf.to_container(value, resolve=True)
        except InterpolationToMissingValueError as error:
            key = str(error).splitlines()[0].rpartition(" ")[2]
            found[key] = not_set(key).changed(place=place(key))
        except (OmegaConfBaseException, RecursionError) as error:
            what, hint = _why_broken(error, config)
            written = parent._get_node(name)._value()
            # If several keys fail for the same cause, report the one that names it.
            if what not in found or what.split()[-1] in str(written):
                at = {"key": key, "value": written, "place": place(key)}
                found[what] = ConfigError("C008", what, suggestion=hint, **at)
    if found:
        raise together([*found.values()])
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True))


def _interpolations(config: DictConfig | ListConfig, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted key, the mapping or list, and the name or index in it, of each interpolation."""
    names: list[Any] = list(range(len(config)) if isinstance(config, ListConfig) else config.keys())
    for name in names:
        if OmegaConf.is_interpolation(config, name):
            yield f"{prefix}{name}", config, name
            continue
        node = config._get_node(name)
        if isinstance(node, (DictConfig, ListConfig)) and not node._is_none():
            yield from _interpolations(node, f"{prefix}{name}.")


def _why_broken(error: BaseException, config: DictConfig | ListConfig) -> tuple[str, str | None]:
    """Return the error of an interpolation, and its remedy."""
    message = str(error)
    if variable := re.search(r"Environment variable '([^']*)' not found", message):
        hint = f"Set it, or give a default: ${{oc.env:{variable[1]},DEFAULT}}"
        return f"the environment variable {variable[1]} is not set", hint
    if resolver := re.search(r"Unsupported interpolation type (\S+)", message):
        hint = did_you_mean(resolver[1], _RESOLVERS) or f"There are {', '.join(_RESOLVERS)}"
        return f"there is no interpolation {resolver[1]}", hint
    if absent := re.search(r"Interpolation key '([^']*)' not found", message):
        section, dot, name = absent[1].rpartition(".")
        inside = OmegaConf.select(config, section, throw_on_resolution_failure=False) if section else config
        near = nearest(name, map(str, inside)) if isinstance(inside, DictConfig) else None
        return f"there is no key {absent[1]}", near and f"Did you mean ${{{section}{dot}{near}}}?"
    if isinstance(error, RecursionError) or "recursi" in message.lower():
        return "the interpolation refers to itself", None
    first_line = message.strip().partition("\n")[0].strip() or type(error).__name__
    return f"an interpolation that cannot be resolved: {first_line}", None


def check_grammar(key: str, text: str, place: str) -> None:
    """Raise C008 if a `${...}` in a value is not a valid interpolation."""
    try:
        parse(text)
    except GrammarParseError as error:
        first_line = str(error).strip().partition("\n")[0].strip()
        what, hint = f"an interpolation that cannot be read: {first_line}", "Write \\${ for the text itself"
        raise ConfigError("C008", what, key=key, value=text, place=place, suggestion=hint) from error


def _env(*arguments: Any) -> Any:
    """Resolve `oc.env`, and hide its value from then on in everything shown or written."""
    value = _oc_env(*arguments)
    if isinstance(value, str):
        keep_secret(value)
    return value


_oc_env = oc.env
OmegaConf.register_new_resolver("oc.env", _env, replace=True)


def _too_large(tree: dict[str, Any]) -> str | None:
    """Return the first key whose nested references would expand beyond `_MOST_CHARS`, or None."""
    sizes: dict[str, int] = {}
    values = flatten(tree)

    def size(key: str) -> int:
        """Count the characters at or below a key; 0 if a circle comes back to a key being counted."""
        if key in sizes:
            return sizes[key]
        sizes[key] = 0
        if key in values:
            text, above = str(values[key]), key.split(".")
            references = (
                ".".join([*above[: len(above) - len(dots)], name] if dots else [name])
                for dots, name in _REFERENCE.findall(text)
            )
            sizes[key] = min(len(text) + sum(map(size, references)), 2 * _MOST_CHARS)
        else:
            sizes[key] = sum(size(inside) for inside in values if inside.startswith(f"{key}."))
        return sizes[key]

    return next((key for key in values if "${" in str(values[key]) and size(key) > _MOST_CHARS), None)


def resolve_keeping_env(tree: dict[str, Any], tree_unresolved: dict[str, Any]) -> dict[str, Any]:
    """Return `tree` for writing to a file: references to the environment are kept, other `${` escaped."""
    references: list[str] = []

    def refer(*arguments: Any) -> str:
        references.append(f"${{oc.env:{','.join(map(str, arguments))}}}")
        return f"\0{len(references) - 1}\0"

    def written(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: written(item) for key, item in value.items()}
        if isinstance(value, list):
            return [written(item) for item in value]
        if not isinstance(value, str):
            return value
        text = value.replace("${", "\\${")
        return re.sub(r"\0(\d+)\0", lambda m: references[int(m[1])], text) if references else text

    if "oc.env" not in str(tree_unresolved):
        return written(tree)
    OmegaConf.register_new_resolver("oc.env", refer, replace=True)
    try:
        marked = OmegaConf.to_container(OmegaConf.create(tree_unresolved), resolve=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", _env, replace=True)
    return written(marked)


def variable_sections() -> set[str]:
    """Return the sections that only interpolations read: `vars`, and the user's own groups."""
    return {VARIABLES, *(set(paths.own_groups()) - set(Config.model_fields))}


def check_used(tree: dict[str, Any], places: dict[str, str]) -> list[str]:
    """Reject typed variables that no key of `tree` refers to; return warnings about such groups."""
    sections = variable_sections()
    typed = [key for key, place in places.items() if place == COMMAND_LINE]
    typed = [key for key in typed if "." in key and key.partition(".")[0] in sections]
    references = " ".join(str(value) for value in flatten(tree).values() if "${" in str(value))
    known = sorted(set(re.findall(rf"\b(?:{'|'.join(map(re.escape, sections))})\b(?:\.\w+)*", references)))
    # A reference to a key also uses the keys inside it and the sections around it.
    named = {
        key for key in (*typed, *sections) if lies_in(key, known) or any(lies_in(k, [key]) for k in known)
    }
    errors: list[PtfastError] = []
    for key in typed:
        if key not in named:
            hint = did_you_mean(key, known) or "A run's config.yaml has values in place of variables"
            what = f"no key refers to ${{{key}}}"
            errors.append(ConfigError("C002", what, key=key, place=COMMAND_LINE, suggestion=hint))
    if errors:
        raise together(errors)
    idle = [name for name in sections - {VARIABLES, *named} if tree.get(name)]
    return [
        f"{name} ({places.get(name, COMMAND_LINE)}): no key refers to what it sets. "
        "An option that sets keys of other groups begins with `# @package _global_`"
        for name in sorted(idle)
    ]


def drop_inherited(tree: dict[Any, Any], is_inherited: Callable[[str], bool]) -> None:
    """Delete keywords of an option whose target the user replaced, if the new target does not take them.

    `optimizer._target_=torch.optim.RMSprop` over the option `adamw` drops its `betas` and keeps its `lr`. A
    key is inherited if an option file or a preset sets it, not the user.
    """
    for name in SECTIONS:
        section = tree.get(name)
        if not isinstance(section, dict) or is_inherited(f"{name}._target_"):
            continue
        try:
            kept = keywords(locate(str(section.get("_target_"))))
        except PtfastError:
            continue  # validation reports it
        own = section_of(Config.model_fields[name].annotation)
        fixed = own.model_fields if own else {}
        for key in list(section):
            is_keyword = key not in fixed and not str(key).startswith("_")
            if is_keyword and key not in kept and is_inherited(f"{name}.{key}"):
                del section[key]
