"""Memory and processors that a run keeps busy, for its log lines."""

from __future__ import annotations

import pytest

from ptfast.training.step_parts import usage


def test_a_share_of_busy_time_is_one_of_a_second_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"perf_counter": 10.0, "processor_time_s": 3.0}
    monkeypatch.setattr(usage.time, "perf_counter", lambda: now["perf_counter"])
    monkeypatch.setattr(usage, "processor_time_s", lambda: now["processor_time_s"])
    used = usage.Usage("cpu")
    now |= {"perf_counter": 10.9, "processor_time_s": 4.0}
    assert used.look() == {}
    now |= {"perf_counter": 12.0, "processor_time_s": 6.0}
    figures = used.look()
    assert figures["cpu_cores"] == 1.5
    assert figures["memory_bytes"] > 0
    assert used.look() == {}
