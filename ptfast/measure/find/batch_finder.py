"""`ptfast find batch`: the batch size with the highest throughput, which is seldom the largest that fits."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.overrides import merge
from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core.errors import EXIT_OK, ConfigError, DataError, MachineError, PtfastError, ReportedError
from ptfast.core.machine import memory_limit
from ptfast.core.units import num_bytes
from ptfast.measure.find.batch_search import BatchSearch
from ptfast.measure.find.gradient_noise import NUM_STEPS, forecast_noise
from ptfast.measure.outputs import check_outputs, label, write_figures, write_recipe
from ptfast.report.terminal.display import say, table

SMALLEST, LARGEST = 8, 65_536
ADAPTIVE = ("adam", "lamb", "novograd", "adafactor", "lion")
TRIED = ("full", "selective", "every_n")
"""Modes of activation checkpointing; a model without the first supports none."""
WORTH = 1.02
"""Least gain in throughput for which recomputing activations is worth it."""


def find_batch(
    composed: Composed,
    config: Config,
    arguments: Sequence[str],
    *,
    smallest: int = SMALLEST,
    largest: int = LARGEST,
    seconds: float = 2.0,
    checkpointing: bool = False,
    noise: bool = False,
    num_steps: int = NUM_STEPS,
    out: Path | None = None,
    write: Path | None = None,
) -> int:
    """Measure the throughput of batch sizes, and say which is best and fits with some memory to spare.

    Args:
        smallest, largest: bounds of the sizes, which are multiples of the parts that a batch is cut into.
        seconds: how long a size is measured.
        checkpointing: always try modes of activation checkpointing, and not only if memory ends the search
            while larger batches are still quicker.
        noise: train for `num_steps` optimizer steps, estimate the critical batch, and choose the size that
            should come to the same loss first.
        write: file of a recipe with the size, and the learning rate that goes with it.
    """
    if (tokens := config.batching.batch_tokens) is not None:
        what, hint = "token-budget batches have no batch size to search for", "Use batching=buckets"
        raise ConfigError("C011", what, key="batching.batch_tokens", value=tokens, suggestion=hint)
    if noise and config.parallel.strategy == "fsdp":
        what, hint = "the noise scale needs whole gradients, which no rank holds", "Use parallel=ddp"
        raise ConfigError("C011", what, key="--noise", suggestion=hint)
    check_outputs(out, write)
    with tempfile.TemporaryDirectory(prefix="ptfast-") as name:
        search = BatchSearch(arguments, composed, config, Path(name), seconds)
        first = search.multiple(smallest)
        say(f"measuring batches of {first} samples and more, {seconds:g} s each")
        search.ascend(first, largest)
        if search.refused and not search.seen and search.too_large is None:
            size, what = next(iter(search.refused.items()))
            hint = "Begin with a smaller size (--from), or use more data"
            raise DataError("D006", what, key="batch_size", value=size, suggestion=hint)
        if search.seen:
            search.refine(first, largest)
        searches = [search]
        limited = search.too_large is not None
        if checkpointing or not search.seen or (limited and search.best() == max(search.seen)):
            searches += _with_checkpointing(search, first, largest)
        best = _choose(searches)
        if best is None:
            hint = "Try a smaller --from, precision=amp, checkpointing=full or gradients.accumulate=2"
            raise MachineError("E002", limit_of(config), key="batch_size", value=first, suggestion=hint)
        search, chosen = best
        _show(searches, search, chosen)
        forecast = forecast_noise(search, num_steps) if noise else None
    advised = forecast and forecast.advise(search)
    chosen, lr_ratio = advised or (chosen, None)
    facts: dict[str, Any] = {"chosen": chosen, "trials": search.seen, "too_large": search.too_large}
    if len(searches) > 1:
        modes = {each.mode: {"trials": each.seen, "too_large": each.too_large} for each in searches}
        facts |= {"checkpointing": search.mode, "modes": modes}
    if forecast is not None:
        facts["noise"] = asdict(forecast)
    write_figures("find-batch", out, config, facts, "batch.json")
    if write is not None:
        _write(write, search, chosen, lr_ratio)
    return EXIT_OK


def _with_checkpointing(search: BatchSearch, first: int, largest: int) -> list[BatchSearch]:
    """Searches with activation checkpointing, starting at about the size where the given one ended."""
    found: list[BatchSearch] = []
    # At smaller sizes, which fit without it, recomputing only takes longer.
    start = max(search.seen, default=first)
    for mode in TRIED if start <= largest else ():
        if mode == search.mode:
            continue
        say(f"with checkpointing={mode}:")
        words = merge(search.arguments, [f"checkpointing={mode}"])
        try:
            tried = BatchSearch(words, *read_config(words), search.folder, search.seconds)
            tried.ascend(start, largest)
            found.append(tried)
        except (PtfastError, ReportedError) as error:
            say(f"left out: {error}")
            if not found:
                break
    best = max(found, key=lambda tried: tried.rate, default=search)
    if best.rate > WORTH * search.rate:
        best.refine(start, largest)
    return found


def _choose(searches: Sequence[BatchSearch]) -> tuple[BatchSearch, int] | None:
    """The search with the quickest size that fits with memory to spare, and that size."""
    best: tuple[BatchSearch, int] | None = None
    for search in searches:
        # The first one is the config as given; others have to be clearly quicker.
        to_beat = WORTH * best[0].median(best[1]) if best is not None else 0.0
        if search.rate > to_beat:
            chosen = search.confirm()
            if chosen is not None and search.median(chosen) > to_beat:
                best = search, chosen
    return best


def _write(file: Path, search: BatchSearch, chosen: int, lr_ratio: float | None) -> None:
    """Write a recipe of the size, its checkpointing, and a rate; `lr_ratio` is that of SGD's best rate."""
    config, own = search.config, search.config.batch_size
    found: dict[str, Any] = {"batch_size": chosen}
    comment = [f"Batch of {chosen} for {label(config)}, found by ptfast find batch"]
    if chosen != own and config.optimizer.lr_scaling == "none":
        adapts = any(name in config.optimizer.target.path.lower() for name in ADAPTIVE)
        given = config.optimizer.target.kwargs.get("lr")
        if lr_ratio is not None and given is not None:
            found["optimizer.lr"] = float(f"{given * (lr_ratio**0.5 if adapts else lr_ratio):.3g}")
            comment.append(f"The learning rate follows the gradient noise, from batch {own}.")
        else:
            found["optimizer.lr_scaling"] = "sqrt" if adapts else "linear"
            found["optimizer.reference_batch"] = own
            comment.append(f"The learning rate is scaled from that of batch {own}.")
    write_recipe(file, search.arguments, found, comment)


