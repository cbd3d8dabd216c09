"""`ptfast find workers`: the fastest loader during training, with the fewest processes."""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ptfast.config.read import read_config
from ptfast.core.errors import ReportedError
from ptfast.measure.experiment.laboratory import Laboratory, TrialResult
from ptfast.measure.experiment.warm_parent import Request
from ptfast.measure.find import loader_finder
from ptfast.measure.find.loader_finder import PLAIN, LoaderSearch, LoaderSetup

SMALL = ("model=mlp", "model.hidden=[8]")
MEMORY = LoaderSetup("memory")
FILES = {
    "iterable": False,
    "num_shards": None,
    "packed": False,
    "in_memory": False,
    "repeatable": True,
    "read_s": 1.0,
    "device": "cpu",
}
"""Facts of files on a machine without a GPU."""
MB = 2**20
read = functools.cache(read_config)


def of(count: int) -> LoaderSetup:
    return LoaderSetup("workers", count)


class Machine(Laboratory):
    """One on which loaders have the rates that it is told, up to a little noise; no process is started."""

    def __init__(self, rate: Callable[[LoaderSetup], float], auto: LoaderSetup = PLAIN, **data: Any) -> None:
        super().__init__(budget_s=math.inf)
        self.rate, self.auto, self.data = rate, auto, {**FILES, **data}
        self.noise, self.waiting = 0.002, 0.5
        self.ends: dict[LoaderSetup, str] = {}
        """Loaders whose trials fail, and why."""
        self.bytes = lambda loader: 100 * MB
        self._draws = random.Random(0)

    def _request(self, request: Request) -> list[TrialResult]:
        return [self._measured(words, bool(request.timed_s)) for words in request.configs]

    def _measured(self, words: Sequence[str], timed: bool) -> TrialResult:
        _, config = read(tuple(words))
        section = config.dataloader
        loader = LoaderSetup(section.kind)
        if loader.kind == "auto":
            loader = self.auto
        elif loader.kind == "workers":
            loader = loader._replace(workers=section.workers)
        if loader in self.ends:
            return TrialResult(
                tuple(words), math.nan, self.ends[loader], {"line": f"ptfast: {self.ends[loader]}"}
            )
        choices = {"dataloader.kind": loader.kind, "dataloader.workers": loader.workers}
        rate = self.rate(loader)
        metrics = {"samples_per_s": rate, "waiting": self.waiting, "memory": (self.bytes(loader), "PSS")}
        time = -math.log(rate) + self._draws.gauss(0, self.noise)
        facts = {"choices": choices, "data": self.data, **metrics}
        return TrialResult(tuple(words), time if timed else math.nan, "", facts)


def searched(machine: Machine, most: int | None = None, words: tuple[str, ...] = SMALL) -> LoaderSearch:
    """The search on such a machine."""
    search = LoaderSearch(machine, read(words)[1], words, most)
    search.run()
    return search


def tried(search: LoaderSearch) -> list[int]:
    return sorted({loader.workers for loader in search.seen if loader.workers})


def slow(loader: LoaderSetup) -> float:
    """Each worker reads 50 samples a second, and the training takes 390 at most."""
    return min(390.0, 50.0 * max(1, loader.workers))


def fast(loader: LoaderSetup) -> float:
    """Handing over costs more than reading."""
    return 1000.0 if loader.kind == "plain" else 600.0


def test_slow_data_gets_as_many_workers_as_gain_something() -> None:
    search = searched(Machine(slow, repeatable=False))
    assert search.chosen == of(8)
    assert tried(search) == [1, 2, 4, 6, 8, 12, 16]


def test_fast_data_gets_none() -> None:
    search = searched(Machine(fast))
    assert search.chosen == PLAIN
    assert tried(search) == [1, 2, 4]
    assert searched(Machine(fast), most=2).chosen == PLAIN


def test_the_quickest_kind_wins() -> None:
    assert searched(Machine(lambda one: 5000.0 if one.kind == "memory" else slow(one))).chosen == MEMORY


