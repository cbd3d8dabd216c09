"""Jobs of a sweep without processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ptfast.cli import sweep_command


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the jobs of a sweep here: what a process of its own adds is for another test."""

    class Process:
        sentinel = exitcode = None

        def __init__(self, act: Callable[..., int], words: list[str], **options: Any) -> None:
            self.act, self.words, self.environment = act, words, options["environment"]

        def start(self) -> None:
            self.exitcode = self.act(self.words)

    monkeypatch.setattr(sweep_command, "warm_process", Process)
    monkeypatch.setattr(sweep_command, "start_process", Process.start)
    monkeypatch.setattr(sweep_command, "wait", lambda sentinels: None)
