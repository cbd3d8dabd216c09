"""`ptfast find batch`: the batch with the highest throughput that fits, which is seldom the largest."""

from __future__ import annotations

import signal
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptfast import run_folder
from ptfast.config.compose import Composed
from ptfast.config.overlay import check_out, check_overlay, write_overlay
from ptfast.config.schema import Config
from ptfast.display import build_display, standard_output, table
from ptfast.errors import EXIT_OK, ConfigError, DataError, MachineError
from ptfast.find.child import run_child
from ptfast.launch import resolve_num_ranks
from ptfast.machine import memory_limit
from ptfast.units import grouped, num_bytes

FIGURES = "batch.json"
SMALLEST, LARGEST = 8, 65_536
LOSES = 0.9
"""Part of the best throughput below which a size has lost; after two in a row no larger one is tried."""
TIE = 0.02
"""Sizes that differ by less are as fast: the smaller one takes more steps for as many samples."""
FINALISTS, ROUNDS = 3, 3
ADAPTIVE = ("adam", "lamb", "novograd", "adafactor", "lion")


class Search:
    """Measures sizes in children, and remembers what came of them."""

    def __init__(self, composed: Composed, config: Config, folder: Path, seconds: float) -> None:
        self.composed, self.config, self.folder, self.seconds = composed, config, folder, seconds
        self.num_ranks = resolve_num_ranks(config)
        self.parts = config.micro_batches or self.num_ranks * config.gradients.accumulate
        self.seen: dict[int, list[dict[str, Any]]] = {}
        """Results by size, in the order they came in."""
        self.refused: dict[int, str] = {}
        """Why the data cannot be cut into batches of a size."""
        self.too_large: dict[str, Any] | None = None
        self.display = build_display()
        self._children = 0

    def measure(self, sizes: Sequence[int]) -> None:
        """Measure `sizes` in turn, up to the first that does not fit."""
        launched = self.config.parallel.strategy != "single"
        self._children += 1
        results, killed = run_child(
            self.composed,
            self.folder / str(self._children),
            self.num_ranks if launched else None,
            "batch",
            {"sizes": list(sizes), "seconds": self.seconds},
            self._tell,
        )
        for result in results:
            if "no_room" in result:
                self.too_large = result
            elif "refused" in result:
                self.refused[result["size"]] = result["refused"]
            else:
                self.seen.setdefault(result["size"], []).append(result)
        if killed is not None and len(results) < len(sizes):
            # The kernel ends whom it has no memory for without a word.
            size = sizes[len(results)]
            self.too_large = {"size": size, "no_room": f"ended by {signal.Signals(killed).name}"}
            self._tell(self.too_large)

    def rate(self, size: int) -> float:
        """Samples per second, the median of all times that `size` was measured."""
        return statistics.median(result["samples_per_s"] for result in self.seen[size])

    def best(self) -> int:
        """The quickest size; of those that are as quick, the smallest."""
        most = max(map(self.rate, self.seen))
        return min(size for size in self.seen if self.rate(size) >= (1 - TIE) * most)

    def _tell(self, result: dict[str, Any]) -> None:
        if why := result.get("refused") or ("does not fit" if "no_room" in result else None):
            self.display.note(f"  {result['size']:>6,}  {why}")
            return
        rate, memory = grouped(result["samples_per_s"]), num_bytes(result["memory_bytes"])
        self.display.note(f"  {result['size']:>6,}  {rate:>8} samples/s  {memory}")


