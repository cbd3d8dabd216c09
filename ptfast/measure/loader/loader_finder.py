"""`ptfast find workers`: who loads the data quickest beside the training, and what memory that takes."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ptfast.config.schema import Config
from ptfast.core.errors import EXIT_OK
from ptfast.core.units import duration, grouped, num_bytes
from ptfast.measure.experiment.laboratory import Laboratory
from ptfast.measure.found import check_outputs, label, write_figures, write_recipe
from ptfast.measure.loader.loader_search import NOTHING, PLAIN, RULE, LoaderSearch, LoaderSetup, workers
from ptfast.report.terminal.display import is_terminal, say, standard_output, table

NARROW = 100
"""Columns of a terminal below which the table says less."""
PASSES = 4


def find_workers(
    config: Config,
    arguments: Sequence[str],
    *,
    most: int | None = None,
    seconds: float = 2.0,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Train with one loader beside another, each in a process of its own, and say which is the quickest.

    What counts is the throughput of the training, whose computing takes the cores that loading wants as well.
    Worker processes double until more gain nothing; then what lies beside the best is tried, and the best of
    all, with what `auto` takes if it is among them, are measured again in blocks of fresh processes.

    Args:
        most: worker processes of each rank.
        seconds: that a process is measured for.
        out: folder of the figures; None for a new one under `run.root`.
        write: file of a recipe with the loader.

    Raises:
        ReportedError: what stops training without workers.
    """
    check_outputs(out, write)
    with Laboratory(budget_s=math.inf, timed_s=seconds, turn_s=seconds / PASSES) as laboratory:

        def show(loader: LoaderSetup) -> None:
            rate, waiting = grouped(search.figure(loader, "samples_per_s")), search.figure(loader, "waiting")
            say(f"  {search.label(loader):<24} {rate:>7} samples/s  {waiting:>4.0%} waiting")

        search = LoaderSearch(laboratory, config, arguments, most, show)
        say(f"measuring loaders beside the training, {seconds:g} s each")
        search.run()
    chosen = search.chosen
    _show(search, chosen)
    say(f"figures: {write_figures(config, 'workers', out, _figures(search, chosen))}")
    if write is not None:
        _write(write, arguments, search, chosen)
    return EXIT_OK


def _marks(search: LoaderSearch, chosen: LoaderSetup) -> dict[LoaderSetup, str]:
    """Remarks on some of the loaders."""
    marks: dict[LoaderSetup, list[str]] = {chosen: ["chosen"]}
    rule = {"4 x GPUs": workers(RULE, search.config)}
    for name, loader in (search.named | rule).items():
        marks.setdefault(loader, []).append("as configured" if name == "configured" else name)
    return {loader: ", ".join(names) for loader, names in marks.items()}


def _show(search: LoaderSearch, chosen: LoaderSetup) -> None:
    marks, effects, best = _marks(search, chosen), search.effects(search.best()), search.best()
    narrow = is_terminal(standard_output()) and shutil.get_terminal_size().columns < NARROW
    memory_kind = next(
        run.facts["memory"][1] for block in search.blocks for _, run in block if run.time is not None
    )
    rows: list[dict[str, str]] = []
    for loader in sorted(search.seen, key=lambda loader: (loader.workers, loader.kind != "plain", loader)):
        ratio, interval = 1.0, ""
        if loader != best and loader in effects:
            ratio, (low, high) = effects[loader].ratio, effects[loader].interval()
            interval = f"{low:.2f}-{high:.2f}"
        row = {
            "loader": search.label(loader) if narrow else loader.label(search.config),
            "workers": str(loader.workers),
            "samples/s": f"{search.figure(loader, 'samples_per_s'):,.0f}",
            "of the best": f"{ratio:.2f}",
            "95 %": interval,
            "waiting": f"{search.figure(loader, 'waiting'):.0%}",
            f"memory ({memory_kind})": num_bytes(int(search.figure(loader, "memory_bytes"))),
        }
        rows.append(row | {"": marks.get(loader, "")})
    headers = [name for name in rows[0] if not (narrow and name in ("workers", "waiting"))]
    say()
    table(headers, [[row[name] for name in headers] for row in rows])
    for loader, why in search.failed.items():
        say(f"not measured: {search.label(loader)} ({why})")
    for line in [*search.notes, *_remarks(search, chosen)]:
        say(line)
    settings = " ".join(f"{key}={str(value).lower()}" for key, value in _found(search.config, chosen).items())
    say(f"\nchosen: {settings} at {search.figure(chosen, 'samples_per_s'):,.0f} samples/s")


def _remarks(search: LoaderSearch, chosen: LoaderSetup) -> Iterator[str]:
    """Remarks on the figures."""
    if chosen != search.best():
        yield (
            f"{search.label(chosen)} is as quick as {search.label(search.best())}, which is the quickest, "
            "and takes fewer processes or less memory"
        )
    if rivals := search.rivals(chosen):
        names = ", ".join(map(search.label, rivals))
        yield f"cannot tell if these are faster than the chosen one: {names}; --seconds measures for longer"
    if search.data["num_ranks"] > 1:
        yield f"workers of each of {search.data['num_ranks']} ranks; samples of all together"
    if (share := search.figure(PLAIN, "waiting")) <= NOTHING:
        line = "of the time goes to reading: no loader can save more than that"
        yield f"without workers {max(share, 0.001):.1%} {line}"
    if chosen.kind in ("memory", "device") and not search.data["in_memory"]:
        took = duration(search.data["read_s"])
        yield f"{chosen.kind}: everything is decoded first, which takes about {took}"


def _found(config: Config, chosen: LoaderSetup) -> dict[str, Any]:
    """The values to set, by key, but for a thread or threads that neither the loader nor the config has."""
    found = chosen.values
    if not (chosen.read_ahead or config.dataloader.read_ahead):
        del found["dataloader.read_ahead"]
    if chosen.threads == config.backend.worker_threads == 1:
        del found["backend.worker_threads"]
    return found


def _figures(search: LoaderSearch, chosen: LoaderSetup) -> dict[str, Any]:
    best = search.best()
    return {
        "chosen": {**chosen._asdict(), "samples_per_s": search.figure(chosen, "samples_per_s")},
        **{name: loader._asdict() for name, loader in search.named.items()},
        "best": best._asdict(),
        "over_best": [{**one._asdict(), **effect.receipt()} for one, effect in search.effects(best).items()],
        "rivals": [one._asdict() for one in search.rivals(chosen)],
        "blocks": [
            [{**one._asdict(), "loader": search.label(one), **run.receipt()} for one, run in block]
            for block in search.blocks
        ],
        "failed": {search.label(loader): why for loader, why in search.failed.items()},
        "data": search.data,
    }


def _write(file: Path, arguments: Sequence[str], search: LoaderSearch, chosen: LoaderSetup) -> None:
    """A recipe of the loader; what the arguments said of loaders is not carried into it."""
    found = _found(search.config, chosen)
    own = tuple(f"{key}=" for key in LoaderSetup("workers", 1).values)
    others = [word for word in arguments if not word.lstrip("+").startswith(own)]
    rate, memory = (search.figure(chosen, name) for name in ("samples_per_s", "memory_bytes"))
    comment = [
        f"Loader for {label(search.config)}, found by ptfast find workers",
        f"{search.label(chosen)}: {rate:,.0f} samples/s in {num_bytes(int(memory))}.",
    ]
    write_recipe(file, others, found, comment)
