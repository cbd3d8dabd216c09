"""The process that forks the trials: it has torch and the data, but no thread and no CUDA context."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import (
    EXIT_OK,
    PtfastError,
    ReportedError,
    error_line,
    exit_code_of,
    one_line,
    text_of,
)
from ptfast.core.machine import is_memory_error
from ptfast.data.build_data import Data
from ptfast.data.loaders.loader_choice import DECODED_ONCE, Choice
from ptfast.launch.launcher import resolve_world_size
from ptfast.measure.experiment.trial import (
    Processes,
    Rendezvous,
    Segments,
    end_ranks,
    join,
    start_ranks,
)
from ptfast.report.terminal.display import Display
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.training.stages.data_stage import build_choice, load_data

NO_MEMORY = "E002"
"""Error code of a trial that ran out of memory."""
ANSWER_S = 120.0
"""Longest time to build and warm up a trial, or for a turn."""
DATA_SECTIONS = ("data", "augment", "batching", "sampling", "task", "seed", "batch_size", "steps")
SHIFT_BYTES = 64 * 2**10
LEAST_TURNS, MOST_TURNS = 4, 24
ALIKE = 2.5
"""Trials whose step times differ by at most this factor train on the same batches."""


@dataclass
class Request:
    """A block of trials to measure."""

    configs: list[list[str]]
    """Command-line arguments of each trial."""
    timed_s: float = 0.7
    """Seconds of timed training, in at least `least_turns` turns in alternating order; 0 for no timing."""
    turn_s: float = 0.05
    """Seconds of a turn, at least one step; shorter turns cancel changes of the machine's speed better."""
    least_turns: int = LEAST_TURNS
    seed: int = 0
    """Seed for the offset of each process's heap."""
    warm_s: float = 0.6
    asks: bool = False
    """Also report properties of the data."""
    spares: bool = False
    """Check at the end that the trial evaluates and saves with memory to spare."""


def _ask(
    trials: dict[int, Processes], found: list[dict[str, Any]], index: int, method: str, *arguments: float
) -> None:
    """Add the first rank's answer to a trial's results; if a rank failed, note `error` and end the trial."""
    for _, connection in trials[index]:
        # A failed rank has already answered.
        with contextlib.suppress(ConnectionError):
            connection.send((method, *arguments))
    answers: list[dict[str, Any]] = []
    for process, connection in trials[index]:
        answer = {"error": f"took more than {ANSWER_S:.0f} s"}
        try:
            if wait([connection], ANSWER_S):
                answer = connection.recv()
        except (EOFError, ConnectionError):
            process.join()
            code = process.exitcode or 0
            ended = "ran out of memory" if code == -signal.SIGKILL else f"ended with exit code {code}"
            answer = {"error": f"its process {ended}"}
        answers.append(answer)
    answer = next((answer for answer in answers if "error" in answer), answers[0])
    for name in ("time", "waiting"):
        if name in answer:
            found[index].setdefault(f"{name}s", []).append(answer.pop(name))
    if "samples_per_s" in answer:
        found[index].setdefault("rates", []).append(answer["samples_per_s"])
    found[index] |= answer
    if "error" in answer:
        end_ranks(trials.pop(index))


