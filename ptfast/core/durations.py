"""Parsing of numbers and of durations in any unit (`100steps`, `10%`, `1h30m`)."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import Literal, cast

Unit = Literal["steps", "epochs", "samples", "percent", "seconds"]

NUMBER = r"[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?"
"""Pattern of an unsigned number in any text, also valid in JavaScript's regular expressions."""
TIME = (
    rf"(?:({NUMBER})\s*(?:days?|d))?\s*(?:({NUMBER})\s*(?:hours?|hrs?|h))?\s*"
    rf"(?:({NUMBER})\s*(?:minutes?|mins?|m))?\s*(?:({NUMBER})\s*(?:seconds?|secs?|s))?"
)
"""Pattern of a wall time; it matches empty text, too."""
_SIGNED = re.compile(rf"[+-]?(?:{NUMBER})", re.IGNORECASE | re.ASCII)
_LENGTH = re.compile(rf"({NUMBER})\s*(steps?|epochs?|samples?|percent|%)", re.IGNORECASE | re.ASCII)
_TIME = re.compile(TIME, re.IGNORECASE | re.ASCII)


def read_number(text: str) -> float | None:
    """Return the number in a text such as `3`, `-1_000` or `1e-3`, an `int` if it is whole; else None."""
    text = text.strip()
    if not _SIGNED.fullmatch(text):
        return None
    # Whole numbers of thousands of digits are too long for int().
    is_whole = text.lstrip("+-").replace("_", "").isdigit() and len(text) < 100
    return int(text) if is_whole else float(text)


def is_finite(number: float) -> bool:
    """Return True if the number fits a float; an `int` of 400 digits is too large."""
    return abs(number) <= sys.float_info.max


class DurationRangeError(ValueError):
    """Error of a duration that parses but is out of range, such as `-1epochs` or `150%`."""


@dataclass(frozen=True)
class Duration:
    """A length of training in its original unit; a percentage is of the run or of the dataset."""

    value: float
    unit: Unit

    def __post_init__(self) -> None:
        if not is_finite(self.value):
            raise DurationRangeError("a duration must be finite")
        object.__setattr__(self, "value", float(self.value))
        if self.value < 0:
            raise DurationRangeError("a duration cannot be negative")
        if self.unit == "percent" and self.value > 100:
            raise DurationRangeError("a percentage cannot be above 100")
        if self.unit in ("steps", "samples") and not self.value.is_integer():
            share = f"; a share is {100 * self.value:g}%" if self.value < 1 else ""
            raise ValueError(f"expected a whole number of {self.unit}{share}")

    @classmethod
    def parse(cls, text: str | float | Duration, default_unit: Unit = "steps") -> Duration:
        """Parse a duration as users write it.

        Args:
            text: `100steps`, `2 epochs`, `5000samples`, `10%`, `90s`, `5m`, `1h30m`, or a bare number.
            default_unit: the unit of a bare number.

        Raises:
            ValueError: not a duration, with the reason; `DurationRangeError` if it is out of range.
        """
        if isinstance(text, Duration):
            return text
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            return cls(text, default_unit)
        stripped = text.strip() if isinstance(text, str) else ""
        if (number := read_number(stripped)) is not None:
            return cls(number, default_unit)
        if stripped.startswith("-") and _read(stripped[1:].strip()):
            raise DurationRangeError("a duration cannot be negative")
        if (found := _read(stripped)) is None:
            raise ValueError(f"expected a duration such as {_EXAMPLES[default_unit]}")
        return cls(*found)

    def steps(
        self,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        batch_size: int | None = None,
    ) -> int:
        """Return the duration in optimizer steps, rounded; at least 1 unless the duration is 0.

        Args:
            total_steps: steps of the whole run, for percentages; None while unknown.
            steps_per_epoch: None for data of unknown length.
            batch_size: samples of one step, over all ranks.

        Raises:
            ValueError: the unit cannot be converted with these arguments.
        """
        if self.unit == "steps":
            return int(self.value)
        if self.value == 0:
            return 0
        if self.unit == "epochs":
            if steps_per_epoch is None:
                raise ValueError("epochs need data of known length, expected a number of steps")
            exact = self.value * steps_per_epoch
        elif self.unit == "samples":
            if batch_size is None:
                raise ValueError("samples cannot be converted to steps without a batch size")
            exact = self.value / batch_size
        elif self.unit == "percent":
            if total_steps is None:
                raise ValueError("a percentage needs a run of known length")
            exact = self.value * total_steps / 100
        else:
            raise ValueError("a wall time cannot be converted to steps")
        return max(1, math.floor(exact + 0.5))

    @property
    def seconds(self) -> float:
        """Return a wall time in seconds; ValueError for other units."""
        if self.unit != "seconds":
            raise ValueError(f"expected a wall time such as 90s or 1h30m, not {self}")
        return self.value

    def __str__(self) -> str:
        number = str(int(self.value)) if self.value.is_integer() else repr(self.value)
        return number + {"percent": "%", "seconds": "s"}.get(self.unit, self.unit)


def _read(text: str) -> tuple[float, Unit] | None:
    """Return the value and unit of an unsigned text with a unit, or None if it is not a duration."""
    if match := _LENGTH.fullmatch(text):
        unit = match[2].lower().removesuffix("s")
        return float(match[1]), "percent" if unit in ("%", "percent") else cast("Unit", f"{unit}s")
    match = _TIME.fullmatch(text)
    if match and any(match.groups()):
        parts = zip(match.groups(), (86400, 3600, 60, 1), strict=True)
        return sum(float(part) * factor for part, factor in parts if part), "seconds"
    return None


_EXAMPLES: dict[Unit, str] = {
    "steps": "100steps, 2epochs or 10%",
    "epochs": "2epochs, 100steps or 10%",
    "samples": "500samples or 10%",
    "percent": "10% or 500samples",
    "seconds": "90s, 5m or 1h30m",
}
