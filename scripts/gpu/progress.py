"""A pytest plugin: runs tests of one kind, notes how each ends, and skips those noted by an earlier call.

python -m pytest -p scripts.gpu.progress --kind eager --noted FILE -m gpu tests
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

COMPILING = {"triton", "CUDA graphs"}
"""What tests of compiled code name in their marker."""
KINDS = ("eager", "compiling", "rest")
"""Tests marked gpu without and with a compiler, and tests that need no GPU."""
TRIES = 2
"""Calls that a test may bring to their end without coming to its own."""


def kind_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return "rest"
    return "compiling" if COMPILING.intersection(marker.args) else "eager"


def read_notes(file: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The last note of each test of a kind that needs no other try, by the test's name."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.exists() else ()
    notes: dict[str, dict[str, Any]] = {}
    begun: Counter[str] = Counter()
    for note in lines:
        if note["kind"] != kind:
            continue
        begun[note["test"]] += note["outcome"] == "begun"
        if note["outcome"] != "begun":
            notes[note["test"]] = note
        elif begun[note["test"]] >= TRIES:
            notes[note["test"]] = {**note, "outcome": "failed", "why": "did not end"}
    return notes


def forget_failed(file: Path) -> None:
    """Have tests that failed run again."""
    failed = {
        (kind, test)
        for kind in KINDS
        for test, note in read_notes(file, kind).items()
        if note["outcome"] == "failed"
    }
    lines = file.read_text(encoding="utf-8").splitlines() if failed else []
    kept = [line for line in lines if (json.loads(line)["kind"], json.loads(line)["test"]) not in failed]
    if failed:
        file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kind", choices=KINDS, required=True)
    parser.addoption("--noted", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist's workers report to this process
        config.pluginmanager.register(Notes(config.getoption("--noted"), config.getoption("--kind")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kind = config.getoption("--kind")
    noted = read_notes(config.getoption("--noted"), kind)
    wanted = [kind_of(item) == kind and item.nodeid not in noted for item in items]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, wanted, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, wanted, strict=True) if keep]


class Notes:
    """Adds a line to the file when a test begins, and one with its outcome when it has ended."""

    def __init__(self, file: Path, kind: str) -> None:
        self.file, self.kind = file, kind
        self.outcomes: dict[str, tuple[str, str]] = {}

    def note(self, test: str, outcome: str, why: str = "") -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"kind": self.kind, "test": test, "outcome": outcome, "why": why}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.note(nodeid, "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.when == "call" or report.skipped:
            why = (
                report.longrepr[2]
                if isinstance(report.longrepr, tuple)
                else str(report.longrepr or "")[-300:]
            )
            if self.outcomes.get(report.nodeid, ("", ""))[0] != "failed":
                self.outcomes[report.nodeid] = (report.outcome, why if report.outcome != "passed" else "")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.note(nodeid, *self.outcomes.pop(nodeid, ("failed", "its process died")))
