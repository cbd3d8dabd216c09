"""Train, again and again, at the batch that `ptfast find batch` finds near a limit of memory.

    python scripts/bench_find_batch.py                        a wide MLP on the digits, under ulimit -v
    python scripts/bench_find_batch.py --limit-gib 4 --runs 20 -- model=mlp model.hidden=[100000]

Searches under the limit, writes the recipe, and trains it from the start as often as asked for, evaluating
and saving, each run under the same limit and in a process of its own, with another seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_tools import machine, version_of  # noqa: E402

WIDE = ("model=mlp", "model.hidden=[100000]", "optimizer=sgd", "device=cpu")


def limited(words: list[str], limit_gib: float, folder: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ptfast with so many addresses."""
    command = shlex.join([sys.executable, "-m", "ptfast", *words])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", f"ulimit -v {int(limit_gib * 2**20)}; exec {command}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def main() -> None:
    """Search once, train many times, and say how many came to the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", default=list(WIDE), help="key=value of the config")
    parser.add_argument("--limit-gib", type=float, default=3.4, help="of ulimit -v")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="of each run")
    parser.add_argument("--from", dest="smallest", default="16")
    parser.add_argument("--seconds", default="0.2", help="that each size is measured for")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--from", arguments.smallest, "--seconds", arguments.seconds]
        places = ["--out", "found", "--write", "found.yaml"]
        words = ["find", "batch", *arguments.words, *flags, *places]
        found = limited(words, arguments.limit_gib, folder)
        print(found.stdout)
        if found.returncode:
            sys.exit(found.stderr)
        facts = json.loads((Path(folder) / "found" / "batch.json").read_text())
        if facts["too_large"] is None:
            print("the limit was never met: a lower --limit-gib would say more")
        codes = []
        for seed in range(arguments.runs):
            length = ["epochs=null", f"steps={arguments.steps}", f"eval.every={arguments.steps // 2}steps"]
            words = ["train", "recipe=./found.yaml", *length, f"seed={seed}", f"run.dir=run{seed}"]
            trained = limited(words, arguments.limit_gib, folder)
            codes.append(trained.returncode)
            print(f"run {seed}: exit code {trained.returncode}", flush=True)
            if trained.returncode:
                print(trained.stderr.strip().splitlines()[-1], flush=True)
    print(f"\nbatch_size={facts['chosen']} trained {codes.count(0)} of {len(codes)} times", end="; ")
    print(f"torch {version_of('torch')}, {machine()}")
    sys.exit(codes.count(0) != len(codes))


if __name__ == "__main__":
    main()
