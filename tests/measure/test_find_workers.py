"""`ptfast find workers`: the quickest loader beside the training, by the fewest processes."""

from __future__ import annotations

import functools
import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ptfast.config.overrides import merge
from ptfast.config.read import read_config
from ptfast.core.errors import MachineError, ReportedError
from ptfast.measure.loader import loader_finder, loader_search
from ptfast.measure.loader.loader_candidate import Loader
from ptfast.measure.loader.loader_search import LoaderSearch, search_loaders
from ptfast.measure.trials import search as trial_search
from ptfast.measure.trials.comparison import Arm
from ptfast.measure.trials.verdicts import Effect, judge

SMALL = ("model=mlp", "model.hidden=[8]")
PLAIN, MEMORY, AHEAD = Loader("plain"), Loader("memory"), Loader("plain", read_ahead=True)
FILES = {
    "iterable": False,
    "packed": False,
    "in_memory": False,
    "repeatable": True,
    "num_samples": 10_000,
    "read_s": 1.0,
    "device": "cpu",
    "auto": ["workers", 3],
}
"""Facts of files on a machine without a GPU."""
MB = 2**20


def of(count: int, **other: Any) -> Loader:
    return Loader("workers", count, 2, 1)._replace(**other)


class Machine:
    """One on which loaders have the rates that it is told, and children end as it is told."""

    def __init__(self, rate: Callable[[Loader], float], **facts: Any) -> None:
        self.rate, self.facts = rate, {**FILES, **facts}
        self.ends: dict[Loader, BaseException | int | str] = {}
        """Loaders of children that raise, are killed by a signal, or have no room."""
        self.bytes = lambda loader: 100 * MB
        self.waiting = 0.5
        self.tried: list[Loader] = []

    def measure_once(self, *arguments: Any) -> tuple[list[dict[str, Any]], int | None]:
        loader, asks = arguments[4]["loader"], arguments[4]["asks"]
        self.tried.append(loader)
        end = self.ends.get(loader)
        if isinstance(end, BaseException):
            raise end
        if isinstance(end, int):
            return [], end
        result: dict[str, Any] = {"loader": [*loader]}
        if isinstance(end, str):
            return [{**result, "no_room": end}], None
        rate = self.rate(loader)
        result |= {"samples_per_s": rate, "low": rate, "high": rate, "waiting": self.waiting}
        result |= {"ready_s": 1.0, "memory_bytes": self.bytes(loader), "memory_kind": "PSS", "samples": 100}
        return [result | ({"facts": self.facts} if asks else {})], None


class Pairs:
    """A session in which so many workers are so many times as fast as the base; others end it."""

    def __init__(self, ratios: dict[int, float]) -> None:
        self.ratios = {f"{count} workers": ratio for count, ratio in ratios.items()}
        self.bases: set[str] = set()

    def prepare(self, base: Arm, other: Arm) -> None:
        self.bases.add(base.name)
        if other.name not in self.ratios:
            raise ReportedError("ptfast: error[P001]: gone", 7)

    def compare(self, base: Arm, other: Arm, *, seconds: float) -> Any:
        effect = Effect(math.log(self.ratios[other.name]), 0.01, 9)
        return SimpleNamespace(effect=effect, verdict=judge([effect])[0], why="")


read = functools.cache(read_config)


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoaderSearch]:
    """The search on such a machine."""

    def on(machine: Machine, most: int | None = None, words: tuple[str, ...] = SMALL) -> LoaderSearch:
        monkeypatch.setattr(trial_search, "measure_once", machine.measure_once)
        search = LoaderSearch(*read(words), tmp_path, 0.1)
        search_loaders(search, most)
        return search

    return on


def tried(search: LoaderSearch) -> list[int]:
    return sorted({loader.workers for loader in search.seen if loader.workers})


def slow(loader: Loader) -> float:
    """Each reader gets 50 samples a second, and the training takes 390 at most."""
    return min(390.0, 50.0 * max(1, loader.workers))


def fast(loader: Loader) -> float:
    """Handing over costs more than reading."""
    return 1000.0 if loader.kind == "plain" else 600.0


def test_slow_data_gets_as_many_workers_as_gain_something(searched: Callable[..., LoaderSearch]) -> None:
    search = searched(Machine(slow, repeatable=False))
    assert search.best() == of(8)
    assert tried(search) == [1, 2, 3, 4, 6, 8, 12, 16]


