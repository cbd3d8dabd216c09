"""`ptfast find workers`: find the loader with the highest training throughput, and its memory use."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core.errors import EXIT_OK
from ptfast.core.machine import available_memory, usable_cores
from ptfast.core.units import counted, duration, grouped, num_bytes
from ptfast.launch.launcher import resolve_world_size
from ptfast.measure.experiment.laboratory import Laboratory, TrialResult
from ptfast.measure.experiment.plan import compare
from ptfast.measure.experiment.verdicts import Effect
from ptfast.measure.outputs import check_outputs, label, write_recipe, write_results
from ptfast.report.terminal.display import say, table

RULE = 4
"""Workers per rank by the rule of thumb, 4 per GPU."""
LEAST_LIMIT = 16
"""Lowest limit on workers; more processes than cores pay off if samples come from a remote store."""
CLOSE = 0.03
"""Loaders that differ by at most this fraction are equally fast."""
NOTHING = 0.02
"""Smallest share of waiting time that is worth reducing."""
FINALISTS, NEAR, ROUNDS = 4, 0.85, 4
"""Number of the fastest loaders, within this fraction of the best, to compare in this many blocks."""
DECODE_ALL_S = 60.0
"""Longest time allowed to decode everything once."""
TURNS = 4


class LoaderSetup(NamedTuple):
    """A loader to measure; all other settings come from the config."""

    kind: str
    """A value of `dataloader.kind`, but never `auto`."""
    workers: int = 0
    """Worker processes per rank; 0 for kinds without workers."""

    def __str__(self) -> str:
        return counted(self.workers, "worker") if self.workers else self.kind

    @property
    def values(self) -> dict[str, Any]:
        """Config values by key."""
        workers = {"dataloader.workers": self.workers} if self.workers else {}
        return {"dataloader.kind": self.kind, **workers}

    @property
    def words(self) -> list[str]:
        """The overrides that select this loader."""
        return [f"{key}={value}" for key, value in self.values.items()]


PLAIN = LoaderSetup("plain")


def find_workers(
    config: Config,
    arguments: Sequence[str],
    *,
    most: int | None = None,
    seconds: float = 2.0,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Measure loaders against each other, each in a separate process, and report the fastest.

    Loaders are compared by training throughput, because training uses the same cores as loading.

    Args:
        most: maximum number of worker processes per rank.
        seconds: how long each process is measured.

    Raises:
        ReportedError: training without workers fails.
    """
    check_outputs(out, write)
    with Laboratory(budget_s=math.inf, timed_s=seconds, turn_s=seconds / TURNS) as laboratory:
        search = LoaderSearch(laboratory, config, arguments, most)
        say(f"measuring loaders while training, {seconds:g} s each")
        search.run()
    _show(search)
    chosen, effects = search.chosen._asdict(), search.effects(search.best)
    facts = {
        "chosen": {**chosen, "samples_per_s": search.median(search.chosen, "samples_per_s")},
        **{name: loader._asdict() for name, loader in search.named.items()},
        "best": search.best._asdict(),
        "over_best": [{**one._asdict(), **effect.record()} for one, effect in effects.items()],
        "notes": search.notes,
        "blocks": [
            [{**one._asdict(), "loader": str(one), **run.record()} for one, run in block]
            for block in search.blocks
        ],
        "failed": {str(loader): why for loader, why in search.failed.items()},
        "data": search.data,
    }
    write_results("find-workers", out, config, facts, "workers.json")
    if write is not None:
        _write(write, search)
    return EXIT_OK


