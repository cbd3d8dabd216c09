"""The script for machines with a GPU: its tests are found, and every row that it measures composes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys

import pytest
from conftest import ROOT

from ptfast.config.read import read_config
from ptfast.core.errors import PtfastError

_loader = importlib.machinery.SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
_spec = importlib.util.spec_from_loader("gpu_check", _loader)
assert _spec is not None
gpu_check = importlib.util.module_from_spec(_spec)
_loader.exec_module(gpu_check)


def test_its_tests_are_found():
    """A mark of pytest's own may not be unknown there: that is an error of the whole file."""
    words = [*gpu_check.TESTS, "--collect-only", "tests/techniques/test_compile.py"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_compile.py: 2" in done.stdout


@pytest.mark.parametrize(
    ("row", "words"),
    [(row, gpu_check.RESNET50) for row in gpu_check.IMAGE_ROWS]
    + [(row, gpu_check.RESNET9) for row in gpu_check.LOADER_ROWS]
    + [(row, gpu_check.GPT) for row in gpu_check.TEXT_ROWS],
)
def test_every_row_composes_or_says_that_this_machine_cannot_run_it(row, words):
    preset, *own = row.split()
    try:
        read_config([f"preset={preset}", "data.path=noise", *words, *own])
    except PtfastError as error:
        if error.code != "E005":
            raise
