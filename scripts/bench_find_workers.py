"""Hold the choice of `ptfast find workers` to the best of all loaders, in six set-ups.

    python scripts/bench_find_workers.py --images FOLDER --texts FOLDER [--rounds 3] [--only slow ...]

`slow` takes 20 ms a sample, spent waiting as for a disk far away, and its network waits 40 ms a step, as a
host does for a GPU; `neighbor` reads files while another process keeps a core busy. FOLDERs are those of
`data=imagefolder` and of `recipe=text_sst2`. For each set-up the command chooses a loader; then every loader
of a grid trains by itself by `ptfast train`, in interleaved rounds, and the choice is held against the best.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_tools import machine
from torch import Tensor, nn
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parent.parent
NUM_SAMPLES, NUM_FEATURES = 20_000, 64
READ_S, STEP_S = 0.02, 0.04
"""Seconds of a slow sample, and of a step of the network that waits."""
FILES = (
    "data=imagefolder",
    "data.root={images}",
    "model=mlp",
    "model.hidden=[64]",
    "batch_size=64",
    "augment=none",
)
SETUPS = {
    "files": FILES,
    "memory": ("recipe=resnet_digits",),
    "pack": tuple(word.replace("{images}", "{pack}") for word in FILES),
    "slow": (
        *("data=custom", "data._target_=bench_find_workers.Slow", "data.val=0", "batch_size=16"),
        *("model=custom", "model._target_=bench_find_workers.Waiting"),
    ),
    "text": ("recipe=text_sst2", "data.root={texts}"),
    "neighbor": FILES,
}
KINDS = {"files": ("memory",), "neighbor": ("memory",), "pack": ("packed", "memory"), "text": ("memory",)}
"""Kinds of the grid besides `plain` and `workers`."""
WORKERS = {"slow": (1, 2, 4, 8, 12, 16)}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])}


class Slow(Dataset[Any]):
    """Points that take their time to come."""

    num_classes = 2

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        time.sleep(READ_S)
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
    workers: int = 0
    prefetch: int = 0
    threads: int = 0

    @property
    def words(self) -> list[str]:
        words = [f"dataloader.kind={self.kind}"]
        if self.workers:
            words += [f"dataloader.workers={self.workers}", f"dataloader.prefetch={self.prefetch}"]
            words += [f"backend.worker_threads={self.threads}"]
        return words


def find(words: list[str], folder: Path) -> dict[str, Any]:
    """The choice of the command."""
    command = [sys.executable, "-m", "ptfast", "find", "workers", *words, "--out", "found"]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True)
    return json.loads((folder / "found" / "workers.json").read_text())


def rate(words: list[str], row: Row, steps_per_s: float, seconds: float, folder: Path) -> float:
    """Samples per second of `ptfast train`, its first logged stretch left out.

    Args:
        steps_per_s: about what will come out, for the length of the run.
    """
    # Workers hand over in bursts: a stretch is of whole rounds.
    stretch = max(2, row.workers) * max(1, round(seconds / 4 * steps_per_s / max(2, row.workers)))
    length = [f"steps={5 * stretch}", f"log_every={stretch}steps", "run.dir=run"]
    command = [sys.executable, "-m", "ptfast", "train", *words, *row.words, *length]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        subprocess.run(command, cwd=name, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()
    stretches = [record for record in map(json.loads, lines) if record["split"] == "train"]
    return statistics.harmonic_mean(record["samples_per_s"] for record in stretches[1:])


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep a core busy meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def compare(name: str, words: list[str], rounds: int, seconds: float, folder: Path) -> None:
    """Choose for one of the set-ups, measure the grid, and print both."""
    start = time.perf_counter()
    found = find(words, folder)
    took_s = time.perf_counter() - start
    chosen = Row(**{field: found["chosen"][field] for field in Row._fields})
    grid = [Row("workers", count, 2, 1) for count in WORKERS.get(name, (1, 2, 4))]
    grid = list(dict.fromkeys([Row("plain"), *map(Row, KINDS.get(name, ())), *grid, chosen]))
    trials = [trial for block in found["blocks"] for trial in block if not trial["why"]]
    rates: dict[Row, list[float]] = {row: [] for row in grid}
    for _ in range(rounds):
        for row in grid:
            near = min(
                trials, key=lambda trial: (trial["kind"] != row.kind, abs(trial["workers"] - row.workers))
            )
            rates[row].append(rate(words, row, 1 / near["step_s"], seconds, folder))
    medians = {row: statistics.median(found) for row, found in rates.items()}
    best = max(medians, key=lambda row: medians[row])
    print(f"\n{name}, by ptfast train:  loader  workers  samples/s  of the best")
    for row, value in medians.items():
        low, high = min(rates[row]), max(rates[row])
        spread = f"{value:>9,.0f} [{low:,.0f} to {high:,.0f}]  {value / medians[best]:.3f}"
        print(f"  {row.kind:<20} {row.workers:>3} {spread}{'  chosen' if row == chosen else ''}")
    ratio = medians[chosen] / medians[best]
    unsure = "".join(f"; {note}" for note in found["notes"] if note.startswith("cannot tell"))
    label = chosen.kind if not chosen.workers else f"{chosen.workers} workers"
    print(
        f"{name}: {label} chosen in {took_s:.0f} s, {ratio:.3f} of the best of the grid{unsure}", flush=True
    )


def main() -> None:
    """Compare in every set-up, or those named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement of the grid")
    parser.add_argument("--only", choices=SETUPS, nargs="+", default=list(SETUPS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {
            "{images}": asked.images.absolute(),
            "{texts}": asked.texts.absolute(),
            "{pack}": folder / "images",
        }
        for setup in asked.only:
            words = list(SETUPS[setup])
            for word, place in places.items():
                words = [each.replace(word, str(place)) for each in words]
            if setup == "pack":
                command = [sys.executable, "-m", "ptfast", "pack", str(asked.images), str(folder / "images")]
                subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
            (folder / setup).mkdir()
            with busy_core() if setup == "neighbor" else contextlib.nullcontext():
                compare(setup, words, asked.rounds, asked.seconds, folder / setup)
    print(f"\nmedians of {asked.rounds} interleaved rounds; {machine()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