class LoaderSearch:
    """Measures loaders in blocks of four processes, against the fastest so far."""

    def __init__(
        self, laboratory: Laboratory, config: Config, arguments: Sequence[str], most: int | None = None
    ) -> None:
        self.laboratory, self.config, self.arguments = laboratory, config, list(arguments)
        self.most = most or 0
        self.blocks: list[list[tuple[LoaderSetup, TrialResult]]] = []
        self.seen: dict[LoaderSetup, list[dict[str, Any]]] = {}
        """Metrics of the processes of each loader, in the order of measurement."""
        self.failed: dict[LoaderSetup, str] = {}
        """Reasons why loaders have no metrics."""
        self.named: dict[str, LoaderSetup] = {}
        """The loader that `auto` selects here, and the loader of the config."""
        self.data: dict[str, Any] = {}
        self.notes: list[str] = []
        self.best = self.chosen = PLAIN

    def run(self) -> None:
        """Measure the promising loaders, the loader of `auto` and the loader of the config; choose one."""
        configs = [self._words(PLAIN), merge(self.arguments, ["dataloader=auto"]), self.arguments]
        alone, *others = self.laboratory.try_configs(configs, asks=True)
        alone.raise_failure()
        self.data = alone.facts["data"] | {"world_size": resolve_world_size(self.config)}
        cores_per_rank = usable_cores(hyperthreads=True) // self.data["world_size"]
        self.most = self.most or max(LEAST_LIMIT, 4 * cores_per_rank)
        self.most = min(self.most, self.data["num_shards"] or self.most)
        for name, measured in zip(("auto", "configured"), others, strict=True):
            if (choices := measured.facts.get("choices")) is not None:
                kind, count = choices["dataloader.kind"], choices["dataloader.workers"]
                reads = kind in ("plain", "workers")
                self.named[name] = self.workers(count) if reads else LoaderSetup(kind)
        if self.config.dataloader.kind == "auto":
            self.named.pop("configured", None)
        self.measure(PLAIN, *self._other_kinds(), *self.named.values())
        if PLAIN not in self.seen:
            self.blocks[0][0][1].raise_failure()
        if (share := self.median(PLAIN, "waiting")) > NOTHING:
            self._ascend()
            self._refine()
        else:
            self.notes.append(
                f"without workers, {share:.1%} of the time goes to reading, so no loader can save more"
            )
        for _ in range(ROUNDS - 1):
            # At least two: their common blocks show the variation between processes of one loader.
            ranked = enumerate(self.ratios(self.best).items())
            near = [loader for rank, (loader, ratio) in ranked if ratio >= NEAR or rank < 2]
            self._measure_block(near[:FINALISTS])
        self.chosen = self.choose()
        if (world_size := self.data["world_size"]) > 1:
            self.notes.append(f"workers per rank, for {world_size} ranks; samples over all ranks")

    def workers(self, count: int) -> LoaderSetup:
        """Return a setup with `count` workers, or without workers if it is 0."""
        return LoaderSetup("workers", count) if count else PLAIN

    def measure(self, *loaders: LoaderSetup) -> None:
        """Measure the loaders that have not been measured yet."""
        fresh = [one for one in dict.fromkeys(loaders) if one not in self.seen and one not in self.failed]
        while fresh:
            base = [self.best] if self.blocks else []
            count = 4 - len(base)
            self._measure_block([*base, *fresh[:count]])
            fresh = fresh[count:]

    def _measure_block(self, loaders: Sequence[LoaderSetup]) -> None:
        measured = self.laboratory.measure([self._words(loader) for loader in loaders])
        self.blocks.append(list(zip(loaders, measured, strict=True)))
        for loader, run in self.blocks[-1]:
            if not run.why:
                facts = run.facts | {"memory_bytes": run.facts["memory"][0]}
                self.seen.setdefault(loader, []).append(facts)
                if len(self.seen[loader]) == 1:
                    rate, waiting = grouped(facts["samples_per_s"]), facts["waiting"]
                    say(f"  {loader!s:<24} {rate:>7} samples/s  {waiting:>4.0%} waiting")
            elif loader not in self.seen:
                self.failed[loader] = run.why
        self.best = next(iter(self.ratios(PLAIN)))

    def _words(self, loader: LoaderSetup) -> list[str]:
        # Inputs that grow during training are measured at their full size.
        return merge(self.arguments, ["curriculum=none", *loader.words])

    def effects(self, base: LoaderSetup) -> dict[LoaderSetup, Effect]:
        """Return the speed-up of each other loader over `base`."""
        return compare(base, [[(one, run.time) for one, run in block] for block in self.blocks])[0]

    def ratios(self, base: LoaderSetup) -> dict[LoaderSetup, float]:
        """Return the throughput of loaders relative to `base`, the fastest first."""
        found = {base: 1.0} | {loader: effect.ratio for loader, effect in self.effects(base).items()}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def choose(self) -> LoaderSetup:
        """Return the loader with the fewest processes, then the least memory, among the fastest."""
        ratios = self.ratios(self.best)
        close = [loader for loader in self.seen if ratios.get(loader, 0.0) >= 1 - CLOSE]
        return min(close, key=lambda one: (one.workers, self.median(one, "memory_bytes")))

    def median(self, loader: LoaderSetup, name: str) -> float:
        """Return the median of a metric over the processes of a loader."""
        return statistics.median(facts[name] for facts in self.seen[loader])

    def _other_kinds(self) -> Iterator[LoaderSetup]:
        """Yield the kinds without workers, except `plain`, that may suit this data and device."""
        if self.data["iterable"]:
            return
        memory, read_s = LoaderSetup("memory"), self.data["read_s"]
        if not (self.data["in_memory"] or self.data["repeatable"]):
            why = "samples may differ from epoch to epoch, but would be cached as first read"
            self.failed[memory] = why
        elif read_s > DECODE_ALL_S and memory not in self.named.values():
            self.failed[memory] = f"decoding everything once would take {duration(read_s)} on one core"
        else:
            yield memory
            if self.data["device"] == "cuda":
                yield LoaderSetup("device")
        if self.data["packed"]:
            yield LoaderSetup("packed")

    def _ascend(self) -> None:
        """Double the workers, three counts in a block, until a block gains nothing or memory runs out."""
        counts = [*(2**power for power in range(16) if 2**power < self.most), self.most]
        for start in range(0, len(counts), 3):
            loaders = [self.workers(count) for count in counts[start : start + 3] if self._has_room(count)]
            before = self.best
            self.measure(*loaders)
            gain = self.ratios(before)[self.best]
            if len(loaders) < 3 or gain <= 1 + CLOSE or self.failed.keys() & set(loaders):
                return

    def _has_room(self, count: int) -> bool:
        """Return True if `count` workers fit in free memory, judging by the workers measured so far."""
        plain = self.median(PLAIN, "memory_bytes")
        of_one = [
            (self.median(one, "memory_bytes") - plain) / one.workers for one in self.seen if one.workers
        ]
        added = count * max([0.0, *of_one])
        # The other loaders of a block, with fewer workers, run at the same time.
        if plain + 2 * added <= (free := available_memory()):
            return True
        taken = num_bytes(plain + added)
        self.notes.append(f"{count} workers would take about {taken}, and {num_bytes(free)} are free")
        return False

    def _refine(self) -> None:
        """Try worker counts between those already measured."""
        between = sorted({round(self.choose().workers * factor) for factor in (0.75, 1.5)})
        self.measure(*(self.workers(count) for count in between if 0 < count <= self.most))
        if self.choose().workers == self.most and not self.data["num_shards"]:
            self.notes.append(f"more than {self.most} workers were not tried: raise --to to go further")


