"""A run that hangs is ended by one signal, or by its timeout, and says where it stood."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT

KINDS = ("a worker's read", "a read, deaf", "forward, holding the lock", "a collective of one rank")


@pytest.mark.slow
def test_hangs_are_ended() -> None:
    command = [sys.executable, "scripts/hangs.py", "--only", *KINDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
