"""What commands that measure write and show: figures, a recipe with what was found, a line of progress."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptfast.config.files.overlay import check_out, check_overlay, write_overlay
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.report.terminal.display import is_terminal, say, standard_output

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


def write_figures(config: Config, what: str, out: Path | None, facts: dict[str, Any]) -> Path:
    """Write `WHAT.json` and return its folder: `out`, or a new one under `run.root`."""
    folder = make_folder(config, f"find-{what}", out)
    run_directory.write_json(folder / f"{what}.json", facts)
    return folder


def make_folder(config: Config, what: str, out: Path | None) -> Path:
    """Make the folder of what a command has measured: `out`, or a new one under `run.root`."""
    folder = out or run_directory.new_folder(Path(config.run.root), f"{what}-{label(config)}")
    run_directory.create_folder(folder)
    return folder


def write_recipe(
    file: Path, arguments: Sequence[str], found: dict[str, Any], comment: list[str], flag: str = "--write"
) -> None:
    """Write a recipe of the arguments with what was found, and show how to train with it."""
    called = write_overlay(file, arguments, found, comment, flag)
    say(f"wrote {file}; train with it: ptfast train +recipe={called}")


def save_picture(picture: Figure, file: Path) -> None:
    """Write a PNG, whole or not at all."""
    partial = file.with_suffix(".partial")
    picture.savefig(partial, dpi=120, format="png")
    partial.replace(file)


@contextlib.contextmanager
def live_line() -> Iterator[Callable[[str], None]]:
    """A line that is written over again and again on a terminal; nothing elsewhere."""
    stream = standard_output()
    shows = is_terminal(stream)

    def write(text: str) -> None:
        if shows:
            width = shutil.get_terminal_size().columns - 1
            stream.write(f"\r{text[:width]}\x1b[K")
            stream.flush()

    try:
        yield write
    finally:
        write("")
