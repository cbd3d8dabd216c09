"""The config that a command line means: a recipe's, a frozen file's or that of a saved run."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from ptfast.core.errors import COMMAND_LINE


def read_typed(arguments: list[str], file: Path | None = None) -> Any:
    """Compose and validate what the arguments say, from a recipe or from a frozen config file."""
    from ptfast.config.checks.rules import unused_keys
    from ptfast.config.read import load_config, read_config
    from ptfast.core.distributed import nodes_from_environment, world
    from ptfast.report.terminal.display import say

    composed, config = load_config(file, arguments) if file else read_config(arguments)
    if file:
        composed = dataclasses.replace(composed, arguments=["--config", str(file), *arguments])
    if world(meets=True) is None and (config.parallel.nnodes > 1 or nodes_from_environment()):
        # The first of all ranks says it.
        return composed, config
    for warning in [*composed.warnings, *unused_keys(config, composed.place)]:
        say(f"ptfast: warning: {warning}", sys.stderr)
    chosen = [f"{group}{key}" for group in ("data", "model") for key in ("", "._target_")]
    default = config.data.target.path.endswith(".Digits") and config.model.target.path.endswith(".Mlp")
    if default and not composed.recipe and COMMAND_LINE not in map(composed.places.get, chosen) and not file:
        say("no recipe given: training the default, digits with a small MLP (ptfast recipes lists others)")
    return composed, config


def saved_run(path: str, overrides: list[str]) -> Any:
    """The state folder that a user's path means, and the config that it was saved with, raw and checked."""
    from ptfast.config.read import load_config
    from ptfast.core.run_directory import CONFIG
    from ptfast.core.saved_state import find_state

    state_folder = find_state(Path(path))
    return state_folder, *load_config(state_folder.parent.parent / CONFIG, overrides, trains=False)
