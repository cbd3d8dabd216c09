"""Hold the choice of `ptfast find workers` for slow and for fast data to the best of all loaders.

A sample of the slow data takes 20 ms to come, which are spent waiting, as for a disk or a network far away;
one of the fast data comes at once. The network takes 40 ms a step: it waits for them, as a host waits for a
GPU, or with `--network mlp` it computes and takes the cores that loading would have. `ptfast find workers`
chooses a loader for each. Then every loader of a grid trains by itself by `ptfast train`, in interleaved
rounds, and what was chosen is held against the best of the grid.

    python scripts/bench_find_workers.py [--rounds 3] [--seconds 6] [--workers 0 1 2 4 8 12 16] [--only slow]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_tools import machine
from torch import Tensor, nn
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZE, NUM_SAMPLES, NUM_FEATURES = 16, 20_000, 64
DATA = {"slow": 0.02, "fast": 0.0}
"""Seconds that a sample takes to come."""
WORDS = (
    "data=custom",
    "data._target_=bench_find_workers.Planted",
    "data.val=0",
    f"batch_size={BATCH_SIZE}",
    "device=cpu",
)
NETWORKS = {
    "waiting": ("model=custom", "model._target_=bench_find_workers.Waiting"),
    "mlp": ("model=mlp", "model.hidden=[4096,4096]"),
}
STEP_S = 0.04
"""Seconds of a step of the network that waits."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
    "OMP_NUM_THREADS": "1",
}


class Planted(Dataset[Any]):
    """Random points, each of which takes `read_s` seconds to come."""

    num_classes = 2

    def __init__(self, read_s: float) -> None:
        self.read_s = read_s

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if self.read_s:
            time.sleep(self.read_s)
        return torch.full((NUM_FEATURES,), float(index % 7)), index % 2


class Waiting(nn.Module):
    """One linear layer, and a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, features) to logits."""
        time.sleep(STEP_S)
        return self.layer(inputs)


class Row(NamedTuple):
    """A loader of the grid."""

    kind: str
    workers: int
    prefetch: int
    read_ahead: bool = False
    threads: int = 1

    @property
    def words(self) -> list[str]:
        words = [f"dataloader.kind={self.kind}", f"dataloader.read_ahead={str(self.read_ahead).lower()}"]
        if self.workers:
            words += [f"dataloader.workers={self.workers}", f"dataloader.prefetch={self.prefetch}"]
            words += [f"backend.worker_threads={self.threads}"]
        return words


def find(words: list[str], folder: Path) -> dict[str, Any]:
    """The choice of the command."""
    command = [sys.executable, "-m", "ptfast", "find", "workers", *words, "--out", "found"]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True)
    return json.loads((folder / "found" / "workers.json").read_text())


def rate(words: list[str], row: Row, expected: float, seconds: float, folder: Path) -> float:
    """Samples per second of `ptfast train`, its first logged stretch left out.

    Args:
        expected: about what will come out, for the length of the run.
    """
    # Workers hand over in bursts: a stretch is of whole rounds.
    stretch = max(2, row.workers) * max(1, round(seconds / 4 * expected / BATCH_SIZE / max(2, row.workers)))
    length = [f"steps={5 * stretch}", f"log_every={stretch}steps", "run.dir=run"]
    command = [sys.executable, "-m", "ptfast", "train", *words, *row.words, *length]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        subprocess.run(command, cwd=name, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()
    stretches = [record for record in map(json.loads, lines) if record["split"] == "train"]
    return statistics.harmonic_mean(record["samples_per_s"] for record in stretches[1:])


def compare(data: str, arguments: argparse.Namespace) -> None:
    """Choose for one of the datasets, measure the grid, and print both."""
    words = [*WORDS, *NETWORKS[arguments.network], f"data.read_s={DATA[data]}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"\n{data}: {1e3 * DATA[data]:g} ms a sample, batches of {BATCH_SIZE}", flush=True)
        start = time.perf_counter()
        found = find(words, folder)
        took_s = time.perf_counter() - start
        chosen = Row(**{name: found["chosen"][name] for name in Row._fields})
        chosen = chosen._replace(prefetch=chosen.prefetch or 2, threads=chosen.threads or 1)
        grid = [Row("workers" if count else "plain", count, 2) for count in arguments.workers]
        grid = list(dict.fromkeys([*grid, chosen]))
        trials = (trial for block in found["blocks"] for trial in block if not trial["why"])
        seen = {trial["workers"]: trial["samples_per_s"] for trial in trials}
        rates: dict[Row, list[float]] = {row: [] for row in grid}
        for _ in range(arguments.rounds):
            for row in grid:
                near = min(seen, key=lambda count: abs(count - row.workers))
                rates[row].append(rate(words, row, seen[near], arguments.seconds, folder))
        medians = {row: statistics.median(found) for row, found in rates.items()}
        best = max(medians, key=lambda row: medians[row])
        print(f"\n{data}, by ptfast train:  loader  workers  prefetch  samples/s  of the best")
        for row, value in medians.items():
            low, high = min(rates[row]), max(rates[row])
            mark = "  chosen" if row == chosen else ""
            print(
                f"  {row.kind + ', read ahead' * row.read_ahead:<20} {row.workers:>3} {row.prefetch:>3}"
                f"  {value:>8,.0f} [{low:,.0f} to {high:,.0f}]  {value / medians[best]:.3f}{mark}"
            )
        ratio = medians[chosen] / medians[best]
        text = f"{chosen.workers} workers chosen in {took_s:.0f} s, {ratio:.3f} of the best of the grid"
        print(f"{data}: {text}")


def main() -> None:
    """Compare for both datasets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement of the grid")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4, 8, 12, 16])
    parser.add_argument("--network", choices=NETWORKS, default="waiting")
    parser.add_argument("--only", choices=DATA, help="one of the two datasets")
    arguments = parser.parse_args()
    for data in [arguments.only] if arguments.only else DATA:
        compare(data, arguments)
    print(f"\nmedians of {arguments.rounds} interleaved rounds; {machine()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
