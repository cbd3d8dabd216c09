"""The data path, side by side with what people write by hand: crops, JPEG, packs, texts.

    python scripts/bench_data.py                    every section
    python scripts/bench_data.py crops --rounds 15  one of them

A section is a file of `scripts/data_bench/` with a docstring, which is its title, and a function
`build(folder)` that returns its rows. In every round each row works through its share of samples once, the
rows one after another, each round beginning with another. Time is the processor's, of all threads and
children, which a busy machine lengthens less than the clock's.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_tools import interval, machine, version_of  # noqa: E402
from data_bench import Row  # noqa: E402

SECTIONS = sorted(file.stem for file in (ROOT / "scripts/data_bench").glob("[!_]*.py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(arguments.threads)
    for name in arguments.sections or SECTIONS:
        section = importlib.import_module(f"data_bench.{name}")
        with tempfile.TemporaryDirectory() as folder:
            rows = section.build(Path(folder))
            for row in rows:
                row.work()
            seconds = time_rows(rows, arguments.rounds)
            print(f"\n{(section.__doc__ or name).strip()}\n")
            show(rows, seconds)
    versions = ", ".join(f"{package} {version_of(package)}" for package in ("torch", "torchvision", "numpy"))
    print(f"\n{arguments.rounds} rounds, {arguments.threads} thread(s), {versions}, {machine()}")


def time_rows(rows: list[Row], rounds: int) -> list[list[float]]:
    """Processor seconds per item of every row in every round."""
    seconds: list[list[float]] = [[] for _ in rows]
    for number in range(rounds):
        for turn in range(len(rows)):
            which = (turn + number) % len(rows)
            start = processor_s()
            items = rows[which].work()
            seconds[which].append((processor_s() - start) / items)
    return seconds


def show(rows: list[Row], seconds: list[list[float]]) -> None:
    """A table: time of an item, and how many times as fast as the first row, with its 95 % interval."""
    width = max(len(row.name) for row in rows)
    print(f"{'':<{width}}  {'us/' + rows[0].item:>12}  {'items/s':>10}  against the first")
    for row, own in zip(rows, seconds, strict=True):
        ratios = [first / mine for first, mine in zip(seconds[0], own, strict=True)]
        low, high = interval(ratios)
        median = statistics.median(own)
        line = f"{row.name:<{width}}  {1e6 * median:>12,.2f}  {1 / median:>10,.0f}"
        print(f"{line}  {statistics.median(ratios):.2f}x [{low:.2f} to {high:.2f}]  {row.note}".rstrip())


def processor_s() -> float:
    """Processor seconds of this process and of its children that have ended."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
