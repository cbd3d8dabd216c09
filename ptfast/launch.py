"""Start a run: find or make its directory, freeze the config into it, train here or under torchrun."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast import run_folder
from ptfast.config.compose import Composed
from ptfast.config.freeze import freeze, redact
from ptfast.config.read import load_config
from ptfast.config.rules import check_batch
from ptfast.config.schema import Config, changed_keys
from ptfast.distributed import Ranks, read_ranks, tell_ranks
from ptfast.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    ConfigError,
    ParallelError,
    PtfastError,
    ReportedError,
    SavedStateError,
)


@dataclass(frozen=True)
class Place:
    """Where a run goes and what it goes on from."""

    folder: Path
    state_folder: Path | None = None
    finished: bool = False
    """Nothing is left to train."""


def start(composed: Composed, config: Config, arguments: list[str]) -> int:
    """Train what `config` says and return the exit code.

    Raises:
        PtfastError: whatever stops the run before or during training.
    """
    num_ranks = resolve_num_ranks(config)
    check_batch(config.batch_size, config.micro_batches, num_ranks, config.gradients.accumulate)
    place = find_place(config)
    if place.finished:
        _say_finished(place)
        return EXIT_OK
    with _prepared(place, composed, arguments):
        if config.parallel.strategy == "ddp":
            return launch_ranks(place, num_ranks)
        from ptfast import worker

        rows = [("run", str(place.folder))]
        return worker.train(config, place.folder, ranks=Ranks(), state_folder=place.state_folder, panel=rows)


def start_rank(read_config: Callable[[], tuple[Composed, Config]], arguments: list[str]) -> int:
    """One rank under the user's own torchrun: the first composes and picks the directory, the rest follow.

    Args:
        read_config: called by the first rank alone.

    Raises:
        PtfastError: whatever stops the run; on one rank only, so that it is said once.
    """
    ranks = read_ranks()
    if not ranks.is_first:
        word = json.loads(tell_ranks(None, ranks))
        return int(word["exit_code"]) if "exit_code" in word else _train_rank(word, ranks)
    with contextlib.ExitStack() as stack:
        try:
            composed, config = read_config()
            _check_torchrun(config, ranks)
            place = find_place(config)
            if place.finished:
                _say_finished(place)
                tell_ranks(json.dumps({"exit_code": EXIT_OK}), ranks)
                return EXIT_OK
            stack.enter_context(_prepared(place, composed, arguments))
        except Exception as error:
            exit_code = error.exit_code if isinstance(error, PtfastError) else EXIT_BUG
            tell_ranks(json.dumps({"exit_code": exit_code}), ranks)
            raise
        state = str(place.state_folder) if place.state_folder is not None else None
        word = {"folder": str(place.folder.absolute()), "state": state}
        tell_ranks(json.dumps(word), ranks)
        return _train_rank(word, ranks)


def _train_rank(word: dict[str, Any], ranks: Ranks) -> int:
    from ptfast import worker

    folder, state = Path(word["folder"]), word["state"]
    _, config = load_config(folder / run_folder.CONFIG, trusted=True)
    try:
        rows = [("run", str(folder))]
        return worker.train(
            config, folder, ranks=ranks, state_folder=Path(state) if state else None, panel=rows
        )
    except Exception as error:
        # One rank speaks for all; torchrun ends the others.
        if worker.report_failure(folder, error):
            raise
        return error.exit_code if isinstance(error, PtfastError) else EXIT_BUG


@contextlib.contextmanager
def _prepared(place: Place, composed: Composed, arguments: list[str]) -> Iterator[None]:
    """The run directory made, held and furnished with everything that is known before training."""
    run_folder.create_folder(place.folder)
    with run_folder.hold(place.folder):
        for name in (run_folder.FAILURE, run_folder.SUMMARY):
            (place.folder / name).unlink(missing_ok=True)
        if place.state_folder is None:
            (place.folder / run_folder.RESOLVED).unlink(missing_ok=True)
        for warning in freeze(composed, place.folder / run_folder.CONFIG):
            print(f"ptfast: warning: {warning}", file=sys.stderr)
        command_line = ["ptfast", "train", *redact(arguments)]
        run_folder.write_json(place.folder / "environment.json", run_folder.environment(command_line))
        yield


def _say_finished(place: Place) -> None:
    print(f"{place.folder} is finished already: nothing to do. More epochs would extend it.")


def find_place(config: Config) -> Place:
    """Decide on the run directory and the state to go on from; creates nothing.

    Raises:
        ConfigError: C011 when a new run would go into a directory that holds one.
        SavedStateError: S003 when the config has changed since, naming the keys; S004 when there is nothing
            to resume.
    """
    from ptfast.saving import find_state, list_states

    resume = config.run.resume
    parent = Path(config.run.root) / run_name(config)
    given = Path(config.run.dir) if config.run.dir else None
    if resume == "never":
        if given and (given / run_folder.CONFIG).exists() and list_states(given / "saved"):
            hint = "Go on with run.resume=auto, or choose another directory"
            raise ConfigError("C011", "holds a run already", key="run.dir", value=given, suggestion=hint)
        return Place(given or run_folder.new_folder(Path(config.run.root), run_name(config)))
    if resume == "auto":
        folder = given if given and (given / run_folder.CONFIG).is_file() else None
        if given is None:
            folder = _newest_unfinished(parent, config)
        if folder is None:
            return Place(given or run_folder.new_folder(Path(config.run.root), run_name(config)))
        return _continue(folder, config, _newest_intact(folder))
    source = Path(resume)
    state_folder = find_state(source)
    folder = given or state_folder.parent.parent
    return _continue(folder, config, state_folder, check_from=state_folder.parent.parent)


def run_name(config: Config) -> str:
    """The folder under `run.root` that the runs of this config share."""
    return config.run.name or config.recipe or "train"


def _continue(
    folder: Path, config: Config, state_folder: Path | None, check_from: Path | None = None
) -> Place:
    source = check_from or folder
    _, before = load_config(source / run_folder.CONFIG, trusted=True)
    changed = changed_keys(before, config)
    if changed:
        hint = "Set them back, or start afresh with run.resume=never"
        what = f"the config has changed since: {', '.join(changed)}"
        raise SavedStateError("S003", what, key=str(source), suggestion=hint)
    summary = run_folder.read_json(folder / run_folder.SUMMARY)
    same_length = (before.epochs, before.steps) == (config.epochs, config.steps)
    finished = summary.get("status") == "finished" and same_length
    return Place(folder, state_folder, finished)


def _newest_unfinished(parent: Path, config: Config) -> Path | None:
    for folder in run_folder.list_runs(parent):
        if run_folder.read_json(folder / run_folder.SUMMARY).get("status") in ("finished", "failed"):
            continue
        try:
            _, before = load_config(folder / run_folder.CONFIG, trusted=True)
        except PtfastError:
            continue
        if not changed_keys(before, config) and (before.epochs, before.steps) == (
            config.epochs,
            config.steps,
        ):
            return folder
    return None


def _newest_intact(folder: Path) -> Path | None:
    """The newest state that is whole: a damaged one is told of and passed over."""
    from ptfast.saving import list_states, read_facts

    states = list_states(folder / "saved")
    for index, state_folder in enumerate(states):
        try:
            read_facts(state_folder)
        except SavedStateError as error:
            if index == len(states) - 1:
                raise
            print(f"ptfast: warning: {error} Going on from an older state.", file=sys.stderr)
            continue
        return state_folder
    return None


def resolve_num_ranks(config: Config) -> int:
    """Processes to launch on this machine: `parallel.nproc`, or one per visible GPU."""
    if config.parallel.strategy == "single":
        return 1
    if config.parallel.nproc != "auto":
        return int(config.parallel.nproc)
    if config.device in ("auto", "cuda"):
        import torch

        return max(torch.cuda.device_count(), 1)
    return 1


def _check_torchrun(config: Config, ranks: Ranks) -> None:
    if config.parallel.strategy == "single" and ranks.distributed:
        what = f"torchrun started {ranks.num_ranks} processes, which would all train the same"
        raise ConfigError("C011", what, key="parallel", value="single", suggestion="Add parallel=ddp")
    check_batch(config.batch_size, config.micro_batches, ranks.num_ranks, config.gradients.accumulate)


def launch_ranks(place: Place, num_ranks: int) -> int:
    """Run `num_ranks` workers under torchrun's elastic launcher and return the run's exit code.

    Raises:
        PtfastError: the first failure of a rank, said once.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The failure of a rank is said once, by us.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=place.folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": 60},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
    )
    # torchrun would leave one thread to each rank; the ranks share the cores themselves and record it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    state = str(place.state_folder) if place.state_folder is not None else ""
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", "ptfast.worker", str(place.folder), state)
    except (ChildFailedError, SignalException, KeyboardInterrupt) as error:
        return _outcome(place.folder, error)
    return EXIT_OK


def _outcome(folder: Path, error: BaseException) -> int:
    failure = run_folder.read_json(folder / run_folder.FAILURE)
    if failure:
        raise ReportedError(
            str(failure["line"]), int(failure["exit_code"]), str(failure.get("traceback", ""))
        )
    status = run_folder.read_json(folder / run_folder.SUMMARY).get("status")
    if status in ("preempted", "interrupted"):
        return EXIT_PREEMPTED if status == "preempted" else EXIT_INTERRUPTED
    failures = getattr(error, "failures", None)
    if failures:
        rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
        code = first.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        hint = "The system's memory may have run out" if code == -signal.SIGKILL else None
        raise ParallelError("P001", f"rank {rank} {how}", key=str(folder), suggestion=hint) from error
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_PREEMPTED
