"""The output of a search for the batch size."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ptfast.core.machine import memory_limit
from ptfast.core.units import num_bytes
from ptfast.measure.batch.batch_search import BatchSearch
from ptfast.report.terminal.display import say, standard_output, table


def show_searches(searches: Sequence[BatchSearch], best: BatchSearch, chosen: int) -> None:
    """Tables of what was measured, one for each mode of checkpointing, and what is best."""
    most = best.median(chosen)
    several = len(searches) > 1
    for search in searches:
        say(f"\ncheckpointing={search.mode}" if several else "")
        if search.seen:
            _show_sizes(search, chosen if search is best else None, most)
        if search.too_large is not None:
            spare = " with room to spare" if search.too_large.get("rehearsed") else ""
            say(f"{search.too_large['size']:,} samples do not fit{spare}: {limit_of(search)}")
    mode = f" checkpointing={best.mode}" if several else ""
    say(f"\nbest: batch_size={chosen}{mode} at {most:,.0f} samples/s")
    if chosen == max(best.seen) and best.too_large is None and not best.refused:
        say("the largest that was tried: --to goes further")


def _show_sizes(search: BatchSearch, chosen: int | None, most: float) -> None:
    rows = []
    for size in sorted(search.seen):
        rate = search.median(size)
        low, high = search.spread(size)
        # Of a child that has tried larger sizes before, the peak is theirs.
        memory = min(result["memory_bytes"] for result in search.seen[size])
        rows.append(
            [
                f"{size:,}" + (" *" if size == chosen else ""),
                f"{rate:,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                f"{rate / most:.2f}",
                f"{1e3 * search.median(size, 'step_s'):,.1f}",
                num_bytes(memory),
            ]
        )
    headers = ["batch", "samples/s", "spread", "of the best", "ms/step", "memory at peak"]
    table(headers, rows, stream=standard_output())


def limit_of(search: BatchSearch) -> str:
    """The memory that there is, and the error when it was not enough."""
    assert search.too_large is not None
    limit, name = memory_limit(search.config.device)
    said = search.too_large["no_room"]
    # What allocators say around it helps nobody.
    if found := re.search(r"tried to allocate ([\d.]+) (\w+)", said, re.IGNORECASE):
        number, unit = found.groups()
        said = (
            f"a tensor of {num_bytes(int(number)) if unit == 'bytes' else f'{number} {unit}'} found no room"
        )
    return f"{name} leaves {num_bytes(limit)} ({said})"
