"""Shared by the tests: pinned threads, the command line in a subprocess, real data, and what is skipped."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORT_PATHS = [str(ROOT), *(str(folder) for folder in sorted((ROOT / "tests").glob("**/")))]
"""Where tests and the processes that they start find ptfast, what tests share, and each other."""
sys.path += [path for path in IMPORT_PATHS if path not in sys.path]

from forks import Forks  # noqa: E402  # the folder is on the path from here on

# Before any test imports torch: results depend on the number of threads, and two busy pools slow each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
# What torchrun sets would make a test believe that it is a rank.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(_name, None)


class Finished(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


RunPtfast = Callable[..., Finished]


@pytest.fixture(scope="session", autouse=True)
def _private_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what libraries cache out of the home folder, in this process and in its children."""
    for name in ("XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
        os.environ[name] = str(tmp_path_factory.mktemp(name.lower()))


@pytest.fixture(autouse=True)
def _quick_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process have no supervisor (a fifth of a short run) and do not wait for the disk.

    Tests marked `supervised` have both.
    """
    watch = sys.modules.get("ptfast.training.hangs.hang_watch")
    if watch is None or request.node.get_closest_marker("supervised") is not None:
        return

    def no_process(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr(watch, "subprocess", SimpleNamespace(Popen=no_process, PIPE=subprocess.PIPE))
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of two ranks in the cases of `rank_cases`, all in one pair of processes.

    The first of the processes that test at once has them go through the cases, the others wait for it.
    """
    import torch
    from ranks import on_ranks

    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if folder.name.startswith(("fork-", "popen-")) else folder) / "ranks"
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "cases.pt").exists():
            return torch.load(folder / "cases.pt", weights_only=True)
        return on_ranks("rank_cases", folder)


@pytest.fixture
def no_waits() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """`with no_waits(): ...` raises where the host waits for the GPU."""
    import torch

    @contextmanager
    def forbidden() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        yield
        torch.cuda.set_sync_debug_mode("default")

    try:
        yield forbidden
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one during the test, on a module path of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def run_ptfast(tmp_path: Path) -> RunPtfast:
    """Run `python -m ptfast ARGS...` as a user would; `run_ptfast("train", "epochs=1").code`.

    Keywords: `cwd` (default: the test's empty folder), `timeout` in seconds, `env` (added).
    """

    def run(
        *args: str, cwd: Path | None = None, timeout: float = 120, env: Mapping[str, str] | None = None
    ) -> Finished:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "ptfast", *args],
            cwd=cwd or tmp_path,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real datasets beside the repository, or the one that PTFAST_SHARED_DATA names."""
    folder = Path(os.environ.get("PTFAST_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder (PTFAST_SHARED_DATA names another)")
    return folder


LONG = ("tests/core/test_world.py", "tests/test_techniques.py", "tests/test_docs_examples.py")
"""Files that take longest: they are begun first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests run in several processes."""
    parser.addoption("--forks", type=int, default=0, help="run the tests in so many forks of this process")


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs of this machine from tests that need none, and divide the tests if that is asked for."""
    if config.getoption("--forks"):
        config.pluginmanager.register(Forks(config, config.getoption("--forks"), LONG))
    if "gpu" not in config.getoption("-m") and any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `slow` or `gpu` unless `-m` asks for them, and `gpu` without a CUDA device."""
    asked = set(re.findall(r"\w+", config.getoption("-m")))
    for item in items:
        if item.get_closest_marker("slow") and "slow" not in asked:
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with -m slow"))
        if item.get_closest_marker("gpu"):
            if "gpu" not in asked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; run with -m gpu"))
            elif not _has_cuda():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what is loaded, all of torch."""
    gc.collect()
    gc.freeze()
    # A process group that is garbage of an earlier test would wait for threads that a fork does not have.
    os.register_at_fork(after_in_child=gc.freeze)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Have it pass over what the tests of a file have loaded, too: every run collects garbage."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
