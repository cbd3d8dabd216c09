"""Start a run: find or make its directory, freeze the config into it, train here or under torchrun."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    DataError,
    MachineError,
    ParallelError,
    PtfastError,
    ReportedError,
    SavedStateError,
    render,
)

NEVER_BEGUN = tuple(kind.exit_code for kind in (ConfigError, DataError, MachineError, SavedStateError))
"""Exit codes of what is wrong before training begins, if it is wrong at all."""


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
            return launch_ranks(place, num_ranks, composed)
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
    from ptfast.worker import die_with_parent

    # A torchrun that is killed would leave its ranks running.
    die_with_parent()
    ranks = read_ranks()
    if not ranks.is_first:
        word = json.loads(tell_ranks(None, ranks))
        return int(word["exit_code"]) if "exit_code" in word else _train_rank(word, ranks)
    with contextlib.ExitStack() as stack:
        try:
            composed, config = read_config()
            stack.enter_context(composed.naming_places())
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
        word = {"folder": str(place.folder.absolute()), "state": state, "places": composed.places}
        tell_ranks(json.dumps(word), ranks)
        return _train_rank(word, ranks)


def _train_rank(word: dict[str, Any], ranks: Ranks) -> int:
    from ptfast import worker

    folder, state = Path(word["folder"]), word["state"]
    composed, config = load_config(folder / run_folder.CONFIG, trusted=True)
    # The frozen file holds every key; the user gave it elsewhere.
    composed = replace(composed, places=word["places"])
    try:
        rows = [("run", str(folder))]
        with composed.naming_places():
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
    """The run directory made, held and furnished with everything that is known before training.

    A directory made for a run that could not begin is removed again.
    """
    made = run_folder.create_folder(place.folder)
    exit_code = None
    try:
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
    except (PtfastError, ReportedError) as error:
        exit_code = error.exit_code
        raise
    finally:
        # Under the user's torchrun another rank may have spoken for this one.
        failure = run_folder.read_json(place.folder / run_folder.FAILURE)
        if (exit_code or failure.get("exit_code")) in NEVER_BEGUN:
            run_folder.discard(place.folder, made)


def _say_finished(place: Place) -> None:
    print(f"{place.folder} is finished already: nothing to do. More epochs would extend it.")


def find_place(config: Config) -> Place:
    """Decide on the run directory and the state to go on from; creates nothing.

    Raises:
        ConfigError: C011 when a new run would go into a directory that holds one.
        SavedStateError: S003 when the config has changed since, naming the keys; S004 when there is nothing
            to resume.
    """
    from ptfast.saving import find_state, read_facts

    resume = config.run.resume
    parent = Path(config.run.root) / run_name(config)
    given = Path(config.run.dir) if config.run.dir else None
    fresh = Place(given or run_folder.new_folder(Path(config.run.root), run_name(config)))
    if resume == "never":
        if given and _holds_run(given):
            hint = "Go on with run.resume=auto, or choose another directory"
            raise ConfigError("C011", "holds a run already", key="run.dir", value=given, suggestion=hint)
        return fresh
    if resume == "auto":
        folder = given if given and _holds_run(given) else None
        if given is None:
            folder = _newest_unfinished(parent, config)
        if folder is None or (state_folder := _newest_intact(folder)) is None:
            return Place(folder) if folder else fresh
        return _continue(folder, config, state_folder, folder)
    state_folder = find_state(Path(resume))
    source = state_folder.parent.parent
    read_facts(state_folder)
    if not (source / run_folder.CONFIG).is_file():
        hint = "Give a state inside a run directory, or start afresh with model.weights=PATH"
        raise SavedStateError("S004", "the run that it belongs to is not there", key=resume, suggestion=hint)
    if given and given.resolve() != source.resolve() and _holds_run(given):
        raise ConfigError("C011", "holds another run already", key="run.dir", value=given)
    return _continue(source, config, state_folder, given or source)


def run_name(config: Config) -> str:
    """The folder under `run.root` that the runs of this config share."""
    return config.run.name or config.recipe or "train"


def _holds_run(folder: Path) -> bool:
    from ptfast.saving import list_states

    return (folder / run_folder.CONFIG).is_file() and bool(list_states(folder / "saved"))


def _continue(source: Path, config: Config, state_folder: Path, folder: Path) -> Place:
    """Go on in `folder` from a state of the run in `source`, if the config allows it."""
    _, before = load_config(source / run_folder.CONFIG, trusted=True)
    changed = changed_keys(before, config)
    if changed:
        hint = "Set them back, or start afresh with run.resume=never"
        what = f"the config has changed since: {', '.join(changed)}"
        raise SavedStateError("S003", what, key=str(source), suggestion=hint)
    if folder.resolve() == source.resolve() and _is_over(source, before, config):
        return Place(folder, state_folder, finished=True)
    _check_length(run_folder.read_json(state_folder / "state.json"), before, config)
    return Place(folder, state_folder)


def _is_over(folder: Path, before: Config, config: Config) -> bool:
    """Whether the run in `folder` has nothing left to train: it came to its end, or to one by `stop`."""
    status = run_folder.read_json(folder / run_folder.SUMMARY).get("status")
    if (before.epochs, before.steps) != (config.epochs, config.steps):
        return False
    return status == "finished" or (status == "stopped" and before.stop == config.stop)


def _check_length(facts: dict[str, Any], before: Config, config: Config) -> None:
    """Refuse a length that the saved run cannot take, before anything of it is touched.

    Raises:
        SavedStateError: S003.
    """
    from ptfast.saving import check_length

    step, old_steps = int(facts["progress"]["step"]), int(facts["resolved"]["total_steps"])
    new_steps = config.steps
    if new_steps is None and before.epochs and config.epochs:
        new_steps = old_steps * config.epochs // before.epochs
    if new_steps is not None:
        shape, warmup = config.schedule.target.build(), config.schedule.warmup
        extendable = shape.extendable and (warmup.unit != "percent" or not warmup.value)
        check_length(step, old_steps, new_steps, extendable)


def _newest_unfinished(parent: Path, config: Config) -> Path | None:
    for folder in run_folder.list_runs(parent):
        status = run_folder.read_json(folder / run_folder.SUMMARY).get("status")
        if status == "finished" or not _holds_run(folder):
            continue
        try:
            _, before = load_config(folder / run_folder.CONFIG, trusted=True)
        except PtfastError:
            continue
        same_length = (before.epochs, before.steps) == (config.epochs, config.steps)
        if same_length and not changed_keys(before, config) and not _is_over(folder, before, config):
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


def launch_ranks(place: Place, num_ranks: int, composed: Composed) -> int:
    """Run `num_ranks` workers under torchrun's elastic launcher and return the run's exit code.

    Raises:
        PtfastError: the first failure of a rank, said once.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The failure of a rank is said once, by us.
    elastic_log = logging.getLogger("torch.distributed.elastic")
    elastic_log.addHandler(logging.NullHandler())
    elastic_log.propagate = False
    signals = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    named = {"signals_to_handle": signals} if "signals_to_handle" in LaunchConfig.__annotations__ else {}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
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
        **named,
    )
    # torchrun would leave one thread to each rank; the ranks share the cores themselves and record it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    state = str(place.state_folder) if place.state_folder is not None else ""
    arguments = ("-u", "-m", "ptfast.worker", str(place.folder), state, str(os.getpid()))
    failures: dict[int, Any] = {}
    received: int | None = None
    try:
        elastic_launch(launch, sys.executable)(*arguments)
    except ChildFailedError as error:
        failures = error.failures
    except SignalException as error:
        received = int(error.sigval)
    except KeyboardInterrupt:
        received = signal.SIGINT
    return _outcome(place.folder, composed, failures, received)


