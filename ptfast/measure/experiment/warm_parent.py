"""The process that trials are forked from: it has torch and the data, no thread and no CUDA context.

`python -m ptfast.measure.experiment.warm_parent FD PARENT` serves requests over a socket: blocks of trials.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_OK, PtfastError, one_line
from ptfast.core.machine import die_with_parent, is_memory_error
from ptfast.data.build_data import Data
from ptfast.measure.trials.step_trial import Stretches
from ptfast.measure.trials.trial_process import reason
from ptfast.measure.trials.trial_rank import TrialRank
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.training.prepare_data import build_choice, load_data

BUILD_S = 120.0
"""Seconds that a trial may take to be built and to warm up before it is given up."""
DATA_SECTIONS = (
    "data",
    "dataloader",
    "augment",
    "batching",
    "sampling",
    "task",
    "seed",
    "batch_size",
    "steps",
)
SHIFT_BYTES = 64 * 2**10


@dataclass
class Request:
    """A block of trials to measure.

    Args:
        configs: arguments of each trial.
        turn_s: seconds that a trial trains before the next one's turn.
        passes: turns of each; every second pass goes backwards.
        seed: of the shift of each process's heap.
        warm_s: seconds of warming up at most.
    """

    configs: list[list[str]]
    turn_s: float = 0.35
    passes: int = 4
    seed: int = 0
    warm_s: float = 2.0


class Trial:
    """One config in a process of its own, forked from this one, that trains when it is told to."""

    def __init__(self, config: Config, data: Data, folder: Path, seed: int) -> None:
        fork = multiprocessing.get_context("fork")
        self.connection, there = fork.Pipe()
        self.process = fork.Process(target=_train_on_request, args=(there, config, data, folder, seed))
        self.process.start()
        there.close()

    def ask(self, *request: Any) -> None:
        """Send a request without waiting for its answer; one that has failed has answered already."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(request)

    def answer(self, seconds: float) -> dict[str, Any]:
        """What a request came to; `error` holds why it came to nothing."""
        try:
            if not wait([self.connection], seconds):
                return {"error": f"took more than {seconds:.0f} s"}
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode or 0
            ended = "ran out of memory" if code == -signal.SIGKILL else f"ended with exit code {code}"
            return {"error": f"its process {ended}"}

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class WarmParent:
    """Loads data, forks trials and takes turns with them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._num_trials = folder, 0
        self._data: dict[str, Data] = {}

    def measure(self, request: Request) -> list[dict[str, Any]]:
        """The figures of each trial of a block: `times` are logarithms of seconds per token or sample."""
        found: list[dict[str, Any]] = [{} for _ in request.configs]
        trials: dict[int, Trial] = {}
        try:
            for index, words in enumerate(request.configs):
                try:
                    trials[index] = self._fork(words, request.seed * 4 + index)
                except PtfastError as error:
                    found[index]["error"] = reason(error)
            for index, trial in list(trials.items()):
                trial.ask("warm", request.warm_s)
                self._note(found, trials, index, trial.answer(BUILD_S))
            self._take_turns(request, found, trials)
        finally:
            for trial in trials.values():
                trial.end()
        return found

    def _take_turns(self, request: Request, found: list[dict[str, Any]], trials: dict[int, Trial]) -> None:
        for turn in range(request.passes):
            for index in sorted(trials, reverse=turn % 2 == 1):
                trials[index].ask("train", request.turn_s)
                self._note(found, trials, index, trials[index].answer(BUILD_S))

    def _note(
        self, found: list[dict[str, Any]], trials: dict[int, Trial], index: int, answer: dict[str, Any]
    ) -> None:
        """Add an answer to what is found of a trial; one that failed is ended."""
        time = answer.pop("time", None)
        system = answer.pop("system", None)
        found[index] |= answer
        if time is not None:
            found[index].setdefault("times", []).append(time)
            found[index].setdefault("system", []).append(system)
        if "error" in answer:
            trials.pop(index).end()

    def _fork(self, words: Sequence[str], seed: int) -> Trial:
        _, config = read_config(words)
        data = self._load(config)
        self._num_trials += 1
        folder = self.folder / f"trial-{self._num_trials}"
        folder.mkdir()
        gc.freeze()
        if (count := threading.active_count()) > 1:
            raise RuntimeError(f"{count} threads run in the process that trials are forked from")
        return Trial(config, data, folder, seed)

    def _load(self, config: Config) -> Data:
        """The data of a config, which every trial of the same data shares."""
        sections = {name: getattr(config, name) for name in DATA_SECTIONS}
        key = json.dumps({name: repr(section) for name, section in sections.items()})
        if key not in self._data:
            device = resolve_device(config.device, Ranks())
            choose = build_choice(config, config.micro_batches or config.gradients.accumulate, device)
            self._data[key] = load_data(config, Ranks(), choose)
        return self._data[key]


def _train_on_request(connection: Connection, config: Config, data: Data, folder: Path, seed: int) -> None:
    """A trial's process: builds the run when it is told to warm up, then trains turn after turn."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Forks share the layout of their parent's memory: each begins its own elsewhere.
    shift = bytearray(random.Random(seed).randrange(1, 256) * SHIFT_BYTES)
    try:
        run = Turns(config, data, folder)
        while True:
            what, *arguments = connection.recv()
            connection.send(run.warm_up(*arguments) if what == "warm" else run.train(*arguments))
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        what = "ran out of memory" if is_memory_error(error) else reason(Exception(str(error)))
        connection.send({"error": one_line(what or type(error).__name__)})
    finally:
        del shift
        os._exit(EXIT_OK)


class Turns:
    """A run that trains in turns of about equal time."""

    def __init__(self, config: Config, data: Data, folder: Path) -> None:
        rank = TrialRank(config, folder, Ranks(), {"data": data})
        self.stretches, self.step_s = Stretches(rank), 0.0

    def warm_up(self, most_s: float) -> dict[str, Any]:
        """Warm up; the mean loss of the first steps tells runs apart that train differently."""
        warm = self.stretches.warm_up(most_s)
        self.step_s = warm["step_s"]
        built = self.stretches.built
        facts = {name: built[name] for name in ("resolved", "batch_size", "meets", "build_s", "environment")}
        return facts | {"loss": math.fsum(warm["losses"]) / len(warm["losses"]), "compiles": warm["compiles"]}

    def train(self, seconds: float) -> dict[str, Any]:
        """Train for about `seconds`, and report the logarithm of the time of a token, or of a sample."""
        num_steps = max(1, round(seconds / max(self.step_s, 1e-6)))
        figures = self.stretches.train(num_steps)
        units = figures["tokens"] or figures["samples"]
        names = ("peak_memory_bytes", "waiting", "system")
        return {"time": math.log(figures["wall_s"] / units)} | {name: figures[name] for name in names}


def main() -> None:
    """Serve requests until the other side is closed."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    # No pool of threads: one would be missing in every fork.
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    with tempfile.TemporaryDirectory(prefix="ptfast-") as folder:
        server = WarmParent(Path(folder))
        while True:
            try:
                request = connection.recv()
            except EOFError:
                return
            try:
                connection.send(server.measure(request))
            except PtfastError as error:
                connection.send(error)


if __name__ == "__main__":
    main()
