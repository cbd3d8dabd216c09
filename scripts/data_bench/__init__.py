"""The sections of `bench_data.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One way to do the section's job."""

    name: str
    work: Callable[[], int]
    """Does it for some items, a tenth of a second at least, and returns how many."""
    item: str = "image"
    """The unit counted."""
    note: str = ""
