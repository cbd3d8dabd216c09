"""Output of the measuring commands: figures, pictures, and a recipe with what was found.

Commands take `out`, the folder of the figures, None for a new one under `run.root`, and `write`, the file of
the recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptfast.config.files.overlay import check_out, check_overlay, write_overlay
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.report.terminal.display import say
from ptfast.report.terminal.json_lines import emit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECEIPT = "measure.json"
"""File of all figures of a command, in its folder."""


def check_outputs(out: Path | None, write: Path | None = None, flag: str = "--write") -> None:
    """Refuse, before anything is measured, a folder or the recipe of `flag` that could not be written."""
    check_out(out)
    if write is not None:
        check_overlay(write, flag)


def label(config: Config) -> str:
    """The name of a config in titles and folders."""
    return config.recipe or config.run.name or "train"


def make_folder(what: str, out: Path | None, config: Config | None = None) -> Path:
    """Make the folder of a command's figures: `out`, or a new one under `run.root`."""
    root, name = ("runs", what) if config is None else (config.run.root, f"{what}-{label(config)}")
    folder = out or run_directory.new_folder(Path(root), name)
    run_directory.create_folder(folder)
    return folder


def write_figures(
    what: str, out: Path | None, config: Config | None, facts: dict[str, Any], file: str = RECEIPT
) -> Path:
    """Write the figures of a command into its folder, say where they are, and return the folder."""
    folder = make_folder(what, out, config)
    run_directory.write_json(folder / file, facts)
    if not emit("result", file=str(folder / file), **facts):
        say(f"figures: {folder}")
    return folder


def write_recipe(
    file: Path, arguments: Sequence[str], found: dict[str, Any], comment: list[str], flag: str = "--write"
) -> None:
    """Write a recipe of the arguments with what was found, and show how to train with it."""
    called = write_overlay(file, arguments, found, comment, flag)
    say(f"wrote {file}; train with it: ptfast train +recipe={called}")


@contextlib.contextmanager
def picture(file: Path, title: str, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on, of so many inches; written as a PNG afterwards, whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    yield figure
    partial = file.with_suffix(".partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(file)
