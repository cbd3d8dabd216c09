"""Variables: sections that no part of a run reads, only interpolations of other keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ptfast.config.checks.target_kinds import SECTIONS
from ptfast.config.files import paths
from ptfast.config.schema import VARIABLES, Config, flatten, section_of
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError, together
from ptfast.core.sections.nearest_name import did_you_mean
from ptfast.core.sections.targets import keywords, locate


def variable_sections() -> set[str]:
    """The names of those sections: `vars`, and the groups that the user has made beside the package's."""
    return {VARIABLES, *(set(paths.own_groups()) - set(Config.model_fields))}


def check_used(tree: dict[str, Any], places: dict[str, str]) -> list[str]:
    """Refuse what was typed for a variable that no other key refers to.

    Args:
        tree: the whole config, with its interpolations.
        places: where each key was given.
    """
    sections = variable_sections()
    typed = [key for key, place in places.items() if place == COMMAND_LINE]
    typed = [key for key in typed if "." in key and key.partition(".")[0] in sections]
    references = " ".join(str(value) for value in flatten(tree).values() if "${" in str(value))
    known = sorted(set(re.findall(rf"\b(?:{'|'.join(map(re.escape, sections))})\b(?:\.\w+)*", references)))
    errors = [
        ConfigError(
            "C002",
            f"no key refers to ${{{key}}}",
            key=key,
            place=COMMAND_LINE,
            suggestion=did_you_mean(key, known) or "A run's config.yaml holds values in place of variables",
        )
        for key in typed
        if not _named(key, known)
    ]
    if errors:
        raise together(errors)
    idle = [name for name in sections - {VARIABLES} if tree.get(name) and not _named(name, known)]
    return [
        f"{name} ({places.get(name, COMMAND_LINE)}): no key refers to what it sets. "
        "An option that sets keys of other groups begins with `# @package _global_`"
        for name in sorted(idle)
    ]


def _named(key: str, names: list[str]) -> bool:
    """Return True if one of `names` is `key`, lies in it, or holds it."""
    return any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in names)


def drop_inherited(tree: dict[Any, Any], is_inherited: Callable[[str], bool]) -> None:
    """Delete the keywords that were meant for another target than the one the user put in its place.

    `optimizer._target_=torch.optim.RMSprop` over the option `adamw` has no use for the option's `betas`,
    but keeps its `lr`.

    Args:
        tree: the config, changed in place.
        is_inherited: True for a dotted key set by an option file or a preset, not by the user.
    """
    for name in SECTIONS:
        section = tree.get(name)
        if not isinstance(section, dict) or is_inherited(f"{name}._target_"):
            continue
        try:
            kept = keywords(locate(str(section.get("_target_"))))
        except PtfastError:
            continue  # validation says what is wrong with it
        own = section_of(Config.model_fields[name].annotation)
        fixed = own.model_fields if own else {}
        for key in list(section):
            is_keyword = key not in fixed and not str(key).startswith("_")
            if is_keyword and key not in kept and is_inherited(f"{name}.{key}"):
                del section[key]
