"""A search for the quickest batch size, in processes that may run out of memory."""

from __future__ import annotations

import contextlib
import mmap
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ptfast.config.compose import Composed
from ptfast.config.schema import Config
from ptfast.core.errors import DataError
from ptfast.core.machine import memory_limit, peak_memory_bytes
from ptfast.core.units import grouped, num_bytes
from ptfast.launch.launcher import resolve_num_ranks
from ptfast.measure.experiment.trial import Segments, TrialRank, measure_once
from ptfast.report.terminal.display import say
from ptfast.techniques.curriculum import Curriculum
from ptfast.training.fit import try_out

TIE = 0.02
"""Sizes whose rates differ by less are as quick."""
FINALISTS, ROUNDS = 3, 3
"""So many of the best sizes are measured so many times, in turns."""
WINDOWS = 5
"""Timed segments, of which the median counts: a neighbour's burst spoils one of them."""
LOSES = 0.9
"""Part of the best throughput below which a size has lost; after two in a row no larger one is tried."""
SPARE = 0.05
"""Part of the memory limit that has to stay free."""


class BatchSearch:
    """Measures batch sizes, each for some `seconds`, in processes that may run out of memory."""

    def __init__(
        self, arguments: Sequence[str], composed: Composed, config: Config, folder: Path, seconds: float
    ) -> None:
        self.arguments, self.composed, self.config = arguments, composed, config
        self.folder, self.seconds, self.mode = folder, seconds, config.checkpointing.mode
        self.parts = config.micro_batches or resolve_num_ranks(config) * config.gradients.accumulate
        self.seen: dict[int, list[dict[str, Any]]] = {}
        """Results by size."""
        self.refused: dict[int, str] = {}
        """By size, why the data cannot be cut into such batches."""
        self.too_large: dict[str, Any] | None = None

    def median(self, size: int) -> float:
        """Samples per second."""
        return statistics.median(result["samples_per_s"] for result in self.seen[size])

    @property
    def rate(self) -> float:
        """Samples per second of the best size; 0 if none fits."""
        return self.median(self.best()) if self.seen else 0.0

    def multiple(self, size: int) -> int:
        """The largest multiple of a batch's parts up to `size`, at least one of them."""
        return max(size // self.parts, 1) * self.parts

    def ascend(self, first: int, largest: int) -> None:
        """Double the size until it does not fit, loses twice in a row, or does not suit the data twice."""
        size, lost = first, 0
        while size <= largest and self.too_large is None and lost < 2:
            if self.seen and max(self.refused, default=0) > max(self.seen):
                break
            # Two at a time, since each child builds the data anew; the second may be one too many.
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
            self.measure([size], checked_fully=True)
            if size in self.seen:
                return size
        return None

    def measure(self, sizes: Sequence[int], *, checked_fully: bool = False) -> None:
        """Measure `sizes` in turn in one process, up to the first that does not fit."""
        keywords = {"sizes": list(sizes), "seconds": self.seconds, "checked_fully": checked_fully}
        results, killed = measure_once(
            time_batches, self.composed, self.config, self.folder, keywords, self._show
        )
        for result in results:
            if "no_room" in result:
                self.too_large = result
            elif "refused" in result:
                self.refused[result["size"]] = result["refused"]
            else:
                self.seen.setdefault(result["size"], []).append(result)
        if killed is not None and len(results) < len(sizes):
            self.too_large = {"size": sizes[len(results)], "no_room": f"ended by {killed}"}
            self._show(self.too_large)
        if self.too_large is not None:
            # A size that fits at one time and not at another does not fit.
            most = self.too_large["size"]
            self.seen = {size: trials for size, trials in self.seen.items() if size < most}

    def best(self) -> int:
        """The quickest size; among equals the smallest, which takes more steps."""
        least = (1 - TIE) * max(map(self.median, self.seen))
        return min(size for size in self.seen if self.median(size) >= least)

    def _show(self, result: dict[str, Any]) -> None:
        said = "does not fit" if "no_room" in result else result.get("refused", "")
        if "samples_per_s" in result:
            said = f"{grouped(result['samples_per_s']):>8} samples/s  {num_bytes(result['memory_bytes'])}"
        spare = " with room to spare" if result.get("checked_fully") else ""
        say(f"  {result['size']:>6,}  {said}{spare}")


@contextlib.contextmanager
def memory_to_spare(device: torch.device) -> Iterator[None]:
    """Leave the code inside a little less memory than there is.

    GPU memory, or addresses under `ulimit`, are held meanwhile. Pages of a machine or a container count only
    when they are written, so their peak is compared afterwards.
    """
    limit, name = memory_limit(device.type)
    spare = int(SPARE * limit)
    before = peak_memory_bytes("cpu")
    held: object = None
    if device.type == "cuda":
        held = torch.empty(spare, dtype=torch.uint8, device=device)
    elif name.startswith("ulimit"):
        held = mmap.mmap(-1, spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield
    if held is None and peak_memory_bytes("cpu") - before > limit - spare:
        raise MemoryError(f"out of memory but for the last {SPARE:.0%}")
    del held


def time_batches(trial: TrialRank, *, sizes: Sequence[int], seconds: float, checked_fully: bool) -> None:
    """Measure each of `sizes` for some seconds in turn, up to the first that does not fit.

    A size that is `checked_fully` also evaluates, saves and trains on, with some memory held back.
    """
    for size in sizes:
        result: dict[str, Any] = {"size": size, "checked_fully": checked_fully}
        # Inputs that grow during training are measured at their full size.
        changes = {"batch_size": size, "curriculum": Curriculum()}
        changed = replace(trial, config=trial.config.model_copy(update=changes))
        try:
            with trial.reporting_lack_of_memory(result):
                result |= _time(changed, seconds, checked_fully)
        except DataError as error:
            if error.code != "D006":
                raise
            # A size that this data cannot be cut into, such as one that leaves a single sample.
            result["refused"] = error.what
        trial.report(result)


def _time(trial: TrialRank, seconds: float, checked_fully: bool) -> dict[str, Any]:
    """The figures of one size; its memory is free again afterwards."""
    with contextlib.closing(Segments(trial)) as segments:
        run, size = segments.run, trial.config.batch_size
        if run.info.num_train is not None and size > run.info.num_train:
            what = f"more than an epoch of {run.info.num_train:,} samples"
            raise DataError("D006", what, key="batch_size", value=size)
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)
        with memory_to_spare(run.device) if checked_fully else contextlib.nullcontext():
            segments.warm_up(seconds / 2)
            first_peak = peak_memory_bytes(run.device.type)
            num_steps = max(1, round(seconds / WINDOWS / segments.step_s))
            windows = [segments.train(num_steps, segments.lead_steps) for _ in range(WINDOWS)]
            if checked_fully:
                try_out(run)
                segments.train(1, 0)
    rates = [window["samples_per_s"] for window in windows]
    return {
        "samples_per_s": statistics.median(rates),
        "rates": rates,
        "memory_bytes": max(first_peak, *(window["peak_memory_bytes"] for window in windows)),
        "micro_batches": run.micro_batches,
    }