def test_fast_data_gets_none(searched: Callable[..., LoaderSearch]) -> None:
    search = searched(Machine(fast, auto=["plain", 0]))
    assert search.best() == PLAIN
    assert tried(search) == [1, 2, 4]


def test_the_quickest_kind_wins(searched: Callable[..., LoaderSearch]) -> None:
    search = searched(Machine(lambda loader: 5000.0 if loader.kind == "memory" else slow(loader)))
    assert search.best() == MEMORY
    search = searched(Machine(lambda loader: 5000.0 if loader.read_ahead else slow(loader)))
    assert search.best().read_ahead


def test_of_loaders_as_quick_the_fewest_processes_are_taken(searched: Callable[..., LoaderSearch]) -> None:
    machine = Machine(lambda loader: 100 + 0.1 * loader.workers + loader.read_ahead)
    assert searched(machine, 8).best() == PLAIN
    machine = Machine(lambda loader: 100.0)
    machine.bytes = lambda loader: (90 if loader.kind == "memory" else 100) * MB
    assert searched(machine, 8).best() == MEMORY


def test_what_no_loader_can_save_is_not_looked_for(searched: Callable[..., LoaderSearch]) -> None:
    machine = Machine(slow, auto=["plain", 0])
    machine.waiting = 0.01
    search = searched(machine)
    assert search.best() == PLAIN
    assert machine.tried == [PLAIN, MEMORY, *map(of, (1, 2, 4, 8, 16))]
    remarks = [*loader_finder._remarks(search, PLAIN)]
    assert remarks[0].startswith("without workers 1.0% of the time goes to reading")


@pytest.mark.parametrize(
    ("ratios", "chosen"),
    [({2: 1.1, 4: 1.11}, 2), ({2: 1.05, 4: 1.11}, 4), ({2: 1.1, 4: 0.9}, 2), ({2: 1.01, 4: 1.01}, 3)],
)
def test_what_auto_takes_is_kept_where_nothing_is_faster_in_pairs(
    ratios: dict[int, float], chosen: int, searched: Callable[..., LoaderSearch]
) -> None:
    rates = {of(2): 950.0, of(3): 920.0, of(4): 1000.0}
    search = searched(Machine(lambda loader: rates.get(loader, 500.0), repeatable=False), 4)
    session: Any = Pairs(ratios)
    assert search.choose(session) == of(chosen)
    assert session.bases == {"3 workers"}
    assert {*search.compared} == {of(2), of(4)}
    said = "".join(loader_finder._remarks(search, of(chosen)))
    assert f"4 workers against 3 workers, in pairs: {ratios[4]:.2f}x [" in said


def test_where_auto_is_clearly_slower_the_best_is_to_be_beaten(searched: Callable[..., LoaderSearch]) -> None:
    rates = {of(2): 950.0, of(3): 500.0, of(4): 1000.0}
    search = searched(Machine(lambda loader: rates.get(loader, 500.0), repeatable=False), 4)
    for ratios, chosen in (({2: 1.01}, 4), ({2: 1.1}, 2), ({}, 4)):
        session: Any = Pairs(ratios)
        search.compared.clear()
        assert search.choose(session) == of(chosen)
        assert session.bases == {"4 workers"}
    assert search.notes[-1] == "could not be compared: ptfast: error[P001]: gone"


def test_so_it_is_where_reading_takes_next_to_no_time(searched: Callable[..., LoaderSearch]) -> None:
    """Nothing is waited for without workers, and yet 7 % less was measured than with what `auto` takes."""
    machine = Machine(lambda loader: 1000.0 if loader == MEMORY else 930.0, auto=["memory", 0])
    machine.waiting = 0.01
    search, session = searched(machine), Pairs({})
    assert search.best() == PLAIN
    assert search.choose(session) == MEMORY  # pyright: ignore[reportArgumentType]
    assert not session.bases


def test_what_lies_beside_the_best_is_tried(searched: Callable[..., LoaderSearch]) -> None:
    machine = Machine(lambda loader: slow(loader) + 20 * (loader.prefetch == 4) + (loader.workers == 6) * 200)
    search = searched(machine)
    assert search.best() == of(6, prefetch=4)
    assert of(6, prefetch=4, read_ahead=True) in search.seen
    assert len(machine.tried) == len({*machine.tried})


