"""Outputs of the measuring commands: folders, results and recipes; and runs in separate processes.

`out` is the folder for results (None for a new one under `run.root`), and `write` is the path of the recipe.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from ptfast.config.files.overlay import check_out, check_overlay, write_overlay
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.clock import STARTED_VARIABLE
from ptfast.core.errors import MachineError
from ptfast.core.machine import die_with_parent
from ptfast.report.terminal import json_lines
from ptfast.report.terminal.display import say

RESULTS_FILE = "measure.json"
"""The file in a command's folder with all of its results."""


def check_outputs(out: Path | None, write: Path | None = None, flag: str = "--write") -> None:
    """Raise an error before measuring if the folder, or the recipe given by `flag`, cannot be written."""
    check_out(out)
    if write is not None:
        check_overlay(write, flag)


def check_new(out: Path | None) -> None:
    """Raise an error if a folder for runs is not empty or cannot be written."""
    check_out(out)
    if out is not None and out.exists() and any(out.iterdir()):
        raise MachineError("E001", "is not empty", key="--out", value=out, suggestion="Choose a new one")


def label(config: Config) -> str:
    """Return the name of a config for titles and folders."""
    return config.recipe or config.run.name or "train"


def make_folder(what: str, out: Path | None, config: Config | None = None) -> Path:
    """Create the folder for a command's results: `out`, or a new one under `run.root`."""
    root, name = ("runs", what) if config is None else (config.run.root, f"{what}-{label(config)}")
    folder = out or run_directory.new_folder(Path(root), name)
    run_directory.create_folder(folder)
    return folder


def write_results(
    what: str, out: Path | None, config: Config | None, facts: dict[str, Any], file: str = RESULTS_FILE
) -> Path:
    """Write the results of a command into its folder, print the path, and return the folder."""
    folder = make_folder(what, out, config)
    run_directory.write_json(folder / file, facts)
    if not json_lines.emit("result", file=str(folder / file), **facts):
        say(f"results: {folder}")
    return folder


def write_recipe(
    file: Path, arguments: Sequence[str], found: dict[str, Any], comment: list[str], flag: str = "--write"
) -> None:
    """Write a recipe from the arguments and the result, and print the command to train with it."""
    called = write_overlay(file, arguments, found, comment, flag)
    say(f"wrote {file}; train with it: ptfast train recipe={called}")


def run_ptfast(
    words: Sequence[str], log: Path, *, module: str = "ptfast", limit_s: float | None = None, **variables: str
) -> tuple[int | None, str]:
    """Run a ptfast command in a separate process, with its output in a file.

    Returns:
        The exit code, None if it was killed after `limit_s`; and the last line of output, such as its error.
    """
    # The log is meant for people: no JSON.
    unset = (STARTED_VARIABLE, json_lines.VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command, code = [sys.executable, "-m", module, *words], None
    with log.open("w") as output:
        streams: dict[str, Any] = {"stdin": DEVNULL, "stdout": output, "stderr": STDOUT}
        end: dict[str, Any] = {"start_new_session": True, "preexec_fn": die_with_parent}
        process = Popen(command, env=environment | variables, **streams, **end)
        try:
            with contextlib.suppress(TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            process.kill()
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return code, lines[-1] if lines else f"ptfast: exit code {code}; see {log}"
