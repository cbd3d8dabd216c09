"""Samples per second and memory of a config with a loader, measured in this process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ptfast.config.checks.rules import check_batch
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks, sum_over_ranks
from ptfast.core.errors import DataError, PtfastError
from ptfast.core.machine import memory_of
from ptfast.core.run import Run
from ptfast.data.build_data import Data, Source
from ptfast.data.loaders.loader_choice import Choice, time_samples
from ptfast.data.streams.iterable import IterableSource
from ptfast.measure.loader.loader_candidate import Loader
from ptfast.measure.trials.train_timing import time_steps
from ptfast.measure.trials.trial_rank import TrialRank
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.techniques.curriculum import Curriculum
from ptfast.training.prepare_data import build_choice, load_data


def time_loader(trial: TrialRank, *, loader: Sequence[Any], seconds: float, asks: bool = False) -> None:
    """Train with a loader, and measure.

    Args:
        loader: the fields of a `Loader`.
        seconds: that the measurement takes, reading the first batches left out.
        asks: whether the result is to hold what decides which loaders make sense.

    Raises:
        PtfastError: whatever stops a run in its first steps, other than a lack of memory.
    """
    # What grows is measured at its full size, at which most of a run is spent.
    config = trial.config.model_copy(update={"curriculum": Curriculum()})
    tried = Loader(*loader)
    result: dict[str, Any] = {"loader": list(tried)}
    changed = tried.on(config)
    start = time.perf_counter()
    with trial.reporting_lack_of_memory(result):
        facts: dict[str, Any] | None = {} if asks else None
        data = _load(changed, config, trial.ranks, facts)
        result |= {"facts": facts} if facts else {}
        data = replace(data, choice=Choice(tried.kind, "as tried", tried.workers))
    with trial.building(changed, result, data) as run:
        result |= {"ready_s": time.perf_counter() - start, **_time(run, tried, seconds)}
    trial.report(result)


def _load(changed: Config, config: Config, ranks: Ranks, facts: dict[str, Any] | None) -> Data:
    """The data as the loader of `changed` wants it, noting on the way facts that are asked for."""
    device = resolve_device(config.device, ranks)
    micro_batches = check_batch(
        config.batch_size, config.micro_batches, ranks.num_ranks, config.gradients.accumulate
    )

    def chooser(config: Config) -> Any:
        return build_choice(config, micro_batches, device, num_ranks=ranks.num_ranks)

    def noting(train: Source, others: Sequence[Source]) -> Choice:
        if facts is None:
            return chooser(changed)(train, others)
        automatic = {"kind": "auto", "workers": "auto"}
        auto = config.model_copy(update={"dataloader": config.dataloader.model_copy(update=automatic)})
        facts.update(_facts(train), device=device.type)
        for name, each in {"auto": auto, "configured": config}.items():
            # The configured loader may be refused here: it is measured like any other, and reported then.
            try:
                choice = chooser(each)(train, others)
            except PtfastError:
                continue
            facts[name] = [choice.kind, choice.workers]
        return chooser(changed)(train, others)

    return load_data(changed, ranks, noting)


def _facts(train: Source) -> dict[str, Any]:
    """Properties of the training data that decide which loaders make sense."""
    if isinstance(train, IterableSource):
        shared = train.shared_by != "none"
        return {"iterable": True, "num_shards": train.num_shards if shared else None}
    return {
        "iterable": False,
        "packed": train.packed,
        "in_memory": train.in_memory,
        "repeatable": train.repeatable,
        "num_samples": len(train),
        "read_s": 0.0 if train.in_memory else time_samples(train).seconds * len(train),
    }


def _time(run: Run, loader: Loader, seconds: float) -> dict[str, Any]:
    # Workers begin together, and their batches keep coming in bursts: each has one in a round.
    per_rank = max(1, run.settings.micro_batches // run.ranks.num_ranks)
    try:
        figures = time_steps(run, seconds, max(1, -(-loader.workers // per_rank)), lambda: _memory(run))
    except DataError as error:
        if error.code != "D006":
            raise
        what = f"the data ended after {run.progress.step} steps, before {seconds:g} s of them were measured"
        hint = "Measure for less time (--seconds), or use more data"
        raise DataError("D006", what, key="data", suggestion=hint) from None
    return figures | {"samples": run.progress.samples}


def _memory(run: Run) -> dict[str, Any]:
    """Memory of all ranks and their workers."""
    children = [process.pid for process in multiprocessing.active_children() if process.pid]
    taken, kind = memory_of([os.getpid(), *children])
    total = float(sum_over_ranks(torch.tensor(float(taken), device=run.device), run.ranks))
    figures = {"memory_bytes": int(total), "memory_kind": kind}
    if run.device.type == "cuda":
        figures["gpu_bytes"] = torch.cuda.max_memory_allocated(run.device)
    return figures