def _show(searches: Sequence[BatchSearch], best: BatchSearch, chosen: int) -> None:
    """Print a table of sizes for each mode of checkpointing, and the best."""
    most = best.median(chosen)
    several = len(searches) > 1
    for search in searches:
        say(f"\ncheckpointing={search.mode}" if several else "")
        rows = []
        for size, results in sorted(search.seen.items()):
            name = f"{size:,}" + " *" * (search is best and size == chosen)
            rate, rates = search.median(size), [rate for each in results for rate in each["rates"]]
            speed = f"{rate:,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}", f"{rate / most:.2f}"
            # In a child that tried larger sizes before, the peak is theirs.
            memory = num_bytes(min(each["memory_bytes"] for each in results))
            rows.append([name, *speed, memory])
        if rows:
            table(["batch", "samples/s", "spread", "of the best", "memory at peak"], rows)
        if search.too_large is not None:
            spare = " with room to spare" if search.too_large.get("checked_fully") else ""
            say(f"{search.too_large['size']:,} samples do not fit{spare}: {limit_of(search.config)}")
    mode = f" checkpointing={best.mode}" if several else ""
    say(f"\nbest: batch_size={chosen}{mode} at {most:,.0f} samples/s")
    if chosen == max(best.seen) and best.too_large is None and not best.refused:
        say("the largest that was tried: --to goes further")


def limit_of(config: Config) -> str:
    """What limits the memory, and the limit."""
    limit, name = memory_limit(config.device)
    return f"{name} leaves {num_bytes(limit)}"