def _show(search: LoaderSearch) -> None:
    effects = search.effects(search.best)
    marks: dict[LoaderSetup, list[str]] = {search.chosen: ["chosen"]}
    for name, loader in {**search.named, "4 x GPUs": search.workers(RULE)}.items():
        marks.setdefault(loader, []).append("as configured" if name == "configured" else name)
    rows: list[list[str]] = []
    for loader in sorted(search.seen, key=lambda one: (one.workers, one != PLAIN, one.kind)):
        effect = effects.get(loader)
        rows.append(
            [
                str(loader),
                f"{search.median(loader, 'samples_per_s'):,.0f}",
                f"{effect.ratio if effect else 1:.2f}",
                "{:.2f}-{:.2f}".format(*effect.interval()) if effect else "",
                f"{search.median(loader, 'waiting'):.0%}",
                num_bytes(int(search.median(loader, "memory_bytes"))),
                ", ".join(marks.get(loader, [])),
            ]
        )
    _, memory_kind = search.seen[search.best][0]["memory"]
    headers = ["loader", "samples/s", "of the best", "95 %", "waiting", f"memory ({memory_kind})", ""]
    say()
    table(headers, rows, optional=["waiting"])
    failed = (f"not measured: {loader!s} ({why})" for loader, why in search.failed.items())
    for line in [*failed, *search.notes]:
        say(line)
    rate = search.median(search.chosen, "samples_per_s")
    say(f"\nchosen: {' '.join(search.chosen.words)} at {rate:,.0f} samples/s")


def _write(file: Path, search: LoaderSearch) -> None:
    """Write a recipe with the chosen loader instead of the one in the arguments."""
    own = tuple(f"{key}=" for key in LoaderSetup("workers", 1).values)
    others = [word for word in search.arguments if not word.lstrip("+").startswith(own)]
    rate, memory = (search.median(search.chosen, name) for name in ("samples_per_s", "memory_bytes"))
    comment = [f"Loader for {label(search.config)}, found by ptfast find workers"]
    comment += [f"{search.chosen!s}: {rate:,.0f} samples/s in {num_bytes(int(memory))}."]
    write_recipe(file, others, search.chosen.values, comment)