def _outcome(folder: Path, composed: Composed, failures: dict[int, Any], received: int | None) -> int:
    """The exit code of ranks that have ended.

    Args:
        failures: what torchrun knows of ranks that failed.
        received: the signal that ended the launcher.

    Raises:
        ParallelError: P001 when a rank was killed or left without a word.
        ReportedError: what a rank has said of its failure.
    """
    from ptfast.worker import EXIT_CODES

    # A rank that was killed is the cause of what the others say; SIGTERM is how torchrun ends those.
    ended = -signal.SIGTERM
    killed = [
        rank for rank, failure in failures.items() if failure.exitcode < 0 and failure.exitcode != ended
    ]
    if killed:
        rank = min(killed, key=lambda rank: failures[rank].timestamp)
        number = -failures[rank].exitcode
        hint = "The system's memory may have run out" if number == signal.SIGKILL else None
        what = f"rank {rank} was killed by {signal.Signals(number).name}"
        error = ParallelError("P001", what, key=str(folder), suggestion=hint)
        _note_failure(folder, str(error), error.exit_code)
        raise error
    failure = run_folder.read_json(folder / run_folder.FAILURE)
    if failure:
        line, details = str(failure["line"]), str(failure.get("traceback", ""))
        if "parts" in failure:
            # Ranks read the frozen file: only here it is known where the user gave the key.
            line = render(composed.placed(PtfastError(**failure["parts"])))
        _note_failure(folder, line.split(": ", 2)[-1], int(failure["exit_code"]))
        raise ReportedError(line, int(failure["exit_code"]), details)
    status = run_folder.read_json(folder / run_folder.SUMMARY).get("status")
    if status in EXIT_CODES:
        return EXIT_CODES[status]
    if received is not None:
        return EXIT_INTERRUPTED if received == signal.SIGINT else EXIT_PREEMPTED
    rank, failure = next(iter(failures.items()), (0, None))
    what = f"rank {rank} exited with {failure.exitcode}" if failure else "the ranks left without a summary"
    raise ParallelError("P001", what, key=str(folder))


def _note_failure(folder: Path, line: str, exit_code: int) -> None:
    """Name the cause in the summary, where the first rank knew only that another was gone."""
    path = folder / run_folder.SUMMARY
    known = run_folder.read_json(path)
    run_folder.write_json(path, {**known, "status": "failed", "exit_code": exit_code, "error": line})