def plan_turns(request: Request, warm: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Plan the turns of warm trials: on the same batches if their speeds are similar, else of equal duration.

    Returns:
        For each trial, the steps in a turn, the untimed steps before those, and the untimed steps before the
            first turn, which catch up with the batches of other trials.
    """
    turns = [
        (max(1, round(max(request.turn_s, each["least_turn_s"]) / each["step_s"])), each["lead_steps"], 0)
        for each in warm
    ]
    steps_s = [each["step_s"] for each in warm]
    if max(steps_s) > ALIKE * min(steps_s):
        return turns
    num_steps, lead_steps, _ = map(max, zip(*turns, strict=True))
    last_step = max(each["steps"] for each in warm)
    return [(num_steps, lead_steps, last_step - each["steps"]) for each in warm]


class WarmParent:
    """Loads data, forks trials and runs their turns."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._num_trials = folder, 0
        self._data: dict[str, Data] = {}

    def measure(self, request: Request) -> list[dict[str, Any]]:
        """Return the metrics of each trial of a block: `times` are logs of seconds per token or sample."""
        found: list[dict[str, Any]] = [{} for _ in request.configs]
        trials: dict[int, Processes] = {}
        try:
            for index, words in enumerate(request.configs):
                try:
                    trials[index] = self._fork(words, request.seed * 4 + index)
                except PtfastError as error:
                    found[index] = _failure(error)
            for index in list(trials):
                _ask(trials, found, index, "warm_up", request.warm_s)
                if request.asks and index in trials:
                    _ask(trials, found, index, "describe_data")
            if request.timed_s and trials:
                turns = dict(zip(trials, plan_turns(request, [found[i] for i in trials]), strict=True))
                turn_s = statistics.fmean(turns[i][0] * found[i]["step_s"] for i in trials)
                num_turns = 2 * max(round(request.timed_s / turn_s / 2), request.least_turns // 2)
                for turn in range(min(num_turns, MOST_TURNS)):
                    for index in sorted(trials, reverse=turn % 2 == 1):
                        num_steps, lead_steps, behind = turns[index]
                        _ask(trials, found, index, "train", num_steps, lead_steps + (0 if turn else behind))
            for index in list(trials) if request.spares else ():
                _ask(trials, found, index, "check_spare")
        finally:
            for trial in trials.values():
                end_ranks(trial)
        return found

    def _fork(self, words: Sequence[str], seed: int) -> Processes:
        _, config = read_config(words)
        world_size, device = resolve_world_size(config), resolve_device(config.device, Ranks())
        # CUDA contexts and threads do not survive a fork; ranks load their own shares.
        forks = device.type == "cpu"
        data = self._load(config, device) if forks and world_size == 1 else None
        if threading.active_count() > 1:
            forks, data = False, None
        self._num_trials += 1
        folder = self.folder / f"trial-{self._num_trials}"
        folder.mkdir()
        # Garbage collection in the child would write to every inherited page, and so copy it.
        gc.freeze()
        how = "fork" if forks else "spawn"
        return start_ranks(_train_on_request, world_size, how, config, data, folder, seed)

    def _load(self, config: Config, device: torch.device) -> Data:
        """Return the data of a config, shared by all trials with the same data."""
        sections = {name: repr(getattr(config, name)) for name in DATA_SECTIONS}
        loader = config.dataloader
        is_named = loader.kind != "auto" and (loader.kind != "workers" or loader.workers != "auto")
        # Loaders given by name share two datasets: one that reads samples, and one that caches them.
        how = str(loader.kind in DECODED_ONCE) if is_named else repr(loader)
        padding = sections.pop("batching")
        key, of_images = (json.dumps(sections | {"loader": how, "padding": p}) for p in (padding, None))
        data = self._data.get(key) or (None if config.batching.pack else self._data.get(of_images))
        if data is None:
            choose = build_choice(config, config.micro_batches or config.gradients.accumulate, device)
            data = self._data[key] = load_data(config, Ranks(), choose)
            if data.info.kind == "image" and data.choice is not None:
                # The samples that `auto` decoded also serve the loader it chose; images are not padded.
                for loader_of in (how, str(data.choice.kind in DECODED_ONCE)):
                    shared = sections | {"loader": loader_of, "padding": None}
                    self._data.setdefault(json.dumps(shared), data)
        if not is_named:
            return data
        workers = int(loader.workers) if loader.kind == "workers" else 0
        return replace(data, choice=Choice(loader.kind, "as configured", workers))


def _train_on_request(
    connection: Connection,
    rendezvous: Rendezvous | None,
    config: Config,
    data: Data | None,
    folder: Path,
    seed: int,
) -> None:
    """Run a trial's process: build the run, then warm up and train on request."""
    # Forks share their parent's memory layout, so each heap is shifted by a different amount.
    shift = bytearray(random.Random(seed).randrange(1, 256) * SHIFT_BYTES)
    try:
        segments = Segments(config, folder, join(rendezvous, config), data, Display())
        segments.run.callbacks = []
        while True:
            method, *arguments = connection.recv()
            connection.send(getattr(segments, method)(*arguments))
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        connection.send(_failure(error))
    finally:
        del shift
        os._exit(EXIT_OK)


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the facts of a failed trial: the error, its code, and the error line and exit code of a run."""
    known = error.error if isinstance(error, ReportedError) else error
    code, clause = type(error).__name__, one_line(text_of(error))
    if isinstance(known, PtfastError):
        # Drop the place of the key, which does not exist in a trial's config.
        code, clause = known.code, str(known.changed(place=None))
    if is_memory_error(error):
        code, clause = NO_MEMORY, "ran out of memory"
    facts = {"error": clause or code, "code": code, "line": error_line(error)}
    cause = known if isinstance(known, PtfastError) else None
    return facts | {"exit_code": exit_code_of(error), "cause": cause}


def serve(connection: Connection, rendezvous: Rendezvous | None) -> None:
    """Measure the blocks requested over a connection, until the other side closes it."""
    # Exit through `finally` on these signals, so that processes and files are cleaned up within a block.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit())
    # Use no thread pool: its threads would not survive a fork.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ptfast-") as folder:
        parent = WarmParent(Path(folder))
        with contextlib.suppress(EOFError, ConnectionError, SystemExit):
            while True:
                request = connection.recv()
                try:
                    connection.send(parent.measure(request))
                except PtfastError as error:
                    connection.send(error)
    # Some libraries print long messages when the interpreter exits normally.
    os._exit(EXIT_OK)
