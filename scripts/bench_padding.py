"""The accuracy that batches of like length cost: SST-2 with and without them, paired by seed.

    python scripts/bench_padding.py FOLDER                       five seeds, `batching=none` against `buckets`
    python scripts/bench_padding.py FOLDER --seeds 3 model.depth=2 precision=bf16

FOLDER holds train.tsv, dev.tsv and test.tsv. Every run is `ptfast train recipe=text_sst2` with the same seed
on either side; the figure is the accuracy of the last step on the test split.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_tools import machine, silence, version_of  # noqa: E402

from ptfast.cli import command_line  # noqa: E402

SIDES = ("none", "buckets")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root")
    parser.add_argument("words", nargs="*", help="overrides of both sides, such as model.depth=2")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_intermixed_args()
    points: list[float] = []
    speeds: list[float] = []
    for seed in range(arguments.seeds):
        (before, slow), (after, fast) = (
            trained(arguments.root, seed, f"batching={side}", *arguments.words) for side in SIDES
        )
        points.append(100 * (after - before))
        speeds.append(fast / slow)
        print(
            f"seed {seed}: {before:.2%} padded, {after:.2%} by length, {points[-1]:+.2f} points", flush=True
        )
    line = f"mean {statistics.mean(points):+.2f} points"
    if len(points) > 1:
        line += f" (standard error {statistics.stdev(points) / len(points) ** 0.5:.2f})"
    print(f"{line}, {statistics.median(speeds):.2f}x as many samples/s")
    print(f"{' '.join(arguments.words) or 'the recipe as it is'}, torch {version_of('torch')}, {machine()}")


def trained(root: str, seed: int, *words: str) -> tuple[float, float]:
    """Accuracy on the test split, and training samples a second."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ("recipe=text_sst2", f"data.root={root}", f"seed={seed}", "log_every=100epochs")
        with silence():
            exit_code = command_line.run(
                ["train", *fixed, "eval.every=100epochs", f"run.dir={folder}/run", *words]
            )
        if exit_code:
            sys.exit(f"the run failed with exit code {exit_code}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return summary["test"]["accuracy"], summary["train_samples_per_s"]


if __name__ == "__main__":
    main()
