"""The CIFAR-10 speed-run from a recipe and from a loop written by hand: accuracy over seeds, time of a step.

    python scripts/bench_records.py FOLDER --seeds 0 1 2      accuracy, plain and over six views of an image
    python scripts/bench_records.py FOLDER --rounds 8         time of a step, in turns
    python scripts/bench_records.py FOLDER --seeds 0 1 2 --rounds 8 --compile model --results FILE

FOLDER holds train/CLASS/*.jpg and test/CLASS/*.jpg. `ptfast` is `ptfast train recipe=cifar_speedrun` as
users type it. `by hand` is scripts/airbench94_by_hand.py: the same network, data, precision and schedule in
plain torch. `by hand, memory kept` adds two of ptfast's settings: glibc keeps freed memory, and waiting
threads spin for a millisecond only.

Each training, and each row of a round, runs in a fresh process. Rows take turns within a round, and each
round begins with another row. Reading the data and the first steps do not count; logging does. Results are
added to FILE, where further calls continue: a seed that is there is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_tools import add_result, interval, machine, read_results, version_of  # noqa: E402

from ptfast.__main__ import WAITING  # noqa: E402
from ptfast.core.protocols import Callback  # noqa: E402

PTFAST, BY_HAND = "ptfast", "by hand"
TUNED, COMPILED = "by hand, memory kept", "by hand, compiled"
# glibc: no block is mapped for itself, and the end of the heap is never given back.
KEPT = WAITING | {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**62)}


class Clock(Callback):
    """Writes to `file` when each step ended; stops the run after step `stop`, if that is given.

    `clock` is perf_counter or process_time.
    """

    def __init__(self, file: str, clock: str, stop: int | None = None) -> None:
        self.file, self.clock, self.stop, self.times_s = file, getattr(time, clock), stop, [0.0]

    def on_start(self, run: Any) -> None:
        self.times_s = [self.clock()]

    def on_step(self, run: Any, step: int) -> None:
        self.times_s.append(self.clock())
        if step == self.stop:
            run.stop_signal = signal.SIGINT

    def on_end(self, run: Any, status: str) -> None:
        Path(self.file).write_text(json.dumps(self.times_s))


def execute(words: list[str], environment: dict[str, str], *, accepts: int = 0) -> str:
    """The output of a Python process in this environment; what it printed, if it fails, and the end."""
    given = {name: value for name, value in os.environ.items() if name not in KEPT}
    given |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")])} | environment
    done = subprocess.run([sys.executable, *words], env=given, capture_output=True, text=True)
    if done.returncode != accepts:
        sys.exit(f"{' '.join(words)} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def run_ptfast(args: argparse.Namespace, own: list[str], seed: int, stop: int | None) -> dict[str, Any]:
    """One run of the recipe: when its steps ended and, unless it stops early, its accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        named = f"_target_: bench_records.Clock, file: {folder}/clock, clock: {args.clock}"
        clock = f"callbacks=[{{{named}, stop: {stop or 'null'}}}]"
        words = ["-m", "ptfast", "train", f"recipe={args.recipe}", "data=imagefolder"]
        words += [f"data.root={args.folder}", f"epochs={args.epochs}", f"batch_size={args.batch_size}"]
        words += [f"seed={seed}", f"run.dir={folder}/run", clock, *args.words, *own]
        execute(words, {}, accepts=130 if stop else 0)
        run = Path(folder) / "run"
        result: dict[str, Any] = {"times_s": json.loads((Path(folder) / "clock").read_text())}
        summary = json.loads((run / "summary.json").read_text())
        result["memory_bytes"] = summary["peak_memory_bytes"]
        if stop is None:
            result["views"] = summary["test"]["accuracy"]
            plain = ["-m", "ptfast", "eval", str(run), "--split", "test", "eval.flip=false", "eval.shift=0"]
            result["plain"] = json.loads(execute(plain, {}))["accuracy"]
    return result


def run_row(args: argparse.Namespace, row: str, seed: int, stop: int | None = None) -> dict[str, Any]:
    """One run in a process of its own, `stop` steps long or to its end."""
    name, *own = row.split()
    if name == PTFAST:
        return run_ptfast(args, own, seed, stop)
    words = [str(ROOT / "scripts" / "airbench94_by_hand.py"), str(args.folder), "--seed", str(seed)]
    words += ["--epochs", str(args.epochs), "--batch-size", str(args.batch_size)]
    words += ["--stop", str(stop)] * (stop is not None) + ["--compile"] * (row == COMPILED)
    words += ["--cpu-time"] * (args.clock == "process_time")
    return json.loads(execute(words, KEPT if row == TUNED else {}))


def train(args: argparse.Namespace, rows: list[str], settings: dict[str, Any]) -> None:
    """Train every row with every seed that has no result yet."""
    for seed in args.seeds:
        for row in rows:
            key = {"kind": "run", "row": row, "seed": seed, **settings}
            if not read_results(args.results, key):
                add_result(args.results, key | run_row(args, row, seed))
                print(f"{row}, seed {seed}", file=sys.stderr, flush=True)


