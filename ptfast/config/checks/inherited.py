"""Drop keywords of an option file that were meant for another target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ptfast.config.checks.target_kinds import SECTIONS
from ptfast.config.schema import Config, section_of
from ptfast.core.sections.problem import Problem
from ptfast.core.sections.targets import keywords, locate


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
        except Problem:
            continue  # validation says what is wrong with it
        own = section_of(Config.model_fields[name].annotation)
        fixed = own.model_fields if own else {}
        for key in list(section):
            is_keyword = key not in fixed and not str(key).startswith("_")
            if is_keyword and key not in kept and is_inherited(f"{name}.{key}"):
                del section[key]
