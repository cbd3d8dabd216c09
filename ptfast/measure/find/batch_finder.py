"""`ptfast find batch`: the batch size with the highest throughput, which is seldom the largest that fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core.errors import EXIT_OK, ConfigError, DataError, MachineError
from ptfast.core.machine import memory_limit
from ptfast.core.units import grouped, num_bytes
from ptfast.launch.launcher import resolve_num_ranks
from ptfast.measure.experiment.laboratory import Laboratory, TrialResult
from ptfast.measure.outputs import check_outputs, label, write_figures, write_recipe
from ptfast.report.terminal.display import say, table

SMALLEST, LARGEST = 8, 65_536
ADAPTIVE = ("adam", "lamb", "novograd", "adafactor", "lion")
TIE = 0.02
"""Sizes whose rates differ by less are as quick."""
FINALISTS, ROUNDS = 3, 3
"""So many of the best sizes are measured so many times, in turns."""
TURNS = 4
"""Timed turns, of which the median counts: a neighbor's burst spoils one of them."""
LOSES = 0.9
"""Part of the best throughput below which a size has lost; after two in a row no larger one is tried."""


def find_batch(
    config: Config,
    arguments: Sequence[str],
    *,
    smallest: int = SMALLEST,
    largest: int = LARGEST,
    seconds: float = 2.0,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Measure the throughput of batch sizes, and say which is best and fits with some memory to spare.

    Args:
        smallest, largest: bounds of the sizes, which are multiples of the parts that a batch is cut into.
        seconds: how long a size is measured.
        write: file of a recipe with the size, and the learning rate that goes with it.
    """
    if (tokens := config.batching.batch_tokens) is not None:
        what, hint = "token-budget batches have no batch size to search for", "Use batching=buckets"
        raise ConfigError("C011", what, key="batching.batch_tokens", value=tokens, suggestion=hint)
    check_outputs(out, write)
    search = BatchSearch(config, arguments, seconds)
    first = search.multiple(smallest)
    say(f"measuring batches of {first} samples and more, {seconds:g} s each")
    search.ascend(first, largest)
    if search.refused and not search.seen and search.too_large is None:
        size, what = next(iter(search.refused.items()))
        hint = "Begin with a smaller size (--from), or use more data"
        raise DataError("D006", what, key="batch_size", value=size, suggestion=hint)
    if search.seen:
        search.refine(first, largest)
    chosen = search.confirm()
    if chosen is None:
        hint = "Try a smaller --from, precision=amp, checkpointing=full or gradients.accumulate=2"
        raise MachineError("E002", search.limit, key="batch_size", value=first, suggestion=hint)
    _show(search, chosen)
    facts = {"chosen": chosen, "trials": search.seen, "too_large": search.too_large}
    write_figures("find-batch", out, config, facts, "batch.json")
    if write is not None:
        _write(write, search, chosen)
    return EXIT_OK


class BatchSearch:
    """Measures batch sizes, each for some `seconds`, in processes that may run out of memory."""

    def __init__(self, config: Config, arguments: Sequence[str], seconds: float) -> None:
        self.config, self.arguments, self.seconds = config, arguments, seconds
        self.parts = config.micro_batches or resolve_num_ranks(config) * config.gradients.accumulate
        self.seen: dict[int, list[dict[str, Any]]] = {}
        """Results by size."""
        self.refused: dict[int, str] = {}
        """By size, why the data cannot be cut into such batches."""
        self.too_large: dict[str, Any] | None = None

    @property
    def limit(self) -> str:
        """What limits the memory, and the limit."""
        limit, name = memory_limit(self.config.device)
        return f"{name} leaves {num_bytes(limit)}"

    def median(self, size: int) -> float:
        """Samples per second."""
        return statistics.median(result["samples_per_s"] for result in self.seen[size])

    def multiple(self, size: int) -> int:
        """The largest multiple of a batch's parts up to `size`, at least one of them."""
        return max(size // self.parts, 1) * self.parts

    def ascend(self, first: int, largest: int) -> None:
        """Double the size until it does not fit, loses twice in a row, or does not suit the data twice."""
        size, lost = first, 0
        while size <= largest and self.too_large is None and lost < 2:
            if self.seen and max(self.refused, default=0) > max(self.seen):
                break
            # Two at a time, since the data is loaded anew each time; the second may be one too many.
            self.measure([size, 2 * size] if 2 * size <= largest else [size])
            for tried in (size, 2 * size):
                if tried in self.seen:
                    best = max(map(self.median, self.seen))
                    lost = lost + 1 if self.median(tried) < LOSES * best else 0
            size *= 4

    def refine(self, smallest: int, largest: int) -> None:
        """Try sizes beside the best, and measure the best of all again, in turns."""
        best = self.best()
        beside = {self.multiple(round(best * factor)) for factor in (0.75, 1.5)}
        limit = self.too_large["size"] if self.too_large else largest + 1
        if fresh := sorted(size for size in beside - self.seen.keys() if smallest <= size < limit):
            self.measure(fresh)
        leaders = sorted(self.seen, key=self.median, reverse=True)[:FINALISTS]
        if len(leaders) > 1:
            self.measure((ROUNDS - 1) * leaders)

    def confirm(self) -> int | None:
        """The best size that also evaluates and saves with memory to spare; None if none does.

        Tried only if the search met a memory limit: a size that scrapes through one trial may fail in others.
        """
        while self.seen:
            size = self.best()
            if self.too_large is None:
                return size
            self.measure([size], spares=True)
            if size in self.seen:
                return size
        return None

    def measure(self, sizes: Sequence[int], *, spares: bool = False) -> None:
        """Measure `sizes` in turn, each in a process of its own, up to the first that does not fit.

        With `spares` a size also evaluates, saves and trains on with some memory held back.
        """
        with Laboratory(budget_s=math.inf, turn_s=self.seconds / TURNS) as laboratory:
            for size in sizes:
                # Inputs that grow during training are measured at their full size.
                words = merge(self.arguments, ["curriculum=none", f"batch_size={size}"])
                (found,) = laboratory.look([words], timed_s=self.seconds, spares=spares)
                if not self._note(size, found, " with room to spare" if spares else ""):
                    break
        if self.too_large is not None:
            # A size that fits at one time and not at another does not fit.
            most = self.too_large["size"]
            self.seen = {size: trials for size, trials in self.seen.items() if size < most}

    def _note(self, size: int, found: TrialResult, spare: str) -> bool:
        """Keep and print the result of a size; False if it does not fit."""
        facts, num_train = found.facts, found.facts.get("num_train")
        if fits := not found.gave_out:
            if facts.get("code") == "D006":
                # This data cannot be cut into such batches: a single sample may be left.
                self.refused[size] = said = found.why
            elif num_train is not None and size > num_train:
                self.refused[size] = said = f"more than an epoch of {num_train:,} samples"
            else:
                found.raise_failure()
                rate, memory_bytes = statistics.median(facts["rates"]), facts["peak_memory_bytes"]
                result = {"samples_per_s": rate, "rates": facts["rates"], "memory_bytes": memory_bytes}
                self.seen.setdefault(size, []).append({"size": size, **result})
                said = f"{grouped(rate):>8} samples/s  {num_bytes(memory_bytes)}{spare}"
        else:
            self.too_large = {"size": size, "no_room": found.why, "spare": spare}
            said = f"does not fit{spare}: {found.why}"
        say(f"  {size:>6,}  {said}")
        return fits

    def best(self) -> int:
        """The quickest size; among equals the smallest, which takes more steps."""
        least = (1 - TIE) * max(map(self.median, self.seen))
        return min(size for size in self.seen if self.median(size) >= least)


def _write(file: Path, search: BatchSearch, chosen: int) -> None:
    """Write a recipe of the size and a learning rate that goes with it."""
    config, own = search.config, search.config.batch_size
    found: dict[str, Any] = {"batch_size": chosen}
    comment = [f"Batch of {chosen} for {label(config)}, found by ptfast find batch"]
    if chosen != own and config.optimizer.lr_scaling == "none":
        adapts = any(name in config.optimizer.target.path.lower() for name in ADAPTIVE)
        found["optimizer.lr_scaling"] = "sqrt" if adapts else "linear"
        found["optimizer.reference_batch"] = own
        comment.append(f"The learning rate is scaled from that of batch {own}.")
    write_recipe(file, search.arguments, found, comment)


def _show(search: BatchSearch, chosen: int) -> None:
    """Print a table of sizes, and the best."""
    most, rows = search.median(chosen), list[list[str]]()
    for size, results in sorted(search.seen.items()):
        name = f"{size:,}" + " *" * (size == chosen)
        rate, rates = search.median(size), [rate for each in results for rate in each["rates"]]
        speed = f"{rate:,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}", f"{rate / most:.2f}"
        rows.append([name, *speed, num_bytes(min(each["memory_bytes"] for each in results))])
    say()
    table(["batch", "samples/s", "spread", "of the best", "memory at peak"], rows)
    too_large, is_largest = search.too_large, chosen == max(search.seen)
    if too_large is not None:
        say(f"{too_large['size']:,} samples do not fit{too_large['spare']}: {search.limit}")
    say(f"\nbest: batch_size={chosen} at {most:,.0f} samples/s")
    if is_largest and too_large is not None:
        say("larger batches may be quicker still: checkpointing=full makes room for them")
    elif is_largest and not search.refused:
        say("the largest that was tried: --to goes further")
