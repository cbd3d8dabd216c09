"""The order of an epoch, computed by a thread while the epoch before it trains."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from test_loaders import BOTH, color, loader

from ptfast.data.build_data import Data
from ptfast.data.sampling.next_epoch import NextEpoch

__all__ = ["color"]


def test_a_thread_computes_the_next_value_once() -> None:
    computed: list[tuple[int, str]] = []

    def square(number: int) -> int:
        computed.append((number, threading.current_thread().name))
        if number == 3:
            raise ValueError("three")
        return number**2

    squares = NextEpoch(square)
    assert squares(1) == 1
    squares.begin(2)
    squares.begin(2)
    assert (squares(2), squares(1)) == (4, 1)
    assert computed == [(1, "MainThread"), (2, "ptfast-next-epoch")]
    squares.begin(3)
    with pytest.raises(ValueError, match="three"):
        squares(3)
    squares.begin(4)
    squares.close()
    assert computed[-1] == (4, "ptfast-next-epoch")
    assert squares._thread is None


def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads, as they start."""
    names: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: names.append(self.name) or start(self))
    return names


@pytest.mark.parametrize(
    ("kind", "augment"), [("plain", BOTH), ("memory", BOTH), ("memory", {}), ("device", BOTH)]
)
def test_epochs_are_prepared_and_no_thread_is_left(
    color: Data, kind: str, augment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five steps each; none that no step reaches, and none before the middle of the one before."""
    names, here = begun(monkeypatch), loader(color, kind, augment=augment)
    here.batches._chunk_steps = 1
    count = []
    for _ in here.steps(0, 15):
        count.append(names.count("ptfast-next-epoch"))
    assert count[:2] == [0, 0]
    assert count[-1] == 2
    here.close()
    assert "ptfast-next-epoch" not in [thread.name for thread in threading.enumerate()]


def test_an_order_that_draws_from_global_generators_is_computed_in_its_turn(
    color: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, here = begun(monkeypatch), loader(color, "plain")
    here.batches._sampler.pure = False
    indices = [here.batches.shares(step)[0][0].indices for step in range(15)]
    assert len(list(here.steps(0, 15))) == 15
    assert names == []
    ahead = loader(color, "plain")
    own = [share.indices for shares, _ in ahead.batches._sampler.steps(0, 15) for share in shares]
    assert all(np.array_equal(one, other) for one, other in zip(indices, own, strict=True))
    assert names == ["ptfast-next-epoch"] * 2
