"""Processes with all modules imported, forked from a server that has done nothing else."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ptfast.core.errors import EXIT_INTERRUPTED
from ptfast.core.machine import die_with_parent, watch_others
from ptfast.core.plain_display import LastingOutput
from ptfast.launch.rank_main import STARTED_VARIABLE

PRELOADED = (
    "ptfast.cli.command_line",
    "ptfast.config.read",
    "ptfast.launch.launcher",
    "ptfast.training.build",
    "ptfast.training.fit",
)
"""Modules that every training run imports."""
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}


def warm_process(
    act: Callable[..., int],
    *arguments: Any,
    modules: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> BaseProcess:
    """Return a process that calls `act` and exits with its result; `start_process` starts it.

    It is forked from a server that has imported `PRELOADED`, and has no threads, no CUDA context and no state
    of this process, so that it computes the same as a new process. Outside Linux, where torch does not
    survive a fork, it is a new process.

    Args:
        act: a module-level function; it is pickled, as are `arguments`.
        modules: further modules for the server to import, because the first process needs them.
        environment: variables to set.
        output: the file that replaces the new process's standard output and error.
    """
    is_linux = sys.platform == "linux"
    context: Any = multiprocessing.get_context("forkserver" if is_linux else "spawn")
    if is_linux:
        context.set_forkserver_preload([*PRELOADED, *modules])
    return context.Process(target=_main, args=(act, arguments, dict(environment or {}), output))


def start_process(process: BaseProcess) -> None:
    """Start a process of `warm_process`; signals that end this process are deferred meanwhile."""
    # In a worker of joblib, the start method is one that only joblib knows; the new process would inherit it.
    multiprocessing.set_start_method(None, force=True)
    # The resource tracker must run before signals are blocked: its start unblocks them.
    resource_tracker.ensure_running()
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals to a whole job or terminal must not reach the server, or its children would die.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _main(
    act: Callable[..., int], arguments: tuple[Any, ...], environment: dict[str, str], output: Path | None
) -> None:
    """Make this process like a new one, and call `act`."""
    exit_code = EXIT_INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.environ.update({STARTED_VARIABLE: repr(time.monotonic()), **environment})
        if output is not None:
            with output.open("ab", buffering=0) as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        LastingOutput.install()
        watch_others()
        # Otherwise data loaders would start their workers with the start method of this process.
        multiprocessing.set_start_method(None, force=True)
        # The server ends when no process has this open: leave it to the process that started the others.
        server: Any = forkserver._forkserver
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = None
        die_with_parent()
        exit_code = LastingOutput.exit_code(act(*arguments))
    # The interpreter runs these at exit, but multiprocessing does not.
    atexit._run_exitfuncs()
    sys.exit(exit_code)
