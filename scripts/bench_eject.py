"""Time per training step of a recipe under ptfast, and of the script that `ptfast eject` makes of it.

Both are timed from one log line to another, the first stretch left out, nothing being evaluated in between;
they take turns. Above 1 the script takes longer.

    python scripts/bench_eject.py +recipe=resnet_digits [key=value ...] [--steps 250] [--rounds 7]
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
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_tools import interval, machine

from ptfast.__main__ import WAITING

STRETCHES = 5


def ptfast(*words: str) -> None:
    """Run a command in a process of its own, as a user does."""
    command = [sys.executable, "-m", "ptfast", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def step_s_of_run(words: Sequence[str], folder: Path) -> float:
    """Median seconds of a step of a run, over its stretches but the first."""
    ptfast("train", *words, f"run.dir={folder}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([line["step_s"] for line in lines if line["split"] == "train"][1:])


def step_s_of_script(folder: Path, stretch_steps: int) -> float:
    """The same of the script in `folder`, by when its log lines come out."""
    # Threads wait as they do in a run of ptfast.
    chosen = any(name in os.environ for name in ("OMP_WAIT_POLICY", *WAITING))
    environment = {**os.environ} if chosen else {**os.environ, **WAITING}
    script = [sys.executable, "train.py"]
    with subprocess.Popen(script, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        times_s = [time.perf_counter() for line in process.stdout if ", epoch " in line]
    return statistics.median(b - a for a, b in pairwise(times_s)) / stretch_steps


def main() -> None:
    """Time both in turns and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="+")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    stretch_steps = options.steps // STRETCHES
    words = [*options.words, "epochs=null", f"steps={options.steps}", f"log_every={stretch_steps}steps"]
    words += [f"eval.every={options.steps}steps", f"saving.every={options.steps}steps"]
    ratios, ours_s, theirs_s = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ptfast("eject", *words, "--out", str(folder / "train.py"))
        for number in range(options.rounds):
            ours_s.append(step_s_of_run(words, folder / f"run{number}"))
            theirs_s.append(step_s_of_script(folder, stretch_steps))
            ratios.append(theirs_s[-1] / ours_s[-1])
    low, high = interval(ratios)
    ours_ms, theirs_ms = (statistics.median(seconds) * 1e3 for seconds in (ours_s, theirs_s))
    print(f"ptfast {ours_ms:.2f} ms a step, script {theirs_ms:.2f} ms")
    print(f"script / ptfast: {statistics.median(ratios):.3f} [{low:.3f}-{high:.3f}], {options.rounds} rounds")
    print(machine())


if __name__ == "__main__":
    main()
