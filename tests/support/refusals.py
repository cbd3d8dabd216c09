"""Checks of every refusal: one line, the right exit code, and nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from bad_configs import EXIT_CODES

from ptfast.cli import command_line

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def tree(folder: Path) -> set[str]:
    """Every file and folder below."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def assert_says(stderr: str, code: str, says: tuple[str, ...]) -> None:
    """One printable line of standard error, with the code and the texts."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith(f"ptfast: error[{code}]: "), lines[0]
    assert lines[0].isprintable()
    assert lines[0].endswith((".", "?")), lines[0]
    for text in says:
        assert text in lines[0]
    assert not re.search(r"hunter|Traceback", lines[0])


def assert_refused(words: Sequence[str], code: str, says: tuple[str, ...], capsys: Capture) -> None:
    """The command is refused with one line, and leaves the folder as it found it."""
    before = tree(Path())
    exit_code = command_line.run(words)
    assert_says(capsys.readouterr().err, code, says)
    assert exit_code == EXIT_CODES[code[0]]
    assert tree(Path()) - before <= {"__pycache__"} | {f for f in tree(Path()) if "__pycache__/" in f}


def train_once(*words: str, capsys: Capture) -> tuple[str, str]:
    """Train in this process, which must succeed; returns standard output and standard error."""
    exit_code = command_line.run(["train", *words])
    out, err = capsys.readouterr()
    assert exit_code == 0, err
    return out, err
