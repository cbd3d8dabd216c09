"""Follow a tutorial page as a reader would: save its files, give its commands, keep their outputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from conftest import ROOT
from shown import FENCE, PAGES

PROGRAMS = ("ptfast", "python", "mkdir", "cp", "mv", "cd", "printf")
"""Programs whose command lines are given; other lines show how files lie or need a server."""
CELLS = "print('-- cell', flush=True)\n"


class Given(NamedTuple):
    """A command of a page, its output and its wall time."""

    command: str
    output: str
    seconds: float


def files_of(page: str) -> dict[str, str]:
    """Return the files that the reader saves: blocks that start with `# NAME.py` or `# NAME.yaml`."""
    blocks = [text for language, text in FENCE.findall(PAGES[page]) if language in ("python", "yaml")]
    return {match[1]: text for text in blocks if (match := re.match(r"# (\w+\.(?:py|yaml))", text))}


def cells_of(page: str) -> str:
    """Return the code of a page that is no file, as one program that marks where each block begins."""
    blocks = [text for language, text in FENCE.findall(PAGES[page]) if language == "python"]
    return "".join(CELLS + text for text in blocks if text not in files_of(page).values())


def commands_of(page: str) -> list[str]:
    blocks = [text for language, text in FENCE.findall(PAGES[page]) if not language]
    lines = [line for text in blocks for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.split(" ")[0] in PROGRAMS]


def environment(folder: Path) -> dict[str, str]:
    """Return variables with `ptfast` and `python` of this interpreter on the path, and 80 columns."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, words in (("python", '"$@"'), ("ptfast", '-m ptfast "$@"')):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}\n')
        (programs / name).chmod(0o755)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": paths,
        "COLUMNS": "80",
    }


def without_ptfast(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of an environment in which importing ptfast fails."""
    package = folder / "programs" / "none" / "ptfast"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ImportError('ptfast is not installed here')\n")
    return {**variables, "PYTHONPATH": str(package.parent)}


def follow(page: str, folder: Path, *, needs: str | None = None) -> Iterator[Given]:
    """Give the commands of a page in `folder`, one after another; raise where one fails.

    Args:
        needs: another tutorial whose files this one uses.
    """
    for name, text in {**(files_of(needs) if needs else {}), **files_of(page)}.items():
        (folder / name).write_text(text)
    variables, place = environment(folder), folder
    for command in commands_of(page):
        if command.startswith("cd "):
            place = place / command.split(" ")[1]
            continue
        if command == "python serve.py":
            continue
        exported = command.startswith("python exported/")
        yield give(command, place, without_ptfast(folder, variables) if exported else variables)


def give(command: str, place: Path, variables: dict[str, str]) -> Given:
    begun = time.perf_counter()
    done = subprocess.run(
        ["bash", "-c", command], cwd=place, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return Given(command, done.stdout + done.stderr, time.perf_counter() - begun)
