"""The run directory: its path, its lock, and the JSON files in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ptfast.core import devices
from ptfast.core.errors import ConfigError, MachineError, cannot_write, name_some

SUMMARY = "summary.json"
CONFIG = "config.yaml"
RESOLVED = "resolved.json"
ENVIRONMENT = "environment.json"
DIGESTS = "secrets.json"
"""Salted digests of the values that config.yaml leaves out."""
WANDB = "wandb.json"
EXAMPLES = "examples.json"
MLFLOW = "mlflow.json"
METRICS = "metrics"
"""Folder of metrics that are not numbers, one file for each split."""
FAILURE = ".failure.json"
LOGS = (".log", ".out", ".err", ".txt")
"""Suffixes of files in the run's folder to which its output may be redirected."""


def new_folder(root: Path, name: str) -> Path:
    """Return a path for a new run, `<root>/<name>/<YYYYmmdd-HHMMSS>-<4 hex>`, without creating it."""
    return root / name / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def create_folder(folder: Path) -> list[Path]:
    """Create `folder`, and return the created folders: itself first, then its parents. Raises E001."""
    made = [path for path in folder.parents if not path.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            # If two processes create it at the same moment, only one of them has made it.
            folder.mkdir()
            made.insert(0, folder)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        hint = "Set run.root or run.dir to a folder you may write"
        raise cannot_write(error, str(folder), suggestion=hint) from error
    return made


def discard(folder: Path, made: list[Path]) -> None:
    """Remove a run without results, and the folders `made` for it."""
    logged = folder / "metrics.jsonl"
    if folder not in made or (folder / "saved").exists() or (logged.is_file() and logged.stat().st_size):
        return
    shutil.rmtree(folder, ignore_errors=True)
    for path in made:
        with contextlib.suppress(OSError):  # another run is in it
            path.rmdir()


def open_inside(path: Path, mode: str, **options: Any) -> Any:
    """Open a file of a run directory without following a link, as the directory may be someone else's."""

    def open_file(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666)

    return open(path, mode, opener=open_file, **options)


def check_links(folder: Path) -> None:
    """Reject (C013) a run directory with a link that points outside, because a run would write through it."""
    for path in (each for part in (folder, folder / "saved") if part.is_dir() for each in part.iterdir()):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            what = f"a link that leads out of somebody else's run directory, to {path.readlink()}"
            raise ConfigError("C013", what, key=str(path), suggestion="Remove it, or copy the run without it")


def check_free(folder: Path) -> None:
    """Reject (C011) a folder with files that no run has made: a run could overwrite a project's files."""
    if not folder.is_dir() or (folder / ".lock").exists() or (folder / ENVIRONMENT).exists():
        return
    files = [path for path in sorted(folder.iterdir()) if path.is_file() or path.is_symlink()]
    if found := [path.name for path in files if path.name[0] != "." and path.suffix not in LOGS]:
        what = f"contains files that no run has made: {name_some(found, 3)}"
        hint = f"Choose a new folder, such as run.dir={folder / 'run'}"
        raise ConfigError("C011", what, key="run.dir", value=folder, suggestion=hint)


_locked: set[TextIO] = set()


def _release_in_child() -> None:
    """Drop the lock in a forked process, which may outlive its parent."""
    for file in _locked:
        file.close()
    _locked.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def lock(folder: Path) -> Any:
    """Lock `folder` until the block or this process ends; E003 names the run that has locked it."""
    try:
        file: TextIO = open_inside(folder / ".lock", "a+")
    except OSError as error:
        raise cannot_write(error, str(folder)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        hint = "Wait for it to end, or set another run.dir"
        raise MachineError("E003", f"in use by {holder}", key=str(folder), suggestion=hint) from error
    _locked.add(file)
    try:
        file.truncate(0)
        file.write(
            f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        )
        file.flush()
        yield
    finally:
        # Keep the file: if it were removed, one process could lock the old file and another a new one.
        if not file.closed:
            file.truncate(0)
            file.close()
        _locked.discard(file)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, like `write_text`; numbers that are not finite become null."""
    write_text(path, json.dumps(plain_json(value), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; raises the errors of `cannot_write`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open_inside(draft, "w", encoding="utf-8") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise cannot_write(error, str(path)) from error


def plain_json(value: Any) -> Any:
    """Return `value` as JSON types: numpy and torch scalars become numbers; NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(name): plain_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; empty if it cannot be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def versions() -> dict[str, str | None]:
    """Return the versions of Python, ptfast and its libraries; None for a package that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from ptfast import __version__

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    others = {package: installed(package) for package in ("torchvision", "numpy")}
    return {"python": platform.python_version(), "torch": torch.__version__, **others, "ptfast": __version__}


def environment(command_line: list[str]) -> dict[str, Any]:
    """Return all that bit-equal results depend on: versions, device, cores, threads, commit, command line."""
    import torch

    processor = next(iter(devices.cpu_facts("model name")), platform.processor() or platform.machine())
    commit = None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        words = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=2, check=False)
        commit = done.stdout.strip() or None
    facts: dict[str, Any] = {
        "command_line": command_line,
        "started": datetime.now().isoformat(),
        **versions(),
        "platform": platform.platform(),
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "git_commit": commit,
    }
    if torch.cuda.is_available():
        facts["devices"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["cuda"] = torch.version.cuda
    return facts
