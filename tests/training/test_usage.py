"""Memory and processors that a run keeps busy, for its log lines."""

from __future__ import annotations

import pytest
import torch

from ptfast.training.loop import loss_accumulator


def test_a_share_of_busy_time_is_one_of_a_second_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"perf_counter": 10.0, "processor_time_s": 3.0}
    monkeypatch.setattr(loss_accumulator.time, "perf_counter", lambda: now["perf_counter"])
    monkeypatch.setattr(loss_accumulator, "processor_time_s", lambda: now["processor_time_s"])
    used = loss_accumulator.Usage("cpu", pytest.fail)
    now |= {"perf_counter": 10.9, "processor_time_s": 4.0}
    assert used.measure() == {}
    now |= {"perf_counter": 12.0, "processor_time_s": 6.0}
    figures = used.measure()
    assert figures["cpu_cores"] == 1.5
    assert figures["memory_bytes"] > 0
    assert used.measure() == {}


@pytest.mark.parametrize(("reason", "lines"), [(Exception("Not Supported"), 1), (ImportError("pynvml"), 0)])
def test_a_figure_that_cannot_be_had_is_asked_for_once(
    reason: Exception, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is not installed needs no line."""
    asked, warnings = [], []

    def utilization() -> int:
        asked.append(1)
        raise reason

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    monkeypatch.setattr(loss_accumulator, "LEAST_S", 0.0)
    used = loss_accumulator.Usage("cuda", warnings.append)
    assert [*used.measure()] == [*used.measure()] == ["cpu_cores", "memory_bytes"]
    assert len(asked) == 1
    assert warnings == ["gpu_use is not logged: Exception: Not Supported"][:lines]