def test_of_loaders_as_quick_the_fewest_processes_are_taken() -> None:
    machine = Machine(lambda loader: 100 + 0.1 * loader.workers)
    assert searched(machine, 8).chosen == PLAIN
    machine = Machine(lambda loader: 100.0)
    machine.bytes = lambda loader: (90 if loader.kind == "memory" else 100) * MB
    assert searched(machine, 8).chosen == MEMORY


def test_what_no_loader_can_save_is_not_looked_for() -> None:
    machine = Machine(slow)
    machine.waiting = 0.01
    search = searched(machine)
    assert search.chosen == PLAIN
    assert not tried(search)
    assert search.notes[-1].startswith("without workers, 1.0% of the time goes to reading")


def test_what_lies_beside_the_best_is_tried() -> None:
    search = searched(Machine(lambda one: slow(one) + 200 * (one.workers == 6)))
    assert search.chosen == of(6)


def test_no_more_are_tried_than_allowed() -> None:
    search = searched(Machine(lambda loader: 50.0 * loader.workers + 1), 5)
    assert search.chosen.workers == 5
    assert max(tried(search)) == 5
    assert "more than 5 workers were not tried: raise --to to go further" in search.notes
    search = searched(Machine(slow, iterable=True, repeatable=False, num_shards=3))
    assert tried(search) == [1, 2, 3]
    assert not search.failed


def test_the_search_ends_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_finder, "available_memory", lambda: 2000 * MB)
    machine = Machine(slow, repeatable=False)
    machine.bytes = lambda loader: (100 + 200 * loader.workers) * MB
    search = searched(machine)
    assert max(tried(search)) <= 6
    assert "8 workers would take about 1.7 GiB, and 2.0 GiB are free" in search.notes


def test_a_trial_that_dies_is_named_and_survived() -> None:
    machine = Machine(slow, repeatable=False)
    machine.ends = dict.fromkeys((of(4), of(8)), "ran out of memory")
    search = searched(machine)
    assert search.failed[of(4)] == "ran out of memory"
    assert search.chosen == of(3)
    machine.ends = {PLAIN: "data.root: is not there"}
    with pytest.raises(ReportedError, match="is not there"):
        searched(machine)


def test_kinds_that_this_data_cannot_have_are_named() -> None:
    assert "cached as first read" in searched(Machine(slow, repeatable=False)).failed[MEMORY]
    search = searched(Machine(slow, read_s=720.0))
    assert search.failed[MEMORY] == "decoding everything once would take 12m 00s on one core"
    assert MEMORY in searched(Machine(slow, read_s=720.0, auto=MEMORY)).seen


def test_auto_the_config_and_the_rule_of_thumb_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "dataloader=workers", "dataloader.workers=5")
    search = searched(Machine(fast, auto=of(3)), words=words)
    loader_finder._show(search)
    marks = dict(re.findall(r"^(plain|\d workers) .*MiB *(.*)$", capsys.readouterr().out, re.MULTILINE))
    assert marks["5 workers"] == "as configured"
    assert marks["3 workers"] == "auto"
    assert marks["4 workers"] == "4 x GPUs"
    assert marks["plain"] == "chosen"


def test_what_is_written_is_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "dataloader.workers=5", "dataloader.prefetch=3")
    three = of(3)
    search = searched(Machine(lambda one: 900.0 if one == three else fast(one)), words=words)
    search.measure(MEMORY, three)
    for name, chosen in {"a": MEMORY, "b": PLAIN, "c": three}.items():
        search.chosen = chosen
        loader_finder._write(Path(f"{name}.yaml"), search)
        _, config = read_config([f"recipe=./{name}.yaml"])
        assert config.dataloader.kind == chosen.kind
        assert config.model.target.kwargs["hidden"] == [8]
        _, tried = read_config(search._words(chosen))
        assert tried.dataloader.kind == chosen.kind
        if chosen.workers:
            assert config.dataloader.workers == 3
            assert config.dataloader.prefetch == tried.dataloader.prefetch == 3
        else:
            assert config.dataloader.workers == "auto"
