"""`ptfast find batch`: find the batch size with the highest throughput, rarely the largest that fits."""

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
from ptfast.launch.launcher import resolve_world_size
from ptfast.measure.experiment.laboratory import Laboratory, TrialResult
from ptfast.measure.outputs import check_outputs, label, write_recipe, write_results
from ptfast.report.terminal.display import say, table

SMALLEST, LARGEST = 8, 65_536
ADAPTIVE = ("adam", "lamb", "novograd", "adafactor", "lion")
TIE = 0.02
"""Sizes whose throughputs differ by a smaller fraction count as equally fast."""
FINALISTS, ROUNDS = 3, 3
"""This many of the best sizes are measured this many times, in turns."""
TURNS = 4
"""Number of timed turns; their median is used, so a burst of other load spoils only one."""
LOSES = 0.9
"""Fraction of the best throughput below which a size has lost; after two in a row the search stops."""


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
    """Measure the throughput of batch sizes, and report the best one that fits with memory to spare.

    Args:
        smallest, largest: bounds of the sizes; all are multiples of the number of micro-batches.
        seconds: how long a size is measured.
        write: path of a recipe with the size and the matching learning rate.
    """
    if (tokens := config.batching.batch_tokens) is not None:
        what, hint = "token-budget batches have no batch size to search for", "Use batching=buckets"
        raise ConfigError("C011", what, key="batching.batch_tokens", value=tokens, suggestion=hint)
    check_outputs(out, write)
    search = BatchSearch(config, arguments, seconds)
    first = search.multiple(smallest)
    say(f"measuring batches of {first} samples and more, {seconds:g} s each")
    search.ascend(first, largest)
    if search.rejected and not search.seen and search.too_large is None:
        size, what = next(iter(search.rejected.items()))
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
    write_results("find-batch", out, config, facts, "batch.json")
    if write is not None:
        _write(write, search, chosen)
    return EXIT_OK


class BatchSearch:
    """Measures batch sizes, each for `seconds`, in processes that may run out of memory."""

    def __init__(self, config: Config, arguments: Sequence[str], seconds: float) -> None:
        self.config, self.arguments, self.seconds = config, arguments, seconds
        self.micro_batches = config.micro_batches or resolve_world_size(config) * config.gradients.accumulate
        self.seen: dict[int, list[dict[str, Any]]] = {}
        """Results by batch size."""
        self.rejected: dict[int, str] = {}
        """By batch size, the reason the data cannot be cut into batches of that size."""
        self.too_large: dict[str, Any] | None = None

    @property
    def limit(self) -> str:
        """The memory limit, with its name."""
        limit, name = memory_limit(self.config.device)
        return f"{name} leaves {num_bytes(limit)}"

    def median(self, size: int) -> float:
        """Throughput in samples per second."""
        return statistics.median(result["samples_per_s"] for result in self.seen[size])

    def multiple(self, size: int) -> int:
        """Return the largest multiple of the number of micro-batches up to `size`, at least that number."""
        return max(size // self.micro_batches, 1) * self.micro_batches

    def ascend(self, first: int, largest: int) -> None:
        """Double the size until it does not fit, does not suit the data, or loses twice in a row."""
        size, lost = first, 0
        while size <= largest and self.too_large is None and lost < 2:
            if self.seen and max(self.rejected, default=0) > max(self.seen):
                break
            # Try two at a time, because each process loads the data again; the second may not be needed.
            self.measure([size, 2 * size] if 2 * size <= largest else [size])
            for tried in (size, 2 * size):
                if tried in self.seen:
                    best = max(map(self.median, self.seen))
                    lost = lost + 1 if self.median(tried) < LOSES * best else 0
            size *= 4

    def refine(self, smallest: int, largest: int) -> None:
        """Try sizes next to the best, then measure the finalists again, in turns."""
        best = self.best()
        neighbors = {self.multiple(round(best * factor)) for factor in (0.75, 1.5)}
        limit = self.too_large["size"] if self.too_large else largest + 1
        if fresh := sorted(size for size in neighbors - self.seen.keys() if smallest <= size < limit):
            self.measure(fresh)
        leaders = sorted(self.seen, key=self.median, reverse=True)[:FINALISTS]
        if len(leaders) > 1:
            self.measure((ROUNDS - 1) * leaders)

    def confirm(self) -> int | None:
        """Return the best size that also evaluates and saves with memory to spare; None if no size does.

        This is tested only if the search hit a memory limit: a size that barely fits may fail later.
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
        """Measure `sizes` in turn, each in a separate process, up to the first that does not fit.

        With `spares`, each size must also evaluate, save and train on while some memory is reserved.
        """
        with Laboratory(budget_s=math.inf, turn_s=self.seconds / TURNS) as laboratory:
            for size in sizes:
                # Inputs that grow during training are measured at their full size.
                words = merge(self.arguments, ["curriculum=none", f"batch_size={size}"])
                (found,) = laboratory.try_configs([words], timed_s=self.seconds, spares=spares)
                if not self._note(size, found, " with room to spare" if spares else ""):
                    break
        if self.too_large is not None:
            # A size that fits only sometimes counts as not fitting.
            most = self.too_large["size"]
            self.seen = {size: trials for size, trials in self.seen.items() if size < most}

    def _note(self, size: int, found: TrialResult, spare: str) -> bool:
        """Record and print the result of a size; return False if it does not fit."""
        facts, num_train = found.facts, found.facts.get("num_train")
        if fits := not found.gave_out:
            if facts.get("code") == "D006":
                # The data cannot be cut into such batches: a single sample may remain.
                self.rejected[size] = said = found.why
            elif num_train is not None and size > num_train:
                self.rejected[size] = said = f"more than an epoch of {num_train:,} samples"
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
        """Return the fastest size; among equally fast ones the smallest, which takes more steps."""
        least = (1 - TIE) * max(map(self.median, self.seen))
        return min(size for size in self.seen if self.median(size) >= least)


def _write(file: Path, search: BatchSearch, chosen: int) -> None:
    """Write a recipe with the batch size and a matching learning rate."""
    config, own = search.config, search.config.batch_size
    found: dict[str, Any] = {"batch_size": chosen}
    comment = [f"Batch of {chosen} for {label(config)}, found by ptfast find batch"]
    if chosen != own and config.optimizer.lr_scaling == "none":
        adapts = any(name in config.optimizer.target.path.lower() for name in ADAPTIVE)
        found["optimizer.lr_scaling"] = "sqrt" if adapts else "linear"
        found["optimizer.reference_batch"] = own
        comment.append(f"The learning rate is scaled from batch {own}.")
    write_recipe(file, search.arguments, found, comment)


def _show(search: BatchSearch, chosen: int) -> None:
    """Print a table of sizes and the best one."""
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
        say("larger batches may be faster still: checkpointing=full frees memory for them")
    elif is_largest and not search.rejected:
        say("this is the largest size tried: raise --to to go further")
