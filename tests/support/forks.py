"""`--forks N`: the tests of a session in forks of its process, which imports and collects once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from itertools import groupby, pairwise
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest


class Forks:
    """Plugin: forks go through the files of the tests, each takes the next one when it is free."""

    def __init__(self, config: pytest.Config, number: int, long: tuple[str, ...]) -> None:
        """Fork `number` times; `long` names the files that are begun first, so that none is waited for."""
        self.config, self.number, self.long = config, number, long
        self.next_file = multiprocessing.Value("i", 0)
        self.sender: Any = None
        """Where a fork reports to; None in the process that forks."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        config = self.config
        if session.testsfailed or config.option.collectonly:
            return None
        files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
        rank = {name: position for position, name in enumerate(self.long)}
        files.sort(key=lambda items: rank.get(items[0].nodeid.partition("::")[0], len(rank)))
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        capture.suspend_global_capture()
        capture.stop_global_capturing()
        config._tmp_path_factory.getbasetemp()  # pyright: ignore[reportAttributeAccessIssue]
        sys.stdout.flush()
        sys.stderr.flush()
        forks = dict(self._fork(session, files, f"fork-{number}") for number in range(self.number))
        capture.start_global_capturing()
        try:
            self._receive(session, forks)
        finally:
            for pid in forks.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return True

    def _fork(self, session: pytest.Session, files: list[list[pytest.Item]], name: str) -> tuple[Any, int]:
        """Start a fork and return where it reports, and its process id."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        with warnings.catch_warnings():
            # Python 3.12 warns that other threads may hold a lock.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            sender.close()
            return receiver, pid
        try:
            receiver.close()
            atexit._clear()  # what the first process leaves behind is its own
            self.sender = sender
            from ptfast.launch import host_process  # loads torch, for which conftest sets the environment

            host_process._forked = False  # torch had no threads yet that this process could miss
            self._run(session, files, name)
            atexit._run_exitfuncs()
            sender.send(("end", None))
        except BaseException:
            sender.send(("error", traceback.format_exc()))
        finally:
            os._exit(0)

    def _run(self, session: pytest.Session, files: list[list[pytest.Item]], name: str) -> None:
        """In a fork: run files until there are no more, with an output and a folder of its own."""
        plugins = self.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        capture: Any = plugins.get_plugin("capturemanager")
        capture.start_global_capturing()
        factory: Any = self.config._tmp_path_factory  # pyright: ignore[reportAttributeAccessIssue]
        factory._basetemp = Path(factory.getbasetemp(), name)
        factory._basetemp.mkdir()

        def take() -> list[pytest.Item]:
            with self.next_file.get_lock():
                self.next_file.value += 1
                return files[self.next_file.value - 1] if self.next_file.value <= len(files) else []

        items = take()
        while items:
            for item, following in pairwise(items):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            # Known before the last test ends, so that fixtures of the session are kept for them.
            after = take()
            last = items[-1]
            last.config.hook.pytest_runtest_protocol(item=last, nextitem=after[0] if after else None)
            items = after

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        if self.sender is not None:
            self.sender.send(("start", (nodeid, location)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.sender is not None:
            self.sender.send(
                ("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report))
            )

    def _receive(self, session: pytest.Session, forks: dict[Any, int]) -> None:
        """Report what the forks report, until all have ended."""
        hook = self.config.hook
        running: dict[Any, Any] = {}
        busy = list(forks)
        while busy:
            receiver: Any
            for receiver in connection.wait(busy):
                try:
                    kind, content = receiver.recv()
                except EOFError:
                    kind, content = "error", "The process of this test died. Tests behind it were not run."
                if kind == "start":
                    running[receiver] = content
                elif kind == "report":
                    report = hook.pytest_report_from_serializable(config=self.config, data=content)
                    hook.pytest_runtest_logreport(report=report)
                else:
                    busy.remove(receiver)
                    if kind == "error":
                        name, place = running.get(receiver, ("before the first test", ("", 0, "")))
                        failed = pytest.TestReport(name, place, {}, "failed", content, "call")
                        hook.pytest_runtest_logreport(report=failed)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
