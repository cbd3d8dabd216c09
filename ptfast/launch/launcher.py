"""Start a run: create its directory with the frozen config, and train here or under torchrun."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptfast.config.checks.rules import check_batch
from ptfast.config.checks.trust import is_own, remember
from ptfast.config.compose import Composed
from ptfast.config.files.frozen import check_no_secrets, freeze, redact
from ptfast.config.read import load_config
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.clock import STARTED_VARIABLE
from ptfast.core.distributed import (
    Ranks,
    broadcast_text,
    count_neighbors,
    gather_texts,
    nodes_from_environment,
    under_torchrun,
    world,
)
from ptfast.core.errors import (
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
    cannot_write,
    error_line,
    exit_code_of,
    rebuilt,
)
from ptfast.core.machine import die_with_parent
from ptfast.launch.elastic import (
    can_reach,
    check_nodes,
    check_shared,
    describe_node,
    on_several_machines,
    run_elastic,
)
from ptfast.launch.resume import RunStart, find_start
from ptfast.report.goodput import read_goodput

if TYPE_CHECKING:
    from ptfast.launch.agent import Ended

FINISHED = "{} is already finished: nothing to do."
NOT_STARTED = tuple(kind.exit_code for kind in (ConfigError, DataError, MachineError, SavedStateError))
"""Exit codes of errors that occur before training begins."""


def start(composed: Composed, config: Config, words: Sequence[str] = ()) -> int:
    """Train the `config` of the command line `words`, and return the exit code."""
    if config.parallel.nnodes > 1 or nodes_from_environment():
        return _launch_node(config, words)
    return start_here(composed, config)[1]


def start_here(composed: Composed, config: Config) -> tuple[Path, int]:
    """Train on this machine; return the run directory and the exit code."""
    world_size = resolve_world_size(config)
    check_batch(config, world_size)
    launched = config.parallel.strategy != "single"
    if launched:
        check_no_secrets(composed)
    start = find_start(composed, config)
    if start.finished:
        print(FINISHED.format(start.folder))
        return start.folder, EXIT_OK
    with _prepared(start, composed):
        if launched:
            return start.folder, _run_ranks(start, composed, world_size, config.parallel.max_restarts)
        from ptfast.launch import rank_main

        code = rank_main.train(config, start.folder, ranks=Ranks(), checkpoint_folder=start.checkpoint_folder)
        return start.folder, code


def _run_ranks(start: RunStart, composed: Composed, world_size: int, max_restarts: int) -> int:
    """Train as ranks on this machine, with up to `max_restarts` restarts that make no new checkpoint."""
    from ptfast.core.tensors.checkpoint_folders import list_checkpoints

    # Use only this machine, and override torchrun's variables (`PET_*`).
    options = [
        *("--nnodes=1", f"--nproc-per-node={world_size}", "--max-restarts=0"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=timeout=60"),
        f"--rdzv-id=ptfast-{os.getpid()}",
    ]
    state, left = start.checkpoint_folder, max_restarts
    last = start.folder / "saved" / "last"
    while True:
        start_s, before = time.time(), _identity(last)
        arguments = [str(start.folder), str(state) if state is not None else "", str(os.getpid())]
        ended = run_elastic("ptfast.launch.rank_main", arguments, options)
        try:
            return _outcome(start.folder, composed, ended, start_s)
        except (ParallelError, ReportedError) as error:
            if error.exit_code != ParallelError.exit_code or ended.received is not None:
                raise
            # An unchanged link means no resume and no save: the checkpoints are from an earlier attempt.
            states = list_checkpoints(last.parent) if _identity(last) != before else []
            newest = next(iter(states), state)
            left = max_restarts if newest != state else left - 1
            if left < 0 or not max_restarts:
                raise
            begin = "the start" if newest is None else newest.name
            print(f"{error_line(error)}\nptfast: restarting the ranks from {begin}", file=sys.stderr)
            state = newest
            for name in (run_directory.FAILURE, run_directory.SUMMARY):
                (start.folder / name).unlink(missing_ok=True)


def _identity(link: Path) -> tuple[int, int] | None:
    """Return an identity that changes if the link is replaced; None without a link."""
    return (link.lstat().st_ino, link.lstat().st_mtime_ns) if link.is_symlink() else None


def start_rank(ranks: Ranks, read_config: Callable[[], tuple[Composed, Config]], words: Sequence[str]) -> int:
    """Train as one of the ranks that the user started; the first rank composes the config for all.

    Only the first calls `read_config`, and only one raises the error that stops the run, so it prints once.
    """
    if under_torchrun():
        # Otherwise a killed launcher would leave its ranks running.
        die_with_parent()
    ranks = count_neighbors(ranks)
    several = ranks.local_world_size < ranks.world_size
    nodes = gather_texts(describe_node(words), ranks, "node") if several else []
    if not ranks.is_first:
        word = json.loads(broadcast_text(None, ranks))
        if several and "exit_code" not in word:
            gather_texts(can_reach(Path(word["folder"]), word["started"]), ranks, "seen")
            word |= json.loads(broadcast_text(None, ranks, "shared"))
        return int(word["exit_code"]) if "exit_code" in word else _train_rank(word, ranks)
    with contextlib.ExitStack() as stack:
        with _telling_exit_code(ranks, "word"):
            check_nodes(nodes)
            composed, config = read_config()
            stack.enter_context(composed.naming_places())
            _check_started(config, ranks)
            check_no_secrets(composed)
            start = find_start(composed, config)
            if not start.finished:
                stack.enter_context(_prepared(start, composed))
        if start.finished:
            print(FINISHED.format(start.folder))
            broadcast_text(json.dumps({"exit_code": EXIT_OK}), ranks)
            return EXIT_OK
        state = str(start.checkpoint_folder) if start.checkpoint_folder is not None else None
        started = run_directory.read_json(start.folder / run_directory.ENVIRONMENT)["started"]
        word = {"folder": str(start.folder.absolute()), "state": state, "places": composed.places}
        broadcast_text(json.dumps({**word, "started": started}), ranks)
        if several:
            with _telling_exit_code(ranks, "shared"):
                check_shared(start.folder, gather_texts("", ranks, "seen"))
            broadcast_text("{}", ranks, "shared")
        return _train_rank(word, ranks)


@contextlib.contextmanager
def _telling_exit_code(ranks: Ranks, place: str) -> Iterator[None]:
    """Send the exit code of an error in this block to the other ranks, which wait at `place`."""
    try:
        yield
    except Exception as error:
        broadcast_text(json.dumps({"exit_code": exit_code_of(error)}), ranks, place)
        raise


def _train_rank(word: dict[str, Any], ranks: Ranks) -> int:
    from ptfast.launch import rank_main

    folder, state = Path(word["folder"]), word["state"]
    composed, config = load_config(folder / run_directory.CONFIG, trusted=True)
    # Errors name the places where the user set the keys, not the frozen file.
    composed = replace(composed, places=word["places"])
    try:
        with composed.naming_places():
            return rank_main.train(
                config, folder, ranks=ranks, checkpoint_folder=Path(state) if state else None
            )
    except Exception as error:
        # One rank reports for all; torchrun ends the others.
        if rank_main.report_failure(folder, error):
            raise
        return exit_code_of(error)


@contextlib.contextmanager
def _prepared(start: RunStart, composed: Composed) -> Iterator[None]:
    """Create, lock and fill the run directory; remove it again if the run could not start."""
    from ptfast.core.tensors.checkpoint_folders import restore_links

    config_file = start.folder / run_directory.CONFIG
    if config_file.is_file() and not is_own(config_file):
        run_directory.check_links(start.folder)
    made = run_directory.create_folder(start.folder)
    exit_code = None
    # Only the owner of the lock may remove the directory: two starts may use the same one.
    with run_directory.lock(start.folder):
        try:
            for name in (run_directory.FAILURE, run_directory.SUMMARY, run_directory.EXAMPLES):
                (start.folder / name).unlink(missing_ok=True)
            restore_links(start.folder / "saved")
            if start.checkpoint_folder is None:
                for name in (run_directory.RESOLVED, run_directory.WANDB):
                    (start.folder / name).unlink(missing_ok=True)
            for warning in freeze(composed, start.folder / run_directory.CONFIG):
                print(f"ptfast: warning: {warning}", file=sys.stderr)
            remember(start.folder / run_directory.CONFIG)
            launcher = ["ptfast"] if world(meets=True) is None else ["torchrun", "...", "-m", "ptfast"]
            command_line = [*launcher, "train", *redact(composed.arguments)]
            environment = run_directory.environment(command_line)
            run_directory.write_json(start.folder / run_directory.ENVIRONMENT, environment)
            yield
        except (PtfastError, ReportedError) as error:
            exit_code = error.exit_code
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            # Only writes fail with these errors.
            failure = cannot_write(error, str(error.filename or start.folder))
            exit_code = failure.exit_code
            raise failure from error
        finally:
            # Under the user's torchrun, another rank may have reported the failure.
            failure = run_directory.read_json(start.folder / run_directory.FAILURE)
            if (exit_code or failure.get("exit_code")) in NOT_STARTED:
                run_directory.discard(start.folder, made)


def resolve_world_size(config: Config) -> int:
    """Return the number of ranks on this machine: `parallel.nproc`, torchrun's variable, or one per GPU."""
    if config.parallel.nnodes > 1:
        what, hint = "only this machine can be measured", "Leave it out"
        raise ConfigError("C011", what, key="parallel.nnodes", value=config.parallel.nnodes, suggestion=hint)
    return _resolve_local_ranks(config)