def take_turns(args: argparse.Namespace, rows: list[str], settings: dict[str, Any]) -> None:
    """Time the steps of every row, round by round; each round begins with another."""
    done = len({line["round"] for line in read_results(args.results, {"kind": "round", **settings})})
    for number in range(done, done + args.rounds):
        results = {}
        turn = number % len(rows)
        for row in rows[turn:] + rows[:turn]:
            result = run_row(args, row, number, args.warm_up + args.steps)
            steps_s = [end - start for start, end in pairwise(result.pop("times_s"))][args.warm_up :]
            results[row] = result | {"step_s": statistics.mean(steps_s), "steps": len(steps_s)}
        # All rows or none: ratios are of times of one round.
        for row in rows:
            add_result(
                args.results, {"kind": "round", "row": row, "round": number, **settings, **results[row]}
            )
        print(f"round {number + 1}", file=sys.stderr, flush=True)


def accuracy_table(file: Path, settings: dict[str, Any]) -> None:
    """Accuracies of each row over seeds, and the time of its training."""
    by_row: dict[str, list[dict[str, Any]]] = {}
    for line in read_results(file, {"kind": "run", **settings}):
        by_row.setdefault(line["row"], []).append(line)
    if not by_row:
        return
    print("| row | seeds | accuracy | over six views | training | median step |")
    print("|---|---|--:|--:|--:|--:|")
    for row, runs in by_row.items():
        plain, views = ([100 * run[name] for run in runs] for name in ("plain", "views"))
        train_s = [run["times_s"][-1] - run["times_s"][0] for run in runs]
        step_s = [statistics.median(b - a for a, b in pairwise(run["times_s"])) for run in runs]
        seeds = ", ".join(str(run["seed"]) for run in runs)
        print(
            f"| {row} | {seeds} | {spread(plain)} % | {spread(views)} % | {spread(train_s, 0)} s"
            f" | {1000 * statistics.median(step_s):,.0f} ms |"
        )


def spread(values: list[float], digits: int = 2) -> str:
    """Mean and, of several values, their standard deviation in brackets."""
    deviation = f" ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def time_table(file: Path, rows: list[str], settings: dict[str, Any]) -> None:
    """Time a step by row, and that of the first row over it in the rounds that have both."""
    rounds: dict[int, dict[str, dict[str, Any]]] = {}
    for line in read_results(file, {"kind": "round", **settings}):
        rounds.setdefault(line["round"], {})[line["row"]] = line
    if not rounds:
        return
    print(f"| row | rounds | ms a step [min-max] | time of {rows[0]} over this [95 %] | memory |")
    print("|---|--:|--:|--:|--:|")
    for row in rows:
        pairs = [(each[rows[0]], each[row]) for each in rounds.values() if each.keys() >= {rows[0], row}]
        if not pairs:
            continue
        times = [1000 * own["step_s"] for _, own in pairs]
        ratios = [first["step_s"] / own["step_s"] for first, own in pairs]
        low, high = interval(ratios)
        memory = statistics.median(own["memory_bytes"] for _, own in pairs) / 2**20
        print(
            f"| {row} | {len(pairs)} | {statistics.median(times):,.0f} [{min(times):,.0f}-{max(times):,.0f}]"
            f" | {statistics.median(ratios):.3f} [{low:.3f}-{high:.3f}] | {memory:,.0f} MiB |"
        )


def main() -> None:
    """Measure what is asked for, and print the tables of all results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the images")
    parser.add_argument("words", nargs="*", help="overrides for ptfast, such as device=cpu")
    parser.add_argument(
        "--seeds", nargs="*", type=int, default=[], help="train to the end with each of these"
    )
    parser.add_argument("--rounds", type=int, default=0, help="rounds in which steps are timed")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a row in each round")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those")
    parser.add_argument("--compile", help="rows with this option of `compile` too")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name contains one of these words")
    parser.add_argument("--recipe", default="cifar_speedrun", help="another one has no row by hand")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=2000)
    parser.add_argument("--results", type=Path, help="file of JSON lines to read and to add to")
    parser.add_argument(
        "--cpu-time",
        dest="clock",
        action="store_const",
        const="process_time",
        default="perf_counter",
        help="time the work of a process, not the wall: for one thread beside busy neighbors",
    )
    args = parser.parse_intermixed_args()
    if args.clock == "process_time" and os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("--cpu-time is for one thread: set OMP_NUM_THREADS=1")
    rows = [PTFAST, BY_HAND, TUNED]
    if args.compile:
        rows += [f"{PTFAST} compile={args.compile}", COMPILED]
    if args.recipe != "cifar_speedrun":
        rows = [row for row in rows if row.startswith(PTFAST)]
    rows = [row for row in rows if not args.only or any(word in row for word in args.only)]
    settings = {name: getattr(args, name) for name in ("recipe", "epochs", "batch_size", "words", "clock")}
    settings |= {"torch": version_of("torch")}
    with tempfile.TemporaryDirectory() as folder:
        args.results = args.results or Path(folder) / "results"
        train(args, [row for row in rows if row != TUNED], settings)
        take_turns(args, rows, settings)
        accuracy_table(args.results, settings)
        print()
        time_table(args.results, rows, settings)
    kind = "wall time" if args.clock == "perf_counter" else "CPU time"
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    length = f"{args.recipe}, {args.epochs} epochs, batch {args.batch_size}"
    print(f"\n{length}; rounds of {args.steps} steps; {kind}, {threads} threads.")
    print(f"torch {version_of('torch')}, {machine()}.")


if __name__ == "__main__":
    main()
