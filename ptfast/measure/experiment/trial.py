"""Trials: the processes of a measurement, one per rank, which train in timed segments."""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.distributed import Ranks, init_process_group
from ptfast.core.machine import (
    die_with_parent,
    memory_limit,
    memory_of,
    peak_memory_bytes,
    processor_time_of,
)
from ptfast.core.protocols import StepBatch
from ptfast.core.sections.section import Need
from ptfast.core.tensors.trees import tensors_in
from ptfast.data.build_data import Data
from ptfast.data.loaders.loader_choice import time_samples
from ptfast.data.streams.iterable import IterableSource
from ptfast.report.terminal.display import Display
from ptfast.run import Run
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.techniques.rewrites.model_rewrites import FusedRMSNorm, find_rms_norms
from ptfast.training.build import build
from ptfast.training.fit import try_out
from ptfast.training.loop.loss_accumulator import begin_sums
from ptfast.training.loop.step import Trainer
from ptfast.training.stages.data_stage import load_data

Rendezvous = tuple[int, int, int]
"""A process's rank, the world size, and the port of the rendezvous."""
Processes = list[tuple[Any, Connection]]
"""The process of each rank, and the connection to it."""
LEAST_STEPS = 2
"""Fewest steps of a warm-up; their losses are compared."""
WARM_STEPS, WARM_S = 5, 0.3
"""Fewest steps and seconds of a warm-up before steady step times can end it."""
STEADY = 0.97
"""Step times are steady once they are at least this fraction of earlier ones."""
ENDLESS = 2**31
REST_S = 1.0
"""Longest wait for data workers, between segments."""
LONG_TURN_S = 0.25
"""Shortest turn if batches are prefetched, or several processes or a GPU must synchronize."""
SPARE = 0.05
"""Fraction of the memory limit that must stay free."""
SHORT_S = 0.05
"""Steps up to this length are preceded by an untimed one, because caches went cold while idle."""


def start_ranks(target: Callable[..., None], world_size: int, method: str, *arguments: Any) -> Processes:
    """Start processes that end with this one and ignore Ctrl-C themselves.

    Each calls `target` with a connection, its rendezvous (None for a single rank) and `arguments`.
    """
    context: Any = multiprocessing.get_context(method)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks: Processes = []
    # Starting the tracker unblocks SIGINT, so it comes first; ranks then inherit the blocked signal.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for rank in range(world_size):
            here, there = context.Pipe()
            rendezvous = (rank, world_size, port) if world_size > 1 else None
            process = context.Process(
                target=_start, args=(os.getpid(), target, there, rendezvous, *arguments)
            )
            process.start()
            there.close()
            ranks.append((process, here))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ranks


def _start(parent: int, target: Callable[..., None], *arguments: Any) -> None:
    die_with_parent(parent)
    target(*arguments)


def end_ranks(ranks: Processes) -> None:
    for process, connection in ranks:
        process.kill()
        process.join()
        connection.close()


def join(rendezvous: Rendezvous | None, config: Config) -> Ranks:
    """Join the process group of this trial, and return its `Ranks`."""
    if rendezvous is None:
        return Ranks()
    rank, size, port = rendezvous
    own = Ranks(rank, rank, size, size)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    init_process_group(resolve_device(config.device, own), own, config.parallel.timeout.seconds)
    return own


