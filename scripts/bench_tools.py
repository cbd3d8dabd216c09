"""Shared by the benchmarks: intervals, quiet, and the facts that stand under a table."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import logging
import os
import platform
import random
import statistics
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def interval(ratios: Sequence[float], draws: int = 10_000) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median of `ratios`."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep what frameworks print out of the table, unless they fail."""
    said = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    except BaseException:
        print(said.getvalue(), file=sys.stderr)
        raise
    finally:
        logging.disable(logging.NOTSET)


def version_of(package: str) -> str | None:
    """The installed version of `package`, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """Python, processor and cores, for the line under a table."""
    return f"Python {platform.python_version()}, {cpu_name()}, {os.cpu_count()} cores"


def read_results(file: Path, key: dict[str, Any]) -> list[dict[str, Any]]:
    """The results in a file of JSON lines that hold all of `key`; none where there is no file yet."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in map(json.loads, lines) if key.items() <= line.items()]


def add_result(file: Path, result: dict[str, Any]) -> None:
    """Add a result to such a file."""
    with file.open("a") as stream:
        stream.write(json.dumps(result) + "\n")
