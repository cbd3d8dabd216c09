"""Training in segments, each measured, for as long as a process lives."""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core import run_directory
from ptfast.core.machine import (
    machine_times,
    memory_of,
    peak_memory_bytes,
    processor_time_of,
    processor_time_s,
)
from ptfast.core.protocols import StepBatch
from ptfast.core.sections.section import Need
from ptfast.core.tensors.trees import tensors_in
from ptfast.measure.trial_rank import TrialRank
from ptfast.report.terminal.display import Display
from ptfast.run import Run
from ptfast.training.build import build
from ptfast.training.loss_window import sum_and_read
from ptfast.training.step import Trainer

LEAST_STEPS = 2
"""Fewest steps of a warm-up, whose losses are compared."""
WARM_STEPS, WARM_S = 5, 0.3
"""Fewest steps and seconds of a warm-up before it can end because step times have settled."""
STEADY = 0.97
"""Step times have settled once they are no shorter than this part of earlier ones."""
ENDLESS = 2**31
REST_S = 1.0
"""Longest wait for processes that read ahead, between segments."""
LONG_TURN_S = 0.25
"""Shortest turn where batches are prefetched, or several processes or a GPU must synchronise."""
SHORT_S = 0.05
"""Steps that take no longer are preceded by one that warms caches, which went cold while idle."""


