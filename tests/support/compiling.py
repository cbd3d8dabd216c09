"""What tests of compiling share: a small net, graphs captured alone, and a display that remembers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ptfast.core import plain_display
from ptfast.techniques.compile.compilation import Compilation

NET = ("model=custom", "model._target_=nets.Net", "batch_size=64", "logger=none")
RUN = (*NET, "optimizer=sgd")


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before or after a test; a compiler, where a test uses none of it."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        monkeypatch.setattr("ptfast.core.devices.check_compiler", lambda device: None)
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def captured_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured, guarded and counted as ever, and run by torch as they are."""
    build = Compilation.__init__

    def built(self: Compilation, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.options = {"dynamic": self.options["dynamic"], "backend": "eager"}

    monkeypatch.setattr(Compilation, "__init__", built)


class Remembers(plain_display.Display):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)