def find_batch(
    composed: Composed,
    config: Config,
    arguments: Sequence[str],
    *,
    smallest: int | None = None,
    largest: int | None = None,
    seconds: float = 2.0,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Measure the throughput of batch sizes, each in a child process, and say which is best.

    Sizes double until they do not fit, or lose twice to the best; then sizes beside the best are tried, and
    the best of all are measured again, in turns.

    Args:
        smallest, largest: of the sizes tried; multiples of the parts that a batch is cut into are taken.
        seconds: that a size is measured for.
        out: folder of the figures; None for a new one under `run.root`.
        write: file of a recipe with the size, and the learning rate that goes with it.

    Returns:
        0.

    Raises:
        MachineError: E002 where not even the smallest size fits.
        PtfastError: whatever stops a run in its first steps.
    """
    if config.batching.batch_tokens is not None:
        what = "batches of so many tokens have no size to search for"
        hint = "Use batching=buckets"
        value = config.batching.batch_tokens
        raise ConfigError("C011", what, key="batching.batch_tokens", value=value, suggestion=hint)
    if write is not None:
        check_overlay(write)
    check_out(out)
    with tempfile.TemporaryDirectory(prefix="ptfast-") as name:
        search = Search(composed, config, Path(name), seconds)
        first = _multiple(smallest or SMALLEST, search.parts)
        print(f"measuring batches of {first} samples and more, {seconds:g} s each")
        _ascend(search, first, largest or LARGEST)
        if search.refused and not search.seen and search.too_large is None:
            size, what = next(iter(search.refused.items()))
            hint = "Begin with a smaller size (--from), or use more data"
            raise DataError("D006", what, key="batch_size", value=size, suggestion=hint)
        if not search.seen:
            raise MachineError("E002", _limit(search), key="batch_size", value=first, suggestion=_LESS)
        _refine(search, first, largest or LARGEST)
    chosen = search.best()
    _show(search, chosen)
    label = config.recipe or config.run.name or "train"
    folder = out or run_folder.new_folder(Path(config.run.root), f"find-batch-{label}")
    run_folder.create_folder(folder)
    facts = {"chosen": chosen, "trials": search.seen, "too_large": search.too_large}
    run_folder.write_json(folder / FIGURES, facts)
    print(f"figures: {folder}")
    if write is not None:
        _write(write, arguments, config, chosen, label)
    return EXIT_OK


_LESS = "Try precision=amp, checkpointing=full, gradients.accumulate=2 or a smaller model"


def _ascend(search: Search, first: int, largest: int) -> None:
    """Double the size until it does not fit, has lost twice, or two in a row do not suit the data."""
    size, lost = first, 0
    while size <= largest and search.too_large is None and lost < 2:
        if search.seen and max(search.refused, default=0) > max(search.seen):
            break
        # Two at a time: each child builds the data anew, and the second may be one too many.
        search.measure([size, 2 * size] if 2 * size <= largest else [size])
        for tried in (size, 2 * size):
            if tried in search.seen:
                best = max(map(search.rate, search.seen))
                lost = lost + 1 if search.rate(tried) < LOSES * best else 0
        size *= 4


def _refine(search: Search, smallest: int, largest: int) -> None:
    """Try sizes beside the best, and measure the best of all again."""
    best = search.best()
    beside = {_multiple(round(best * factor), search.parts) for factor in (0.75, 1.5)}
    limit = search.too_large["size"] if search.too_large else largest + 1
    fresh = sorted(size for size in beside - search.seen.keys() if smallest <= size < limit)
    if fresh:
        search.measure(fresh)
    leaders = sorted(search.seen, key=search.rate, reverse=True)[:FINALISTS]
    if len(leaders) > 1:
        search.measure([size for _ in range(ROUNDS - 1) for size in leaders])


def _show(search: Search, chosen: int) -> None:
    most = search.rate(chosen)
    rows = []
    for size in sorted(search.seen):
        trials = search.seen[size]
        rate = search.rate(size)
        low, high = min(trial["low"] for trial in trials), max(trial["high"] for trial in trials)
        # Of a child that has tried larger sizes before, the peak is theirs.
        memory = min(trial["memory_bytes"] for trial in trials)
        rows.append(
            [
                f"{size:,}" + (" *" if size == chosen else ""),
                f"{rate:,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                f"{rate / most:.2f}",
                f"{1e3 * statistics.median(trial['step_s'] for trial in trials):,.1f}",
                num_bytes(memory),
            ]
        )
    print()
    headers = ["batch", "samples/s", "spread", "of the best", "ms/step", "memory at peak"]
    table(headers, rows, stream=standard_output())
    if search.too_large is not None:
        print(f"{search.too_large['size']:,} samples do not fit: {_limit(search)}")
    print(f"\nbest: batch_size={chosen} at {most:,.0f} samples/s")
    if chosen == max(search.seen) and search.too_large is None and not search.refused:
        print("the largest that was tried: --to goes further")


def _limit(search: Search) -> str:
    assert search.too_large is not None
    limit, name = memory_limit(search.config.device)
    return f"{name} leaves {num_bytes(limit)} ({search.too_large['no_room']})"


def _write(file: Path, arguments: Sequence[str], config: Config, chosen: int, label: str) -> None:
    """A recipe of the size, with the rate scaled from the batch that the config's is for."""
    found: dict[str, Any] = {"batch_size": chosen}
    comment = [f"Batch of {chosen} for {label}, found by ptfast find batch"]
    if chosen != config.batch_size and config.optimizer.lr_scaling == "none":
        path = config.optimizer.target.path.lower()
        rule = "sqrt" if any(name in path for name in ADAPTIVE) else "linear"
        found |= {"optimizer.lr_scaling": rule, "optimizer.reference_batch": config.batch_size}
        comment.append(f"The learning rate is scaled from that of batch {config.batch_size}.")
    called = write_overlay(file, arguments, found, comment)
    print(f"wrote {file}; train with it: ptfast train +recipe={called}")


def _multiple(size: int, parts: int) -> int:
    return max(size // parts, 1) * parts
