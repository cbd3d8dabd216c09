"""The entry points for a config, which the rest of ptfast calls: read, compose and validate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ptfast.config.checks.trust import is_own
from ptfast.config.checks.validate import validate
from ptfast.config.compose import Composed, compose
from ptfast.config.files import paths
from ptfast.config.files.frozen import load
from ptfast.config.overrides import sift
from ptfast.config.schema import Config, lies_in
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError, together
from ptfast.core.sections.given import check_present


def read_config(arguments: Sequence[str]) -> tuple[Composed, Config]:
    """Return the config of a user's arguments, or raise all their errors; targets in them are trusted."""
    given, errors = sift(arguments)
    what, hint = "only a sweep reads it", "Add -m to sweep, or leave it out"
    for key, value in ((a.key, a.text.partition("=")[2]) for a in given if a.kind == "hydra"):
        errors.append(ConfigError("C011", what, key=key, value=value, place=COMMAND_LINE, suggestion=hint))
    failed = [(error.key or "").lstrip("+~") for error in errors]
    if {paths.RECIPES, paths.PRESETS} & {*failed} or (errors and not given):
        # Without the recipe or preset, errors found in the other arguments may be wrong.
        raise together(errors)
    try:
        composed = compose([argument.text for argument in given if argument.kind != "hydra"])
        config = validate(composed.tree, composed.place)
    except PtfastError as error:
        found, error.others = (error, *error.others), ()
        for one in found:
            if not lies_in(one.key or "", filter(None, failed)):
                errors.append(one)
        raise together(errors) from error
    if errors:
        raise together(errors)
    return replace(composed, arguments=tuple(arguments)), config


def load_config(
    path: Path, arguments: Sequence[str] = (), *, trusted: bool = False, trains: bool = True
) -> tuple[Composed, Config]:
    """Load a whole config from a file, such as a run directory's, and apply arguments to it.

    Args:
        trusted: the file is this run's own, or none of its targets are imported. Otherwise, unless this user
            made the run here, its targets must be in known packages or in `trust=[my_package]`.
        trains: False after training: new data may be stored differently from the training data.
    """
    trusted = trusted or is_own(path)
    composed = load(path, arguments, trusted=trusted, trains=trains)
    check_present(composed.tree, trains=trains)
    typed = {key for key, place in composed.places.items() if place == COMMAND_LINE}
    loader = composed.tree.get("dataloader", {})
    if not trains and loader.get("kind") == "packed" and any(key.split(".")[0] == "data" for key in typed):
        loader["kind"] = "auto"
    named = composed.tree.get("trust") if "trust" in typed else None
    extra_trust = named if isinstance(named, list) else []
    return composed, validate(composed.tree, composed.place, trusted=trusted, extra_trust=extra_trust)
