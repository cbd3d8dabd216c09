"""Random configs of the schema's keys train, or are refused with a reason: exit code 1 would be a bug."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import pytest
import stand_ins
from forked import Forked, run_command
from random_configs import faulty, valid

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")
ERROR = re.compile(r"ptfast: error\[[A-Z]\d{3}\]: \S.*[.?]")
BAD = {"config": 2, "data": 3, "environment": 4, "numerics": 5}
"""Exit codes of a config whose values are valid one by one, and which cannot be trained all the same."""


def outcomes(make: Callable[[Random], list[str]], seeds: Iterable[int], files: Path) -> Counter[int]:
    """How often the first steps of random configs end with each exit code; errors are single lines."""
    stand_ins.write(files)
    for module in ("torchvision", "ptfast.training.build", "ptfast.training.fit"):
        importlib.import_module(module)  # once, and not in every fork
    codes = Counter[int]()
    for seed in seeds:
        words = [word.replace("FILES", str(files)) for word in make(Random(seed))]
        # A fault may be of a key of a run's length.
        words += ["device=cpu", *["steps=3"] * (not any(word.startswith("epochs=") for word in words))]
        dry_run = Forked(run_command("train", *words, "--dry-run"))
        _, said = dry_run.communicate()
        assert dry_run.returncode in (0, *BAD.values()), (
            f"seed {seed}: ptfast train {' '.join(words)}\n{said}"
        )
        errors = [line for line in said.splitlines() if line.startswith("ptfast: error")]
        assert bool(errors) == (dry_run.returncode > 0)
        assert all(ERROR.fullmatch(line) for line in errors), said
        codes[dry_run.returncode] += 1
    return codes


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", stand_ins.datasets())


def test_valid_ones(in_tmp: Path) -> None:
    assert outcomes(valid, range(8), in_tmp)[0] >= 2


def test_ones_with_a_fault(in_tmp: Path) -> None:
    assert outcomes(faulty, range(5), in_tmp) == {2: 5}


@pytest.mark.slow
def test_a_thousand(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert outcomes(valid, range(750), tmp_path_factory.mktemp("valid"))[0] >= 250
    assert outcomes(faulty, range(250), tmp_path_factory.mktemp("faulty")) == {2: 250}
