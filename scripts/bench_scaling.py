"""Ranks of this CPU as `--dry-run --ranks N --device cpu` predicts them, and as they train.

    python scripts/bench_scaling.py                                                   ResNet-20 on digits
    python scripts/bench_scaling.py +recipe=char_gpt data.path=FILE steps=40 --ranks 1 2

Each round trains on each number of ranks, in a run of its own. Efficiency is the part of a step in which a
rank does not wait for others: gradient_sync of the ledger aside.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_tools import interval, machine, silence, version_of  # noqa: E402

WORDS = (
    "+recipe=resnet_digits",
    "model.depth=20",
    "model.width=32",
    "batch_size=256",
    "dataloader.last=drop",
)
WORDS = (*WORDS, "epochs=null", "steps=60", "data.val=0", "preset=safe")


def measured(words: list[str], num_ranks: int) -> tuple[float, float]:
    """Seconds of a step, and the part of it in which a rank does not wait for others."""
    from ptfast.core.clock import STEP
    from ptfast.core.run_directory import read_json

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ptfast", "train", *words, "device=cpu", f"run.dir={folder}/run"]
        command += [f"parallel.nproc={num_ranks}", "parallel=ddp"]
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        summary = read_json(Path(folder) / "run" / "summary.json")
    spent = {name: summary["time_budget"].get(name, 0.0) for name in STEP}
    step_s = sum(spent.values())
    return step_s / (summary["steps"] - 1), 1 - spent["gradient_sync"] / step_s


def main() -> int:
    """Predict, measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", default=WORDS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    from ptfast.cli.ranks_prediction import predict
    from ptfast.config.read import read_config

    config = read_config([*args.words, "parallel=ddp"], here=False)[1]
    with silence():
        predicted = {ranks: predict(config, ranks, "cpu").time for ranks in args.ranks}
    found: dict[int, list[tuple[float, float]]] = {ranks: [] for ranks in args.ranks}
    for index in range(args.rounds):
        turn = index % len(args.ranks)
        for ranks in args.ranks[turn:] + args.ranks[:turn]:
            found[ranks].append(measured(list(args.words), ranks))
        print(f"round {index + 1}/{args.rounds}", file=sys.stderr, flush=True)
    print("| ranks | ms a step, predicted | measured | efficiency, predicted | measured |")
    print("|--:|--:|--:|--:|--:|")
    for ranks, time in predicted.items():
        seconds, shares = zip(*found[ranks], strict=True)
        low, high = interval(seconds)
        took = f"{statistics.median(seconds) * 1e3:.1f} [{low * 1e3:.1f}-{high * 1e3:.1f}]"
        cells = [
            f"{time.step_s * 1e3:.1f}",
            took,
            f"{time.efficiency:.0%}",
            f"{statistics.median(shares):.0%}",
        ]
        print(f"| {ranks} | {' | '.join(cells)} |")
    print(f"\n{args.rounds} rounds, torch {version_of('torch')}, {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
