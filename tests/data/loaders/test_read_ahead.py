"""Reading ahead in a thread: the same batches, one ahead, and no thread left when nobody wants more."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, same_bits, train, weights
from torch.utils.data import Dataset

from ptfast.config.read import read_config
from ptfast.core.errors import ConfigError
from ptfast.data.loaders.loading import read_ahead
from ptfast.report.panel import build_panel


def ahead(batches: Iterator[Any]) -> Any:
    return read_ahead(batches)


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ptfast-read-ahead"]


def test_one_batch_is_read_ahead_and_one_waits_for_room() -> None:
    taken: list[int] = []
    batches = ahead(number for number in itertools.count() if taken.append(number) is None)
    assert next(batches) == 0
    assert until(lambda: len(taken) == 3)
    time.sleep(0.05)
    assert taken == [0, 1, 2]
    batches.close()
    assert readers() == []


def test_it_is_another_thread_that_reads() -> None:
    assert list(ahead(threading.get_ident() for _ in range(2))) != [threading.get_ident()] * 2


def test_it_ends_with_the_last_batch() -> None:
    assert list(ahead(iter(range(5)))) == [0, 1, 2, 3, 4]
    assert list(ahead(iter(()))) == []
    assert readers() == []


def test_what_goes_wrong_is_raised_in_its_turn() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ConfigError("C011", "no more")

    batches = ahead(failing())
    assert next(batches) == 1
    with pytest.raises(ConfigError, match="no more"):
        next(batches)
    assert readers() == []


def test_a_reader_that_is_stuck_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptfast.data.loaders.loading._CLOSE_S", 0.1, raising=False)
    stuck = threading.Event()
    batches = ahead(number for number in range(2) if number == 0 or stuck.wait(20))
    assert next(batches) == 0
    start_s = time.monotonic()
    batches.close()
    assert time.monotonic() - start_s < 10
    stuck.set()
    assert until(lambda: readers() == [])


SMALL = ("steps=12", "model.hidden=[16]", "model.dropout=0.3", "batch_size=128", "augment=crop_flip")


@pytest.mark.parametrize("kind", ["plain", "memory"])
def test_a_run_ends_with_the_same_bits(in_tmp: Path, kind: str) -> None:
    words = (*SMALL, f"dataloader={kind}", "eval.every=5steps")
    assert train(*words, "run.dir=a") == 0
    assert train(*words, "run.dir=b", "dataloader.read_ahead=true") == 0
    assert same_bits(weights(in_tmp / "a"), weights(in_tmp / "b"))
    assert until(lambda: readers() == [])


def test_the_panel_shows_it(tmp_path: Path) -> None:
    words = (*SMALL, "dataloader.read_ahead=true")
    config, run = read_config(words)[1], build_run(tmp_path, *words)
    assert dict(build_panel(dict(config), run)[1])["reading"] == "by a thread, one batch ahead"


class Read(Dataset[Any]):
    """Vectors that are read one by one."""

    num_classes = 2

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), index % 2


def test_samples_that_draw_from_the_generators_of_the_training_are_refused(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=test_read_ahead.Read", "model.hidden=[4]", "steps=2")
    with pytest.raises(ConfigError, match=r"dataloader\.read_ahead=true.*Use dataloader=workers"):
        build_run(tmp_path, *words, "dataloader.read_ahead=true")