class Segments:
    """A run that trains in segments; it evaluates, saves and logs nothing, and calls no callbacks."""

    def __init__(self, trial: TrialRank) -> None:
        start_s = time.perf_counter()
        self.run = run = build(
            trial.config, ranks=trial.ranks, folder=trial.folder, display=Display(), data=trial.data
        )
        run.callbacks = []
        run.total_steps = ENDLESS
        self.trainer = Trainer(run)
        self.step_s = 0.0
        """Of the last warm-up."""
        self._num_tokens: Tensor | None = None
        self._memory: tuple[int, str] | None = None
        batches = run.train_loader.steps(run.progress.step, ENDLESS)
        self._batches = self._counted(run.clock.waiting(batches))
        # Steps whose batches may be prefetched when a segment begins.
        per_rank = max(1, run.micro_batches // run.ranks.num_ranks)
        of_workers = -(-run.resolved.workers * trial.config.dataloader.prefetch // per_rank)
        self._prefetched_steps = self._lead_steps = of_workers + run.resolved.read_ahead
        self.facts = {
            "environment": run_directory.environment([]),
            "resolved": asdict(run.resolved),
            "batch_size": run.batch_size,
            "meets": _needs_met(run),
            "build_s": time.perf_counter() - start_s,
            "built_bytes": peak_memory_bytes(run.device.type),
        }

    def warm_up(self, most_s: float) -> dict[str, Any]:
        """Train until the time of a step no longer falls, for `most_s` seconds at most and 2 steps at least.

        Losses are read after each step: the mean of the first two tells apart runs that train differently.
        """
        begin_s, times, losses = time.perf_counter(), list[float](), list[float]()
        while True:
            start_s = time.perf_counter()
            if not times:
                # This compiles.
                self._batches = self.trainer.warm_up(self._batches)
            losses.append(self._take(1))
            times.append(mean_over_ranks(time.perf_counter() - start_s, self.run))
            elapsed_s = mean_over_ranks(time.perf_counter() - begin_s, self.run)
            if len(times) >= LEAST_STEPS and elapsed_s > most_s:
                break
            if len(times) >= WARM_STEPS and elapsed_s > WARM_S:
                half = (len(times) + 1) // 2
                if statistics.median(times[half:]) >= STEADY * statistics.median(times[1:half]):
                    break
        self.step_s = statistics.median(times[len(times) // 2 :])
        self._lead_steps = self._prefetched_steps + (self.step_s < SHORT_S)
        self._rest()
        loss = statistics.fmean(losses[:LEAST_STEPS])
        is_alone = self.run.device.type == "cpu" and self.run.ranks.num_ranks == 1
        is_quick = is_alone and self._prefetched_steps < 2
        return {
            "step_s": self.step_s,
            "least_turn_s": max(self.step_s, 0.0 if is_quick else LONG_TURN_S),
            "loss": loss,
            "compiles": self.run.compilation is not None,
        }

    def train(self, seconds: float) -> dict[str, Any]:
        """Train for about `seconds`, after steps that find batches prefetched and are not counted.

        Returns:
            Figures; `time` is the logarithm of the seconds of a token, padding left out, or of a sample.
        """
        run, progress, clock = self.run, self.run.progress, self.run.clock
        num_steps = max(1, round(seconds / max(self.step_s, 1e-6)))
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)
        if self._lead_steps:
            self._take(self._lead_steps)
        self._num_tokens = None
        samples, waited_s = progress.samples, clock.ledger()["data"]
        before = ProcessorTimes.read()
        self._take(num_steps)
        after = ProcessorTimes.read()
        waited_s = clock.ledger()["data"] - waited_s
        samples = progress.samples - samples
        wall_s = mean_over_ranks(after.wall_s - before.wall_s, run)
        processor_s = sum_and_read([after.own_s - before.own_s], run.device, run.ranks)[0]
        if self._memory is None:
            workers = [process.pid for process in multiprocessing.active_children() if process.pid]
            self._memory = memory_of([os.getpid(), *workers])
        tokens = progress.window_items if run.info.kind == "tokens" else 0
        if self._num_tokens is not None:
            tokens = sum_and_read([self._num_tokens], run.device, run.ranks)[0]
        result = {
            # Over all ranks; padding is left out.
            "time": math.log(wall_s / (int(tokens) or samples)),
            "step_s": wall_s / num_steps,
            "samples_per_s": samples / wall_s,
            "memory": self._memory,
            "peak_memory_bytes": peak_memory_bytes(run.device.type),
            "waiting": mean_over_ranks(waited_s, run) / wall_s,
            "system": before.until(after, processor_s),
        }
        self._rest()
        return result

    def close(self) -> None:
        """Close the run; its memory is free once nothing refers to this object."""
        # The frame of the generator refers to this object.
        self._batches = iter(())
        self.run.close()

    def _take(self, num_steps: int) -> float:
        """Train some steps and return their mean loss, waiting for the device."""
        window = self.trainer.window
        window.clear()
        self.trainer.train(self._batches, self.run.progress.step + num_steps)
        loss = window.read()
        self.run.clock.to(None)
        return loss

    def _rest(self) -> None:
        """Free cached memory, and wait until processes that read ahead are idle."""
        if self.run.device.type == "cuda":
            torch.cuda.empty_cache()
        children = [child.pid for child in multiprocessing.active_children() if child.pid]
        end, before = time.perf_counter() + REST_S, -1.0
        while children and time.perf_counter() < end:
            now = sum(map(processor_time_of, children))
            if now == before:
                return
            before = now
            time.sleep(0.02)

    def _counted(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The same batches; where texts are padded, their real tokens are counted on the device."""
        pad_id = self.run.info.pad_id
        counts = self.run.info.kind == "text" and pad_id is not None
        for batch in batches:
            for data, num_samples in batch.micro_batches if counts else ():
                inputs = next(tensors_in(data), None)
                if num_samples and inputs is not None and inputs.dim() > 1:
                    found = (inputs != pad_id).sum()
                    self._num_tokens = found if self._num_tokens is None else self._num_tokens + found
            yield batch


def _needs_met(run: Run) -> list[Need]:
    """The needs of techniques that this model and data meet."""
    kinds = [type(module) for module in run.model.modules()]
    found: dict[Need, bool] = {
        "images": run.info.kind == "image",
        "sequences": run.info.kind in ("text", "tokens"),
        "convolutions": any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds),
        "batchnorm": any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds),
    }
    return [need for need, is_met in found.items() if is_met]


def mean_over_ranks(value: float, run: Run) -> float:
    """The mean of a positive figure over ranks, so that all ranks decide alike."""
    return max(sum_and_read([value], run.device, run.ranks)[0] / run.ranks.num_ranks, 1e-6)


@dataclass(frozen=True)
class ProcessorTimes:
    """A reading of clocks, which takes about 0.2 ms; two of them tell what others took in between."""

    wall_s: float
    own_s: float
    """Processor time of this process and its children."""
    busy_s: float | None
    """Processor time of all processes on the CPUs that this one may use; None if unknown."""
    steal_s: float | None
    """Time that a hypervisor gave to others."""

    @classmethod
    def read(cls) -> ProcessorTimes:
        busy_s, steal_s = machine_times()
        return cls(time.perf_counter(), processor_time_s(), busy_s, steal_s)

    def until(self, later: ProcessorTimes, own_s: float) -> dict[str, Any]:
        """Cores that others took on average: processes here, and other virtual machines; None if unknown.

        Args:
            own_s: processor time of all processes of the measurement.
        """
        wall_s = max(later.wall_s - self.wall_s, 1e-9)
        others = steal = None
        if self.busy_s is not None and later.busy_s is not None:
            others = max(later.busy_s - self.busy_s - own_s, 0.0) / wall_s
        if self.steal_s is not None and later.steal_s is not None:
            steal = (later.steal_s - self.steal_s) / wall_s
        return {"others_cores": others, "steal_cores": steal}
