"""What denormals cost a CPU in the course of training: samples a second of a run, part by part.

    python scripts/bench_denormals.py [--rounds 7] [--data FOLDER]    text_sst2

Runs with and without `backend.flush_denormals` take turns. Adam's first moment of a word that does not come
shrinks by a tenth in every step, and is denormal after some 830.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_tools import interval, machine, version_of

ROOT = Path(__file__).resolve().parent.parent

PARTS = 10


def train(words: list[str], folder: Path) -> tuple[list[float], float]:
    """Samples a second in each part of a run, and the loss that it ends at.

    In a process of its own: threads that another run has started would keep its mode.
    """
    command = [sys.executable, "-m", "ptfast", "train", *words, f"run.dir={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [each["samples_per_s"] for each in records if "samples_per_s" in each]
    size = len(speeds) // PARTS
    parts = [statistics.fmean(speeds[number * size : (number + 1) * size]) for number in range(PARTS)]
    return parts, records[-1]["loss"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/sst2", help="folder of SST-2")
    asked = parser.parse_args()
    words = ["recipe=text_sst2", f"data.root={asked.data}", "device=cpu"]
    found: dict[str, list[list[float]]] = {"false": [], "true": []}
    losses: dict[str, float] = {}
    for _ in range(asked.rounds):
        for flush, rows in found.items():
            with tempfile.TemporaryDirectory() as name:
                parts, losses[flush] = train([*words, f"backend.flush_denormals={flush}"], Path(name) / "run")
            rows.append(parts)
    print("| tenth of the run | with denormals: samples/s | flushed | times as fast [95 %] |")
    print("|---|--:|--:|--:|")
    for part in range(PARTS):
        kept, flushed = ([row[part] for row in rows] for rows in found.values())
        ratios = [after / before for before, after in zip(kept, flushed, strict=True)]
        low, high = interval(ratios)
        gain = f"{statistics.median(ratios):.2f}x [{low:.2f}-{high:.2f}]"
        print(f"| {part + 1} | {statistics.median(kept):,.0f} | {statistics.median(flushed):,.0f} | {gain} |")
    print(f"\nTest loss {losses['false']:.10g} with denormals, {losses['true']:.10g} without. ", end="")
    print(f"{asked.rounds} interleaved rounds, torch {version_of('torch')}, {machine()}.")


if __name__ == "__main__":
    main()