@contextmanager
def memory_to_spare(device: torch.device, before: int) -> Iterator[None]:
    """Raise MemoryError unless the code inside this context fits with memory to spare.

    GPU memory, or address space under `ulimit`, is reserved meanwhile. A machine or a container counts pages
    only when they are written, so the peak, minus the amount used `before`, is compared afterwards.
    """
    limit, name = memory_limit(device.type)
    spare = int(SPARE * limit)
    reserved: object = None
    if device.type == "cuda":
        reserved = torch.empty(spare, dtype=torch.uint8, device=device)
    elif name.startswith("ulimit"):
        reserved = mmap.mmap(-1, spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield
    if reserved is None and peak_memory_bytes("cpu") - before > limit - spare:
        raise MemoryError(f"out of memory, except for the last {SPARE:.0%}")
    del reserved


class Segments:
    """A run that trains in segments, without evaluating, saving or logging."""

    def __init__(
        self, config: Config, folder: Path, ranks: Ranks, data: Data | None, display: Display
    ) -> None:
        self.run = run = build(config, ranks=ranks, folder=folder, display=display, data=data)
        self._config, self._data = config, data
        self.batch: StepBatch | None = None
        """The first batch."""
        run.total_steps = ENDLESS
        self.trainer = Trainer(run)
        self.step_s = 0.0
        """Seconds per step in the last warm-up."""
        self.lead_steps = 0
        """Untimed steps before each segment, to use up prefetched batches and warm the caches."""
        self._num_tokens: Tensor | None = None
        self._memory: tuple[int, str] | None = None
        self._is_alone = run.device.type == "cpu" and run.ranks.world_size == 1
        batches = run.train_loader.steps(run.progress.step, ENDLESS)
        self._batches = self._counted(run.clock.waiting(batches))
        # The number of steps whose batches may already be prefetched when a segment begins.
        per_rank = max(1, run.micro_batches // run.ranks.world_size)
        self._prefetched_steps = -(-run.train_loader.workers * config.dataloader.prefetch // per_rank)
        kinds = [type(module) for module in run.model.modules()]
        needs: dict[Need, bool] = {
            "images": run.info.kind == "image",
            "sequences": run.info.kind in ("text", "tokens"),
            "convolutions": any(issubclass(kind, nn.modules.conv._ConvNd) for kind in kinds),
            "batchnorm": any(issubclass(kind, nn.modules.batchnorm._BatchNorm) for kind in kinds),
            "rms_norm": FusedRMSNorm in kinds or bool(find_rms_norms(run.model)),
        }
        self.facts = {
            "environment": run_directory.environment([]),
            "choices": run.choices.values(),
            "batch_size": run.batch_size,
            "num_train": run.info.num_train,
            "meets": [need for need, is_met in needs.items() if is_met],
            "built_bytes": peak_memory_bytes(run.device.type),
        }

    def warm_up(self, most_s: float) -> dict[str, Any]:
        """Train until steps stop getting faster, for at most `most_s` seconds and at least 2 steps.

        The mean loss of the first two steps distinguishes runs that train differently.
        """
        begin_s, times, losses = time.perf_counter(), list[float](), list[float]()
        # The first step compiles.
        self._batches = self.trainer.warm_up(self._batches)
        while True:
            start_s = time.perf_counter()
            losses.append(self.take(1))
            times.append(mean_over_ranks(time.perf_counter() - start_s, self.run))
            elapsed_s = mean_over_ranks(time.perf_counter() - begin_s, self.run)
            if len(times) >= LEAST_STEPS and elapsed_s > most_s:
                break
            if len(times) >= WARM_STEPS and elapsed_s > WARM_S:
                half = (len(times) + 1) // 2
                if statistics.median(times[half:]) >= STEADY * statistics.median(times[1:half]):
                    break
        self.step_s = statistics.median(times[len(times) // 2 :])
        self.lead_steps = self._prefetched_steps + (self.step_s < SHORT_S)
        self._rest()
        is_quick = self._is_alone and self._prefetched_steps < 2
        return self.facts | {
            "steps": len(times),
            "step_s": self.step_s,
            "lead_steps": self.lead_steps,
            "least_turn_s": max(self.step_s, 0.0 if is_quick else LONG_TURN_S),
            "loss": statistics.fmean(losses[:LEAST_STEPS]),
        }

    def train(self, num_steps: int, lead_steps: int) -> dict[str, Any]:
        """Train `num_steps` steps after untimed lead steps, and return their metrics."""
        run, progress, clock = self.run, self.run.progress, self.run.clock
        if run.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.device)
        if lead_steps:
            self.take(lead_steps)
        self._num_tokens = None
        samples, spent_s, start_s = progress.samples, clock.ledger(), time.perf_counter()
        self.take(num_steps)
        wall_s = time.perf_counter() - start_s
        spent_s = {cause: now_s - spent_s[cause] for cause, now_s in clock.ledger().items()}
        samples, wall_s = progress.samples - samples, mean_over_ranks(wall_s, run)
        if self._memory is None:
            workers = [process.pid for process in multiprocessing.active_children() if process.pid]
            self._memory = memory_of([os.getpid(), *workers])
        tokens = progress.window_items if run.info.kind == "tokens" else 0
        if self._num_tokens is not None:
            tokens = begin_sums([self._num_tokens], run.device, run.ranks).read()[0]
        result = {
            # The log of the seconds per token (without padding) or per sample, over all ranks.
            "time": math.log(wall_s / (int(tokens) or samples)),
            "step_s": wall_s / num_steps,
            "samples_per_s": samples / wall_s,
            "memory": self._memory,
            "peak_memory_bytes": peak_memory_bytes(run.device.type),
            "waiting": mean_over_ranks(spent_s["data"], run) / wall_s,
        }
        self._rest()
        return result

    def check_spare(self) -> dict[str, Any]:
        """Train on, evaluate and save while some memory is reserved."""
        with memory_to_spare(self.run.device, self.facts["built_bytes"]):
            self.take(1)
            try_out(self.run)
            self.take(1)
        return {}

    def describe_data(self) -> dict[str, Any]:
        """Return the properties of the training data that determine which loaders are useful."""
        train = (self._data or load_data(self._config)).train
        streams = isinstance(train, IterableSource)
        facts = {
            "device": self.run.device.type,
            "iterable": streams,
            "num_shards": train.num_shards if streams and train.shared_by != "none" else None,
            "in_memory": not streams and train.storage == "memory",
            "packed": not streams and train.storage == "pack",
            "repeatable": not streams and train.repeatable,
            "read_s": 0.0,
        }
        if not (streams or facts["in_memory"]):
            facts["read_s"] = time_samples(train).seconds * len(train)
        return {"data": facts}

    def take(self, num_steps: int) -> float:
        """Train `num_steps` steps, wait for the device, and return the mean loss."""
        losses = self.trainer.losses
        losses.clear()
        self.trainer.train(self._batches, self.run.progress.step + num_steps)
        loss = losses.read()
        self.run.clock.to(None)
        return loss

    def _rest(self) -> None:
        """Free cached memory, and wait until data workers are idle."""
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
        """Yield the batches unchanged; if texts are padded, count their real tokens on the device."""
        pad_id = self.run.info.pad_id
        counts = self.run.info.kind == "text" and pad_id is not None
        for batch in batches:
            for data, num_samples in batch.micro_batches if counts else ():
                inputs = next(tensors_in(data), None)
                if num_samples and inputs is not None and inputs.dim() > 1:
                    found = (inputs != pad_id).sum()
                    self._num_tokens = found if self._num_tokens is None else self._num_tokens + found
            self.batch = self.batch or batch
            yield batch


def mean_over_ranks(value: float, run: Run) -> float:
    """Return the mean of a positive number over ranks, so that all ranks make the same decision."""
    if run.ranks.world_size == 1:
        return max(value, 1e-6)
    return max(begin_sums([value], run.device, run.ranks).read()[0] / run.ranks.world_size, 1e-6)
