"""The search for the quickest loader: what is tried, in which order, and what is chosen of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core.machine import available_memory, usable_cores
from ptfast.core.units import duration, num_bytes
from ptfast.launch.launcher import resolve_num_ranks
from ptfast.measure.experiment.laboratory import Laboratory, Measured
from ptfast.measure.experiment.plan import Factor, fit
from ptfast.measure.experiment.verdicts import ALPHA, Effect

RULE = 4
"""Workers of each rank by the rule of thumb, 4 for each GPU."""
LEAST_LIMIT = 16
"""Of workers; more processes than cores pay where samples come from far away."""
CLOSE = 0.03
"""Loaders that differ by no more are as quick; more workers that gain no more have gained nothing."""
NOTHING = 0.02
"""Share of the time spent on waiting that no loader needs to save."""
FINALISTS, NEAR, ROUNDS = 4, 0.85, 4
"""So many of the quickest, within this part of the best, are measured in so many blocks together."""
HOLD_S = 60.0
"""Decoding everything once is not tried where it would take longer."""


class LoaderSetup(NamedTuple):
    """Processes and threads that read, and how far ahead."""

    kind: str
    """As `dataloader.kind`, never `auto`."""
    workers: int = 0
    """Processes of each rank; 0 for kinds without."""
    prefetch: int = 0
    """Micro-batches that each process reads ahead; 0 for kinds without."""
    threads: int = 0
    """Of each process; 0 for kinds without."""
    read_ahead: bool = False
    """A thread prepares the next batch."""

    @property
    def values(self) -> dict[str, Any]:
        """Config values by key, of those that mean something to this kind."""
        found: dict[str, Any] = {"dataloader.kind": self.kind, "dataloader.read_ahead": self.read_ahead}
        if self.workers:
            found |= {
                "dataloader.workers": self.workers,
                "dataloader.prefetch": self.prefetch,
                "backend.worker_threads": self.threads,
            }
        return found

    @property
    def overrides(self) -> list[str]:
        """Words that ask for it."""
        return [f"{key}={str(value).lower()}" for key, value in self.values.items()]

    def label(self, config: Config) -> str:
        """Its kind, and what else differs from `config`, but for the number of workers."""
        words = [self.kind]
        if self.workers and self.prefetch != config.dataloader.prefetch:
            words.append(f"prefetch {self.prefetch}")
        if self.workers and self.threads != config.backend.worker_threads:
            words.append(f"{self.threads} thread" + "s" * (self.threads != 1))
        if self.read_ahead:
            words.append("read ahead")
        return ", ".join(words)


def workers(count: int, config: Config) -> LoaderSetup:
    """`count` worker processes that read as far ahead as `config` says; for 0 this process reads."""
    if not count:
        return LoaderSetup("plain")
    return LoaderSetup("workers", count, config.dataloader.prefetch, config.backend.worker_threads)


PLAIN = LoaderSetup("plain")


class LoaderSearch:
    """Measures loaders in blocks of four processes beside the quickest so far.

    Args:
        most: worker processes of each rank; None for as many as a machine of this size may want.
        on_loader: called with each loader as its first figures are there.
    """

    def __init__(
        self,
        laboratory: Laboratory,
        config: Config,
        arguments: Sequence[str],
        most: int | None = None,
        on_loader: Callable[[LoaderSetup], None] = lambda loader: None,
    ) -> None:
        self.laboratory, self.config, self.arguments = laboratory, config, list(arguments)
        self.most, self._on_loader = most, on_loader
        self.blocks: list[list[tuple[LoaderSetup, Measured]]] = []
        self.failed: dict[LoaderSetup, str] = {}
        """The reasons why loaders cannot be had."""
        self.named: dict[str, LoaderSetup] = {}
        """The loaders that `auto` takes here and that the config asks for."""
        self.data: dict[str, Any] = {}
        """What decides which loaders make sense for the data."""
        self.notes: list[str] = []
        self.chosen = PLAIN

    def run(self) -> None:
        """Measure what may be the quickest loader, and what `auto` and the config would take; choose one."""
        alone, *others = self.laboratory.look(
            [self._words(PLAIN), merge(self.arguments, ["dataloader=auto"]), self.arguments], asks=True
        )
        alone.raise_failure()
        self.data = alone.facts["data"] | {"num_ranks": resolve_num_ranks(self.config)}
        for name, measured in zip(("auto", "configured"), others, strict=True):
            if (resolved := measured.facts.get("resolved")) is not None:
                kind, count = resolved["dataloader"], resolved["workers"]
                found = workers(count, self.config) if kind in ("plain", "workers") else LoaderSetup(kind)
                self.named[name] = found._replace(read_ahead=bool(resolved["read_ahead"]))
        if self.config.dataloader.kind == "auto":
            self.named.pop("configured", None)
        kinds = [LoaderSetup(kind) for kind in self._other_kinds()]
        self.measure(PLAIN, *kinds, *self.named.values())
        if self.figure(PLAIN, "waiting") > NOTHING:
            self._ascend()
            self._refine()
        for _ in range(ROUNDS - 1):
            near = [loader for loader in self.by_speed() if self.ratio(loader) >= NEAR]
            self._block(near[:FINALISTS])
        self.chosen = self.choose()

    def measure(self, *loaders: LoaderSetup) -> None:
        """Measure those that were not measured before."""
        fresh = [one for one in dict.fromkeys(loaders) if one not in self.seen and one not in self.failed]
        while fresh:
            others = [self.best()] if self.blocks else []
            chosen = fresh[: 4 - len(others)]
            self._block([*others, *chosen])
            fresh = fresh[len(chosen) :]
        if PLAIN not in self.seen:
            self.blocks[0][0][1].raise_failure()

    @property
    def seen(self) -> list[LoaderSetup]:
        """Those that have figures, in the order they were measured."""
        return list(dict.fromkeys(one for block in self.blocks for one, run in block if run.time is not None))

    def effects(self, base: LoaderSetup) -> dict[LoaderSetup, Effect]:
        """How much faster each other loader is than one of them."""
        order = [base, *(loader for loader in self.seen if loader != base)]
        factor = Factor("loader", tuple(map(repr, order)))
        blocks: list[Any] = []
        times: list[list[float]] = []
        for block in self.blocks:
            whole = [(order.index(one), run.time) for one, run in block if run.time is not None]
            whole += [(0, math.nan)] * (4 - len(whole))
            blocks.append(tuple((level,) for level, _ in whole))
            times.append([time for _, time in whole])
        found = fit([factor], blocks, times, spare_dof=0).effects
        return {one: effect for one, effect in zip(order[1:], found, strict=True) if effect is not None}

    def by_speed(self) -> list[LoaderSetup]:
        """Those that have figures, the quickest first."""
        effects = self.effects(PLAIN)
        return sorted(
            self.seen, key=lambda one: effects[one].log_ratio if one in effects else 0.0, reverse=True
        )

    def best(self) -> LoaderSetup:
        """The quickest."""
        return self.by_speed()[0]

    def ratio(self, loader: LoaderSetup, base: LoaderSetup | None = None) -> float:
        """Its throughput, as a multiple of that of `base`, or of the quickest."""
        base = base or self.best()
        return 1.0 if loader == base else self.effects(base)[loader].ratio

    def choose(self) -> LoaderSetup:
        """Of those as quick as the quickest, the one of fewest processes, then of least memory."""
        close = [loader for loader in self.seen if self.ratio(loader) >= 1 - CLOSE]
        return min(close, key=lambda one: (one.workers, one.read_ahead, self.figure(one, "memory_bytes")))

    def rivals(self, chosen: LoaderSetup) -> list[LoaderSetup]:
        """Those that may be faster than the chosen one by more than counts, as far as the figures tell."""
        effects, most = self.effects(chosen), 1 / (1 - CLOSE)
        # Each of them has had its chance to look slower than it is.
        level = 1 - ALPHA / max(len(effects), 1)
        return [one for one, effect in effects.items() if effect.interval(level)[1] > most]

    def figure(self, loader: LoaderSetup, name: str) -> float:
        """The median of a figure over the processes of a loader.

        Its `waiting` is the share of the time spent on waiting for data, or on reading it in this process.
        """
        runs = [run.facts for block in self.blocks for one, run in block if one == loader]
        if name == "memory_bytes":
            return statistics.median(facts["memory"][0] for facts in runs if "memory" in facts)
        return statistics.median(facts[name] for facts in runs if name in facts)

    def label(self, loader: LoaderSetup) -> str:
        """Its name in lines of text."""
        label = loader.label(self.config)
        if loader.workers == 1:
            label = label.replace("workers", "worker", 1)
        return f"{loader.workers} {label}" if loader.workers else label

    def _block(self, loaders: Sequence[LoaderSetup]) -> None:
        before = self.seen
        measured = self.laboratory.measure([self._words(loader) for loader in loaders])
        self.blocks.append(list(zip(loaders, measured, strict=True)))
        for loader, run in self.blocks[-1]:
            if run.time is None and loader not in before:
                self.failed[loader] = run.why
            elif loader not in before:
                self._on_loader(loader)

    def _words(self, loader: LoaderSetup) -> list[str]:
        # What grows is measured at its full size.
        return merge(self.arguments, ["curriculum=none", *loader.overrides])

    def _other_kinds(self) -> Iterator[str]:
        """Kinds without workers besides `plain` that may suit this data and device."""
        if self.data["iterable"]:
            self.notes.append("iterable data is read by this process or by workers")
            return
        memory, read_s, why = LoaderSetup("memory"), self.data["read_s"], ""
        if not (self.data["in_memory"] or self.data["repeatable"]):
            why = "samples may differ from epoch to epoch, and would be held as they first are"
        elif read_s > HOLD_S and memory not in self.named.values():
            why = f"decoding everything once would take {duration(read_s)} on one core"
        if why:
            self.failed[memory] = why
        else:
            yield "memory"
            if self.data["device"] == "cuda":
                yield "device"
        if self.data["packed"]:
            yield "packed"

    def _limit(self) -> int:
        cores = usable_cores(hyperthreads=True) // self.data["num_ranks"]
        limit = self.most or max(LEAST_LIMIT, 4 * cores)
        return min(limit, self.data["num_shards"] or limit)

    def _ascend(self) -> None:
        """Double the workers until that gains nothing twice, or memory ends."""
        most, useless = self._limit(), 0
        counts = [*(2**power for power in range(16) if 2**power < most), *([most] if most else [])]
        for start in range(0, len(counts), 2):
            pair = [count for count in counts[start : start + 2] if self._has_room(count)]
            before = math.log(self.ratio(self.best(), PLAIN))
            self.measure(*(workers(count, self.config) for count in pair))
            if len(pair) < 2 and start + 2 < len(counts):
                return
            for count in pair:
                loader = workers(count, self.config)
                if loader in self.failed:
                    return
                speed = math.log(self.ratio(loader, PLAIN))
                useless = 0 if speed > before + CLOSE else useless + 1
                before = max(before, speed)
            if useless >= 2 and max(pair) >= min(RULE, most):
                return

    def _has_room(self, count: int) -> bool:
        """Return False where workers would take more memory than is free, by what others have taken."""
        tried = [loader for loader in self.seen if loader.workers]
        if not tried:
            return True
        largest = max(tried, key=lambda loader: loader.workers)
        plain = self.figure(PLAIN, "memory_bytes")
        each = max(0.0, self.figure(largest, "memory_bytes") - plain) / largest.workers
        # Those of a block are there together.
        needed, free = plain + 2 * each * count, available_memory()
        if needed > free:
            self.notes.append(
                f"{count} workers would take about {num_bytes(plain + each * count)}, "
                f"and {num_bytes(free)} are free"
            )
        return needed <= free

    def _refine(self) -> None:
        """Try what lies beside the best: counts in between, reading further ahead, threads."""
        best, most = self.choose(), self._limit()
        beside: list[LoaderSetup] = []
        if best.workers:
            counts = sorted({round(best.workers * factor) for factor in (0.75, 1.5)})
            beside += [best._replace(workers=count) for count in counts if 0 < count <= most]
            beside.append(best._replace(prefetch=2 * best.prefetch))
            cores = usable_cores(hyperthreads=True) // self.data["num_ranks"]
            if 2 * best.workers <= cores:
                beside.append(best._replace(threads=2 * best.threads))
        if self.data["device"] == "cpu" and (self.data["in_memory"] or self.data["repeatable"]):
            beside.append(best._replace(read_ahead=True))
        self.measure(*beside)
        if self.choose().workers == most and not self.data["num_shards"]:
            self.notes.append(f"more than {most} workers were not tried: --to goes further")
