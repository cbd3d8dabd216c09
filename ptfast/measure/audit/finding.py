"""The finding of an audit, and the place in the code that it is about."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ptfast.core.sections.section import Kind
from ptfast.measure.experiment.verdicts import Effect, Verdict

Sides = tuple[Callable[[], object], Callable[[], object]]
"""What a step does as it is, and mended."""
Trial = Callable[[], Sides]
"""Makes them, when the price of a finding is measured."""
_PACKAGE = Path(__file__).parents[2]
_PARTS = (_PACKAGE / "models", _PACKAGE / "tasks")
"""Our own code that stands where a user's may."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_STANDARD = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


@dataclass(frozen=True)
class Price:
    """Seconds of a step that a finding costs, as measured here."""

    seconds: float
    low_s: float | None = None
    """Of the interval of a paired trial, as `high_s`; None where its calls were timed as they are."""
    high_s: float | None = None
    verdict: Verdict | None = None
    """What the trial says of the step without it: `faster` is what a finding promises."""

    @classmethod
    def of(cls, effect: Effect, step_s: float, verdict: Verdict) -> Price:
        """What `effect`, the speed-up by mending it, saves of `step_s` seconds."""
        seconds, low_s, high_s = (step_s * (1 - 1 / ratio) for ratio in (effect.ratio, *effect.interval()))
        return cls(seconds, low_s, high_s, verdict)


@dataclass(frozen=True)
class Finding:
    """Something that costs speed."""

    what: str
    where: str
    """`file.py:12`, or the path of a module in the model; a config key where it is about that."""
    mend: str
    """The change of code as an imperative; empty where `overrides` say it all."""
    overrides: tuple[str, ...] = ()
    """Words for the command line that mend it."""
    kind: Kind = "exact"
    """What mending it does to the result."""
    price: Price | None = None
    """None where it was not measured."""
    trial: Trial | None = None
    """None where nothing in this process stands in for mending it."""
    handled: bool = False
    """The run mends it itself."""
    area: str = ""
    check: str = ""
    """Name of the check that found it."""

    def receipt(self) -> dict[str, Any]:
        """Its figures as plain values."""
        facts = {name: value for name, value in vars(self).items() if name != "trial"}
        return facts | {"price": self.price and asdict(self.price)}

    @property
    def gains(self) -> bool:
        """True unless a trial has found no gain in mending it."""
        return self.price is None or self.price.verdict in (None, "faster")


def code_place() -> str | None:
    """The line of a user, a library or a model of ours that asks for what is at work, as `file.py:12`."""
    frame = sys._getframe(1)
    while frame is not None and _is_framework(frame.f_code.co_filename):
        frame = frame.f_back
    file = None if frame is None else _shown(frame.f_code.co_filename)
    return None if file is None or frame is None else f"{file}:{frame.f_lineno}"


def source_place(thing: Any) -> str:
    """Where a class or function is written, as `file.py:12`; its name where no file says it."""
    try:
        _, line = inspect.getsourcelines(thing)
        file = _shown(inspect.getsourcefile(thing) or "<>")
    except (OSError, TypeError):
        file, line = None, 0
    return f"{file}:{line}" if file else f"{thing.__module__}.{thing.__qualname__}"


@cache
def _is_framework(file: str) -> bool:
    """True for a file of torch, of Python's own library, or of this folder."""
    path = Path(file)
    ours = Path(__file__).parent, Path(torch.__file__).parent
    standard = any(map(path.is_relative_to, _STANDARD)) and not any(map(path.is_relative_to, _LIBRARIES))
    return file.startswith("<") or standard or any(map(path.is_relative_to, ours))


@cache
def _shown(file: str) -> str | None:
    """The name to show for a file of code; None for one of this package that is no part of a run."""
    path, here = Path(file), Path.cwd()
    if path.is_relative_to(_PACKAGE):
        return str(path.relative_to(_PACKAGE.parent)) if any(map(path.is_relative_to, _PARTS)) else None
    for folder in (*_LIBRARIES, here):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return path.name
