"""`ptfast find workers`: who loads the data quickest beside the training, and what memory that takes."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.schema import Config
from ptfast.core.errors import EXIT_OK
from ptfast.core.units import duration, num_bytes
from ptfast.measure.found import check_outputs, label, write_figures, write_recipe
from ptfast.measure.loader.loader_candidate import Loader, workers
from ptfast.measure.loader.loader_search import NOTHING, RULE, LoaderSearch, named_loaders, search_loaders
from ptfast.measure.trials.session import Session
from ptfast.report.terminal.display import is_terminal, say, standard_output, table

NARROW = 100
"""Columns of a terminal below which the table says less."""


def find_workers(
    composed: Composed,
    config: Config,
    arguments: Sequence[str],
    *,
    most: int | None = None,
    seconds: float = 2.0,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Train with one loader after another, each in a child process, and say which is the quickest.

    What counts is the throughput of the training, whose computing takes the cores that loading wants as well.
    Worker processes double until more gain nothing; then what lies beside the best is tried, and the best of
    all are compared in paired trials with what `auto` takes, if it is among them.

    Args:
        most: worker processes of each rank.
        seconds: that a loader is measured for.
        out: folder of the figures; None for a new one under `run.root`.
        write: file of a recipe with the loader.

    Returns:
        0.

    Raises:
        MachineError: E002 where there is no memory for training without workers.
        PtfastError: whatever stops a run in its first steps.
    """
    check_outputs(out, write)
    with tempfile.TemporaryDirectory(prefix="ptfast-") as name:
        search = LoaderSearch(composed, config, Path(name), seconds)
        say(f"measuring loaders beside the training, {seconds:g} s each")
        search_loaders(search, most)
        pairs = Path(name) / "pairs"
        pairs.mkdir()
        with Session(arguments, budget_s=math.inf, folder=pairs, stretch_s=seconds / 4) as session:
            chosen = search.choose(session)
    _show(search, chosen)
    say(f"figures: {write_figures(config, 'workers', out, _figures(search, chosen))}")
    if write is not None:
        _write(write, arguments, search, chosen)
    return EXIT_OK


def _marks(search: LoaderSearch, chosen: Loader) -> dict[Loader, str]:
    """Remarks on some of the loaders."""
    named = {"configured": "as configured"}
    rule = workers(RULE, search.config)
    marks: dict[Loader, list[str]] = {chosen: ["chosen"]}
    for name, loader in {**named_loaders(search), "4 x GPUs": rule}.items():
        marks.setdefault(loader, []).append(named.get(name, name))
    return {loader: ", ".join(names) for loader, names in marks.items()}


def _show(search: LoaderSearch, chosen: Loader) -> None:
    marks = _marks(search, chosen)
    most = max(map(search.median, search.seen))
    stream = standard_output()
    narrow = is_terminal(stream) and shutil.get_terminal_size().columns < NARROW
    rows: list[dict[str, str]] = []
    for loader in sorted(search.seen, key=lambda loader: (loader.workers, loader.kind != "plain", loader)):
        trials = search.seen[loader]
        rate = search.median(loader)
        low, high = search.spread(loader)
        row = {
            "loader": search.label(loader) if narrow else loader.label(search.config),
            "workers": str(loader.workers),
            "samples/s": f"{rate:,.0f}",
            "spread": f"{low:,.0f} to {high:,.0f}",
            "of the best": f"{rate / most:.2f}",
            "waiting": f"{search.waiting(loader):.0%}",
            f"memory ({trials[0]['memory_kind']})": num_bytes(search.memory(loader)),
        }
        if "gpu_bytes" in trials[0]:
            row["on the GPU"] = num_bytes(trials[0]["gpu_bytes"])
        rows.append(row | {"": marks.get(loader, "")})
    headers = [name for name in rows[0] if not (narrow and name in ("workers", "spread", "of the best"))]
    say()
    table(headers, [[row.get(name, "") for name in headers] for row in rows], stream=stream)
    for loader, why in search.failed.items():
        say(f"not measured: {search.label(loader)} ({why})")
    for line in [*search.notes, *_remarks(search, chosen)]:
        say(line)
    settings = " ".join(f"{key}={str(value).lower()}" for key, value in _found(search.config, chosen).items())
    say(f"\nchosen: {settings} at {search.median(chosen):,.0f} samples/s")


def _remarks(search: LoaderSearch, chosen: Loader) -> Iterator[str]:
    """Remarks on the figures."""
    for loader, comparison in search.compared.items():
        found = comparison.why or comparison.verdict
        if (effect := comparison.effect) is not None:
            low, high = effect.interval()
            found = f"{effect.ratio:.2f}x [{low:.2f}-{high:.2f}], {comparison.verdict}"
        yield f"{search.label(loader)} against {search.label(search.base())}, in pairs: {found}"
    if search.num_ranks > 1:
        yield f"workers of each of {search.num_ranks} ranks; samples and memory of all together"
    plain = Loader("plain")
    if search.waiting(plain) <= NOTHING:
        share = max(search.waiting(plain), 0.001)
        yield f"without workers {share:.1%} of the time goes to reading: no loader can save more than that"
    if chosen.kind in ("memory", "device") and not search.facts["in_memory"]:
        ready_s = search.seen[chosen][0]["ready_s"]
        yield f"{chosen.kind}: everything is decoded first, ready after {duration(ready_s)}"
    size = search.facts.get("num_samples")
    most = max(trial["samples"] for trials in search.seen.values() for trial in trials)
    if size and most > size and not search.facts["in_memory"]:
        often = f"up to {most / size:.0f} times" if most >= 1.5 * size else "more than once"
        yield f"each of the {size:,} samples was read {often}, where files may come from the system's memory"


def _found(config: Config, chosen: Loader) -> dict[str, Any]:
    """The values to set, by key, but for a thread or threads that neither the loader nor the config has."""
    thread, threads = "dataloader.read_ahead", "backend.worker_threads"
    usual = {thread: False, threads: 1}
    given = {thread: config.dataloader.read_ahead, threads: config.backend.worker_threads}
    return {
        key: value
        for key, value in chosen.values.items()
        if key not in usual or {value, given[key]} != {usual[key]}
    }


def _figures(search: LoaderSearch, chosen: Loader) -> dict[str, Any]:
    return {
        "chosen": {**chosen._asdict(), "samples_per_s": search.median(chosen)},
        **{name: loader._asdict() for name, loader in named_loaders(search).items()},
        "trials": [
            {**loader._asdict(), **trial, "loader": search.label(loader)}
            for loader, trials in search.seen.items()
            for trial in trials
        ],
        "comparisons": [comparison.receipt() for comparison in search.compared.values()],
        "failed": {search.label(loader): why for loader, why in search.failed.items()},
        "facts": search.facts,
    }


def _write(file: Path, arguments: Sequence[str], search: LoaderSearch, chosen: Loader) -> None:
    """A recipe of the loader; what the arguments said of loaders is not carried into it."""
    found = _found(search.config, chosen)
    own = tuple(f"{key}=" for key in Loader("workers", 1).values)
    others = [word for word in arguments if not word.lstrip("+").startswith(own)]
    rate, memory = search.median(chosen), num_bytes(search.memory(chosen))
    comment = [
        f"Loader for {label(search.config)}, found by ptfast find workers",
        f"{search.label(chosen)}: {rate:,.0f} samples/s in {memory}.",
    ]
    write_recipe(file, others, found, comment)
