"""A command in a fork of the tests' process: torch is imported there, so it starts at once."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from ptfast.cli import command_line


def run_command(*words: str) -> Callable[[], int]:
    """`ptfast WORDS...`, to be run in a fork."""
    return lambda: command_line.run(list(words))


def fork() -> int:
    """As `os.fork`, without Python 3.12's warning that other threads may hold a lock."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class Forked:
    """A process in a session of its own that calls `act`, whose result is its exit code."""

    def __init__(self, act: Callable[[], int | None], env: Mapping[str, str] = {}) -> None:
        self.returncode: int | None = None
        self._ended = "", ""
        self._folder = Path(tempfile.mkdtemp())
        self._said = [self._folder / "out", self._folder / "err"]
        self.pid = fork()
        if self.pid == 0:
            code = 99
            try:
                os.setsid()
                for number, path in enumerate(self._said, start=1):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
                os.environ.update(env)
                code = act() or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """What it has said on stdout and stderr once it has ended."""
        end = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"still running after {timeout} s, and said {self._read()}")
            time.sleep(0.02)
        if self._folder.exists():
            self._ended = self._read()
            shutil.rmtree(self._folder)
        return self._ended

    def _read(self) -> tuple[str, str]:
        out, err = (path.read_text() for path in self._said)
        return out, err
