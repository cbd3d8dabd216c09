"""Many small cases in one test, which names all that fail: an item for each costs more than the check."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")


def failures(check: Callable[[Case], None], cases: Iterable[Case]) -> list[str]:
    """The cases for which `check` raises, each with what it says."""
    found = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            found.append(f"{getattr(case, 'name', case)}: {type(error).__name__}: {error}")
    return found