def test_no_more_are_tried_than_allowed(searched: Callable[..., LoaderSearch]) -> None:
    search = searched(Machine(lambda loader: 50.0 * loader.workers + 1, auto=["plain", 0]), 5)
    assert tried(search) == [1, 2, 4, 5]
    assert search.best().workers == 5
    assert "more than 5 workers were not tried: --to goes further" in search.notes
    shared = {"iterable": True, "num_shards": 3, "auto": ["workers", 2]}
    assert tried(searched(Machine(slow, **shared))) == [1, 2, 3]


def test_the_search_ends_with_the_memory(
    searched: Callable[..., LoaderSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_search, "available_memory", lambda: 1000 * MB)
    machine = Machine(slow, repeatable=False, auto=["plain", 0])
    machine.bytes = lambda loader: (100 + 200 * loader.workers) * MB
    search = searched(machine)
    assert tried(search) == [1, 2, 3, 4]
    assert "8 workers would take about 1.7 GiB, and 1.0 GiB are free" in search.notes


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("cannot allocate memory", "does not fit: cannot allocate memory"),
        (signal.SIGKILL.value, "was ended by SIGKILL"),
        (ReportedError("ptfast: error[D008]: data: cannot be sent.", 3), "data: cannot be sent."),
    ],
)
def test_a_trial_that_dies_is_named_and_survived(
    end: Any, why: str, searched: Callable[..., LoaderSearch]
) -> None:
    machine = Machine(slow, repeatable=False, auto=["plain", 0])
    machine.ends = {of(4): end}
    search = searched(machine)
    assert why in search.failed[of(4)]
    assert max(tried(search)) == 3
    assert search.best() == of(3)


def test_without_workers_it_has_to_fit(searched: Callable[..., LoaderSearch]) -> None:
    machine = Machine(slow)
    machine.ends = {PLAIN: "out of memory"}
    with pytest.raises(MachineError, match=r"out of memory.*smaller batch_size"):
        searched(machine)
    machine.ends = {PLAIN: ReportedError("ptfast: error[D001]: data.root: is not there", 3)}
    with pytest.raises(ReportedError, match="is not there"):
        searched(machine)


def test_kinds_that_this_data_cannot_have_are_named(searched: Callable[..., LoaderSearch]) -> None:
    search = searched(Machine(slow, repeatable=False))
    assert search.failed[Loader("packed")] == "only image folders and text files are packed"
    assert "held as they first are" in search.failed[MEMORY]
    assert AHEAD not in search.seen
    search = searched(Machine(slow, read_s=720.0))
    assert search.failed[MEMORY] == "decoding everything once would take 12m 00s on one core"
    assert MEMORY in searched(Machine(slow, read_s=720.0, auto=["memory", 0])).seen
    search = searched(Machine(slow, iterable=True, num_shards=None))
    assert {loader.kind for loader in [*search.seen, *search.failed]} == {"plain", "workers"}


def test_auto_the_config_and_the_rule_of_thumb_are_marked(searched: Callable[..., LoaderSearch]) -> None:
    words = (*SMALL, "dataloader=workers", "dataloader.workers=5", "dataloader.prefetch=3")
    search = searched(Machine(fast, configured=["workers", 5]), words=words)
    five = Loader("workers", 5, 3, 1)
    marks = loader_finder._marks(search, PLAIN)
    assert marks[five] == "as configured"
    assert marks[five._replace(workers=3)] == "auto"
    assert marks[five._replace(workers=4)] == "4 x GPUs"
    assert marks[PLAIN] == "chosen"
    assert set(marks) <= {*search.seen}


def test_what_is_written_is_what_was_measured(
    searched: Callable[..., LoaderSearch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "dataloader.workers=5", "dataloader.read_ahead=true", "backend.worker_threads=2")
    search = searched(Machine(fast), words=words)
    for name, chosen in {"a": AHEAD, "b": PLAIN, "c": of(3, threads=2)}.items():
        loader_finder._write(Path(f"{name}.yaml"), words, search, chosen)
        _, config = read_config([f"+recipe=./{name}.yaml"])
        assert config.dataloader.kind == chosen.kind
        assert config.dataloader.read_ahead == chosen.read_ahead
        assert config.model.target.kwargs["hidden"] == [8]
        _, arm = read_config(merge(words, chosen.overrides))
        tried = chosen.on(search.config)
        assert (arm.dataloader, arm.backend) == (tried.dataloader, tried.backend)
        if chosen.workers:
            assert (config.dataloader.workers, config.dataloader.prefetch) == (3, 2)
            assert config.backend.worker_threads == 2
        else:
            assert config.dataloader.workers == "auto"
