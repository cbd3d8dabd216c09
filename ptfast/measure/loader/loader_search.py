"""The search for the quickest loader: what is tried, in which order, and what is chosen of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptfast.config.checks.rules import across_keys
from ptfast.config.compose import Composed
from ptfast.config.schema import Config
from ptfast.core.errors import MachineError, PtfastError, ReportedError
from ptfast.core.machine import available_memory, memory_limit, usable_cores
from ptfast.core.units import duration, grouped, num_bytes
from ptfast.measure.loader.loader_candidate import Loader, workers
from ptfast.measure.trials.comparison import Arm, Comparison
from ptfast.measure.trials.search import FINALISTS, TIE, Search
from ptfast.measure.trials.session import Session
from ptfast.measure.trials.trial_process import reason

RULE = 4
"""Workers of each rank by the rule of thumb, 4 for each GPU."""
LEAST_LIMIT = 16
"""Of workers; more processes than cores pay where samples come from far away."""
GAIN = 0.03
"""More workers that gain no more than this have gained nothing; after two such counts the search ends."""
NOTHING = 0.02
"""Share of the time spent on waiting that no loader needs to save."""
NEAR = 0.9
"""Part of the best throughput from which on a loader is compared in pairs."""
PAIRED = 20
"""Times as long as a loader is measured may comparing two of them take."""
HOLD_S = 60.0
"""Decoding everything once is not tried where it would take longer."""


class LoaderSearch(Search[Loader]):
    """Measures loaders, of which data and machine allow only some."""

    def __init__(self, composed: Composed, config: Config, folder: Path, seconds: float) -> None:
        super().__init__(composed, config, folder, seconds)
        self.failed: dict[Loader, str] = {}
        """The reasons why loaders cannot be had."""
        self.facts: dict[str, Any] = {}
        """Properties of the data, from the first trial."""
        self.compared: dict[Loader, Comparison] = {}
        """Paired trials of the quickest against `base`."""
        self.notes: list[str] = []

    def measure(self, loader: Loader) -> bool:
        """Measure one that was not measured before; False if it cannot be had.

        Raises:
            PtfastError, ReportedError: nothing could be measured yet.
        """
        if loader in self.seen or loader in self.failed:
            return loader in self.seen
        _, problems = across_keys(loader.on(self.config), self.composed.place)
        if problems:
            self.failed[loader] = problems[0].what
            return False
        keywords = {"loader": loader, "seconds": self.seconds, "asks": not self.facts}
        try:
            results, killed = self.run("workers", keywords, self._show)
        except (PtfastError, ReportedError) as error:
            if not self.seen:
                raise
            self.fail(loader, reason(error))
            return False
        for result in results:
            self.facts = self.facts or result.get("facts", {})
            if "no_room" in result:
                self.fail(loader, f"does not fit: {result['no_room']}")
            else:
                self.seen.setdefault(loader, []).append(result)
        if killed is not None and not results:
            self.fail(loader, f"was ended by {killed}, which is how a system ends what takes its memory")
        return loader in self.seen

    def fail(self, loader: Loader, why: str) -> None:
        """Note why one that was tried cannot be had."""
        self.failed[loader] = why
        self.display.note(f"  {self.label(loader):<24} cannot be had")

    def waiting(self, loader: Loader) -> float:
        """Share of the time that the training has spent on waiting for data, or on reading it itself."""
        return self.median(loader, "waiting")

    def memory(self, loader: Loader) -> int:
        """Bytes that it took when it had a process to itself."""
        return self.seen[loader][0]["memory_bytes"]

    def best(self) -> Loader:
        """The quickest; of those that are as quick, the one of fewest processes, then of least memory.

        Where a process reads for itself, no loader can save more than the time that it spends on that. What
        is still quicker than one that spends next to none was measured on a machine that had less to do.
        """
        alone = [loader for loader in self.seen if not loader.workers and not loader.read_ahead]
        unbeaten = [loader for loader in alone if self.waiting(loader) <= NOTHING]
        # In the order of measuring, of which the first wins where two cost the same.
        return min((loader for loader in self.seen if loader in {*self.as_quick(), *unbeaten}), key=self.cost)

    def cost(self, loader: Loader) -> Any:
        """What counts between loaders that are as quick."""
        return loader.workers, loader.threads, loader.prefetch, loader.read_ahead, self.memory(loader)

    def choose(self, session: Session) -> Loader:
        """The `base`, or of those that are faster in paired trials with it, the best.

        Only loaders nearly as quick as the quickest are compared: others have lost by what was measured of
        each alone. The comparisons are kept in `compared`.
        """
        base = self.base()
        if not base.workers and not base.read_ahead and self.waiting(base) <= NOTHING:
            return base
        rivals = [
            loader for loader in self.quickest()[:FINALISTS] if loader != base and self._is_near(loader)
        ]
        try:
            for loader in rivals:
                arms = [Arm(self.label(each), each.overrides) for each in (base, loader)]
                seconds = PAIRED * self.seconds
                with self.display.status(f"comparing {arms[1].name} with {arms[0].name}", seconds):
                    session.prepare(*arms)
                    self.compared[loader] = session.compare(*arms, seconds=seconds)
        except (PtfastError, ReportedError) as error:
            self.notes.append(f"could not be compared: {error}")
        faster = {
            loader: each.effect.log_ratio
            for loader, each in self.compared.items()
            if each.verdict == "faster" and each.effect is not None
        }
        least = max(faster.values(), default=0.0) - TIE
        return min(
            (loader for loader, ratio in faster.items() if ratio >= least), key=self.cost, default=base
        )

    def base(self) -> Loader:
        """The loader that is kept unless another is faster: what `auto` takes, if it is near, or the best."""
        auto = named_loaders(self).get("auto")
        return auto if auto is not None and self._is_near(auto) else self.best()

    def _is_near(self, loader: Loader) -> bool:
        return loader in self.seen and self.median(loader) >= NEAR * max(map(self.median, self.seen))

    def label(self, loader: Loader) -> str:
        """Its name in lines of text."""
        label = loader.label(self.config)
        if loader.workers == 1:
            label = label.replace("workers", "worker", 1)
        return f"{loader.workers} {label}" if loader.workers else label

    def _show(self, result: dict[str, Any]) -> None:
        if "no_room" in result:
            return
        label, rate = self.label(Loader(*result["loader"])), grouped(result["samples_per_s"])
        self.display.note(f"  {label:<24} {rate:>7} samples/s  {result['waiting']:>4.0%} waiting")


def search_loaders(search: LoaderSearch, most: int | None = None) -> None:
    """Measure what may be the quickest loader, and what `auto`, the config and a rule of thumb would take.

    Args:
        most: worker processes of each rank; None for as many as a machine of this size may want.

    Raises:
        MachineError: E002 where there is no memory for training without workers.
        PtfastError, ReportedError: whatever else stops that.
    """
    plain = Loader("plain")
    if not search.measure(plain):
        limit, name = memory_limit(search.config.device)
        what = f"{name} leaves {num_bytes(limit)}; training without workers {search.failed[plain]}"
        hint = "Try precision=amp, a smaller batch_size or a smaller model"
        raise MachineError("E002", what, key="dataloader.kind", value="plain", suggestion=hint)
    named, most = named_loaders(search), most or _limit(search)
    if (shards := search.facts.get("num_shards")) is not None:
        most = min(most, shards // search.num_ranks)
    for kind in _other_kinds(search):
        why = _too_dear(search, kind, [loader.kind for loader in named.values()])
        if why is not None:
            search.failed[Loader(kind)] = why
        else:
            search.measure(Loader(kind))
    _ascend(search, most)
    for loader in named.values():
        search.measure(loader)
    if search.waiting(plain) <= NOTHING:
        return
    _refine(search, most)
    if search.best().workers == most and shards is None:
        search.notes.append(f"more than {most} workers were not tried: --to goes further")


def named_loaders(search: LoaderSearch) -> dict[str, Loader]:
    """The loaders that `auto` would choose here and that the config asks for, by name."""
    found: dict[str, Loader] = {}
    names = ["auto"] if search.config.dataloader.kind == "auto" else ["auto", "configured"]
    for name in names:
        if name in search.facts:
            kind, count = search.facts[name]
            found[name] = workers(count, search.config) if kind in ("plain", "workers") else Loader(kind)
    if "configured" in found and search.config.dataloader.read_ahead:
        found["configured"] = found["configured"]._replace(read_ahead=True)
    return found


def _other_kinds(search: LoaderSearch) -> list[str]:
    """Kinds without workers besides `plain` that may suit this data and device."""
    if search.facts["iterable"]:
        search.notes.append("iterable data is read by this process or by workers")
        return []
    return ["memory", *(["device"] if search.facts["device"] == "cuda" else []), "packed"]


def _too_dear(search: LoaderSearch, kind: str, wanted: Sequence[str]) -> str | None:
    """The reason why a kind is not even tried, or None."""
    facts = search.facts
    if kind == "packed":
        # The rules know better what there is to pack.
        fits = facts["packed"] or across_keys(Loader(kind).on(search.config), search.composed.place)[1]
        return None if fits else "the data is no pack"
    if not (facts["in_memory"] or facts["repeatable"]):
        return "samples may differ from epoch to epoch, and would be held as they first are"
    if facts["read_s"] > HOLD_S and kind not in wanted:
        return f"decoding everything once would take {duration(facts['read_s'])} on one core"
    return None


def _limit(search: LoaderSearch) -> int:
    """Workers of each rank at most."""
    cores = usable_cores(hyperthreads=True) // search.num_ranks
    return max(LEAST_LIMIT, 4 * cores)


def _ascend(search: LoaderSearch, most: int) -> None:
    """Double the workers until that gains nothing twice, or memory ends."""
    counts = [count for power in range(16) if (count := 2**power) < most]
    useless = 0
    for count in [*counts, most] if most else []:
        best = max(map(search.median, search.seen))
        if useless >= 2 and count > RULE:
            return
        if (needed := _predicted(search, count)) > available_memory():
            search.notes.append(
                f"{count} workers would take about {num_bytes(needed)}, "
                f"and {num_bytes(available_memory())} are free"
            )
            return
        loader = workers(count, search.config)
        if not search.measure(loader):
            return
        useless = 0 if search.median(loader) > (1 + GAIN) * best else useless + 1


def _predicted(search: LoaderSearch, count: int) -> float:
    """Bytes that `count` workers would take, going by what those measured have taken."""
    plain = search.memory(Loader("plain"))
    tried = [loader for loader in search.seen if loader.workers]
    if not tried:
        return 0
    largest = max(tried, key=lambda loader: loader.workers)
    return plain + max(0, search.memory(largest) - plain) / largest.workers * count


def _refine(search: LoaderSearch, most: int) -> None:
    """Try what lies beside the best: counts in between, reading further ahead, threads."""
    best, config = search.best(), search.config
    if best.workers:
        for count in sorted({round(best.workers * factor) for factor in (0.75, 1.5)}):
            if 0 < count <= most and _predicted(search, count) <= available_memory():
                search.measure(workers(count, config))
        best = search.best()
    if best.workers:
        search.measure(best._replace(prefetch=2 * best.prefetch))
        cores = usable_cores(hyperthreads=True) // search.num_ranks
        if 2 * best.workers <= cores:
            search.measure(best._replace(threads=2 * best.threads))
    facts = search.facts
    if facts["device"] == "cpu" and (facts.get("in_memory") or facts.get("repeatable")):
        search.measure(search.best()._replace(read_ahead=True))