def _resolve_local_ranks(config: Config) -> int:
    if config.parallel.strategy == "single":
        return 1
    if config.parallel.nproc != "auto":
        return int(config.parallel.nproc)
    if (told := os.environ.get("PET_NPROC_PER_NODE", "")).isdecimal():
        return int(told)
    if config.device in ("auto", "cuda"):
        import torch

        return max(torch.cuda.device_count(), 1)
    return 1


def _check_started(config: Config, ranks: Ranks) -> None:
    """Reject a config that contradicts the ranks that were started."""
    if config.parallel.strategy == "single" and ranks.distributed:
        what = f"{ranks.world_size} processes were started, all of which would train the same run"
        raise ConfigError("C011", what, key="parallel", value="single", suggestion="Add parallel=ddp")
    started = {"nproc": ranks.local_world_size, "nnodes": ranks.world_size // ranks.local_world_size}
    for name, number in started.items():
        asked = getattr(config.parallel, name)
        if asked not in ("auto", 1, number):
            what, hint = f"{number} were started", "Leave it out: the launcher decides"
            raise ConfigError("C011", what, key=f"parallel.{name}", value=asked, suggestion=hint)
    check_batch(config, ranks.world_size)


def _launch_node(config: Config, words: Sequence[str]) -> int:
    """Run this machine's ranks; each other machine starts the same command.

    The ranks read the command line as under the user's own torchrun; this only adds the rendezvous.
    """
    parallel = config.parallel
    if parallel.strategy == "single":
        what = "several machines were started, all of which would train the same run"
        raise ConfigError("C011", what, key="parallel", value="single", suggestion="Add parallel=ddp")
    if not parallel.rdzv and not any(map(os.environ.get, ("PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"))):
        hint = "Start this on each of them, with parallel.rdzv=HOST:29500 and one of them as HOST"
        what = "no rendezvous endpoint given"
        raise ConfigError("C016", what, key="parallel.nnodes", value=parallel.nnodes, suggestion=hint)
    # Ranks count wall time from their own start, because they may be restarted.
    os.environ.pop(STARTED_VARIABLE, None)
    world_size, timeout_s = _resolve_local_ranks(config), parallel.timeout.seconds
    options = on_several_machines(world_size, parallel.nnodes, parallel.rdzv, timeout_s)
    ended = run_elastic("ptfast", ["train", *words], options)
    if ended.received is not None:
        return EXIT_INTERRUPTED if ended.received == signal.SIGINT else EXIT_PREEMPTED
    if error := lost_rank(ended, socket.gethostname()):
        raise error
    # The rank that failed first has reported its error, here or on another machine.
    codes = ended.codes.values()
    return next((code for code in codes if code > 0), ParallelError.exit_code) if codes else EXIT_OK


def _outcome(folder: Path, composed: Composed, ended: Ended, start_s: float) -> int:
    """Return the exit code of a launched run whose ranks started at `start_s` and have ended.

    Raises:
        ParallelError: P001 if a rank was killed, or exited without a report.
        ReportedError: a rank's own failure.
    """
    from ptfast.launch.rank_main import EXIT_CODES

    reported = reported_failure(folder, composed)
    error = lost_rank(ended, str(folder), reported)
    if failure := error or reported:
        # The first rank's summary may only say that another rank was lost.
        line = failure.summary if isinstance(failure, ReportedError) else str(failure)
        path = folder / run_directory.SUMMARY
        known = {**run_directory.read_json(path), "status": "failed"}
        if (found := read_goodput(folder)) is not None:
            known.setdefault("goodput", found)
        run_directory.write_json(path, known | {"exit_code": failure.exit_code, "error": line})
        raise failure
    status = run_directory.read_json(folder / run_directory.SUMMARY).get("status")
    if status in EXIT_CODES:
        return EXIT_CODES[status]
    if (received := ended.received) is not None:
        # The ranks were killed before they wrote a summary, which is harmless if training had not begun.
        built, saved = (
            path.exists() and path.stat().st_mtime > start_s
            for path in (folder / run_directory.RESOLVED, folder / "saved" / "last")
        )
        if built and not saved:
            what = f"the ranks were killed after {signal.Signals(received).name}, before they had saved"
            raise ParallelError("P001", what, key=str(folder))
        return EXIT_INTERRUPTED if received == signal.SIGINT else EXIT_PREEMPTED
    rank, code = next(iter(ended.codes.items()), (0, None))
    what = f"rank {rank} exited with {code}" if code else "the ranks left without a summary"
    raise ParallelError("P001", what, key=str(folder))


def lost_rank(ended: Ended, key: str, reported: ReportedError | None = None) -> ParallelError | None:
    """Return the error for a rank that something other than the launcher killed, or for ranks that hang.

    Args:
        reported: the error that another rank reported. A killed rank is always its cause; hanging ranks are
            its cause only if it says that another rank was lost.
    """
    # torchrun ends the other ranks with SIGTERM.
    fatal = (rank for rank, code in ended.codes.items() if code < 0 and code != -signal.SIGTERM)
    if (rank := next((rank for rank in fatal if rank not in ended.hung), None)) is not None:
        number = -ended.codes[rank]
        hint = "The system's memory may have run out" if number == signal.SIGKILL else None
        what = f"rank {rank} was killed by {signal.Signals(number).name}"
        return ParallelError("P001", what, key=key, suggestion=hint)
    other_cause = reported is not None and reported.exit_code != ParallelError.exit_code
    if not ended.hung or ended.received is not None or other_cause:
        return None
    who = ", ".join(map(str, ended.hung))
    what = f"rank {who} hangs" if len(ended.hung) == 1 else f"ranks {who} hang"
    return ParallelError("P001", f"{what}: killed after the others had exited", key=key)


def reported_failure(folder: Path, composed: Composed) -> ReportedError | None:
    """Return the failure that a process reported in `folder`, with the places where the user set the keys."""
    failure = run_directory.read_json(folder / run_directory.FAILURE)
    if not failure:
        return None
    # Ranks read the frozen config; only this process knows where the user set the key.
    error = composed.placed(rebuilt(failure["parts"])) if failure["parts"] else None
    line = error_line(error) if error else failure["line"]
    return ReportedError(line, failure["exit_code"], failure["traceback"], error, failure["summary"])
