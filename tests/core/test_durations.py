"""Durations: how they are read, written, and converted to steps."""

from __future__ import annotations

import pytest

from ptfast.core.durations import Duration, DurationRangeError


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("100steps", 100, "steps"),
        ("1 step", 1, "steps"),
        ("10 steps", 10, "steps"),
        ("2epochs", 2, "epochs"),
        ("0.5epoch", 0.5, "epochs"),
        ("5000samples", 5000, "samples"),
        ("5_000 samples", 5000, "samples"),
        ("10%", 10, "percent"),
        ("2.5 percent", 2.5, "percent"),
        ("90s", 90, "seconds"),
        ("5m", 300, "seconds"),
        ("1h30m", 5400, "seconds"),
        ("1 hour 30 minutes", 5400, "seconds"),
        ("2d", 172800, "seconds"),
        ("1e3steps", 1000, "steps"),
        ("7", 7, "epochs"),
        (7, 7, "epochs"),
        (0.5, 0.5, "epochs"),
    ],
)
def test_reads_what_users_write(text: str | float, value: float, unit: str) -> None:
    assert Duration.parse(text, "epochs") == Duration(value, unit)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "abc", "5x", "steps", "1e", "5 steps 3", "m", "30m1h", True, None, [5], "nan", "1.5steps", "½"],
)
def test_rejects_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        Duration.parse(text)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["-1epochs", -3, "150%", float("nan"), float("inf"), "1e999steps"])
def test_rejects_what_is_out_of_range(text: str | float) -> None:
    with pytest.raises(DurationRangeError):
        Duration.parse(text, "steps")


@pytest.mark.parametrize("text", ["5epochs", "10%", "300s", "0.5epochs", "12steps", "2.5%", "1234567samples"])
def test_text_reads_back_the_same(text: str) -> None:
    duration = Duration.parse(text)
    assert str(duration) == text
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("7steps", 7),
        ("2epochs", 200),
        ("0.25epochs", 25),
        ("640samples", 10),
        ("650samples", 10),
        ("10%", 30),
        ("100%", 300),
        ("0.001epochs", 1),
        ("1samples", 1),
        ("0", 0),
        ("0%", 0),
    ],
)
def test_becomes_steps(text: str, steps: int) -> None:
    assert Duration.parse(text, "epochs").steps(total_steps=300, steps_per_epoch=100, batch_size=64) == steps


@pytest.mark.parametrize(
    ("text", "reason"),
    [("1epochs", "known length"), ("5%", "known length"), ("64samples", "batch size"), ("5m", "wall time")],
)
def test_says_what_a_conversion_lacks(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Duration.parse(text).steps(None, None, None)


def test_a_share_is_told_from_a_number_of_samples() -> None:
    with pytest.raises(ValueError, match=r"expected a whole number of samples; a share is 12\.5%$"):
        Duration.parse("0.125", "samples")


def test_only_a_wall_time_has_seconds() -> None:
    assert Duration.parse("1h30m").seconds == 5400
    with pytest.raises(ValueError, match="wall time"):
        _ = Duration.parse("5steps").seconds
