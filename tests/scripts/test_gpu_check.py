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


FILE = """
import pytest

@pytest.mark.gpu("TF32")
@pytest.mark.filterwarnings("ignore:nothing")
def test_on_a_gpu():
    pass

def test_on_any_machine():
    pass
"""


def test_its_tests_are_found(tmp_path):
    """A mark of pytest's own may not be unknown there: that is an error of the whole file."""
    (tmp_path / "test_it.py").write_text(FILE)
    words = [*gpu_check.TESTS, "-c", str(ROOT / "pyproject.toml"), "--collect-only", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "test_it.py: 1" in done.stdout


ROWS = {
    **dict.fromkeys(gpu_check.IMAGE_ROWS, gpu_check.RESNET50),
    **dict.fromkeys(gpu_check.TEXT_ROWS, gpu_check.GPT),
    **dict.fromkeys(gpu_check.LOADER_ROWS, gpu_check.RESNET9),
}
"""Each row once, on the last of the models that it is measured on."""


@pytest.mark.parametrize(("row", "words"), ROWS.items())
def test_every_row_composes_or_says_that_this_machine_cannot_run_it(row, words):
    preset, *own = row.split()
    try:
        read_config([f"preset={preset}", "data.path=noise", *words, *own])
    except PtfastError as error:
        if error.code != "E005":
            raise
