"""What Python's garbage collector costs a loader of Python objects: the share of training that it takes.

    python scripts/bench_gc.py --ranks 2 --rounds 3

Each round trains once with `backend.gc=false` and once with `backend.gc=true`.
A dataset of 100,000 nested dicts makes some 200 Python containers for each of 2,048 samples a step, beside a
small model, so collections are as frequent as they get. The cost is the time inside of collections, as
`gc.callbacks` show it, and not a difference of two runs, which other processes would hide.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


class Rows(torch.utils.data.Dataset):
    """Nested Python objects of a million containers, and as many again for each sample as it is read."""

    classes = tuple("0123456789")

    def __init__(self, num: int = 100_000) -> None:
        draw = random.Random(0).random
        self.rows = [{"id": i, "tokens": [[draw()] for _ in range(8)], "label": i % 10} for i in range(num)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self.rows[index]
        tree = [{"value": [token[0], {"of": token}]} for token in row["tokens"] for _ in range(8)]
        return torch.tensor([each["value"][0] for each in tree]), row["label"]


class Pauses:
    """Adds up the collections after step 10, and prints their share of the time."""

    def on_step(self, run: Any, step: int) -> None:
        if step == 10:
            self.start_s, self.cpu_s, self.pauses_s = time.perf_counter(), time.process_time(), []
            gc.callbacks.append(self.collect)

    def collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.began_s = time.perf_counter()
        else:
            self.pauses_s.append(time.perf_counter() - self.began_s)

    def on_end(self, run: Any, status: str) -> None:
        gc.callbacks.remove(self.collect)
        taken_s, paused_s = time.perf_counter() - self.start_s, sum(self.pauses_s)
        cpu_s, longest_ms = time.process_time() - self.cpu_s, max(self.pauses_s, default=0) * 1e3
        line = (
            f"rank {run.ranks.rank}: {len(self.pauses_s)} collections take {paused_s:.3f} of {taken_s:.1f} s"
        )
        line = f"{line}, {paused_s / taken_s:.1%}; the longest {longest_ms:.1f} ms"
        print(f"{line}; {cpu_s:.2f} s of processor time", flush=True)


def main() -> None:
    """Train on one rank or several in both ways, and show what each rank prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    for held in ["false", "true"] * given.rounds:
        print(f"backend.gc={held}\n{train(given.ranks, held)}", flush=True)


def train(ranks: int, held: str) -> str:
    """The lines of each rank of a run, or all that it printed if it fails."""
    words = ["data=custom", "data._target_=bench_gc.Rows", "data.val=0", "dataloader.kind=plain", "model=mlp"]
    words += ["model.hidden=[64]", "batch_size=2048", "steps=80", "device=cpu"]
    words += ["callbacks=[{_target_: bench_gc.Pauses}]", "saving.every=1000steps", "log_every=20steps"]
    words += [f"backend.gc={held}", f"parallel={'ddp' if ranks > 1 else 'single'}", f"parallel.nproc={ranks}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ptfast", "train", *words, f"run.dir={folder}/run"]
        paths = {"PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    shown = [line for line in done.stdout.splitlines() if line.startswith("rank ") and "collections" in line]
    return "\n".join(shown) or done.stdout + done.stderr


if __name__ == "__main__":
    main()
