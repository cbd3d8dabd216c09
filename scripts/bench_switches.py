"""The worth of switches on a whole run: training throughput and memory, as ratios to the first row.

    python scripts/bench_switches.py resnet_cifar data=imagefolder data.root=FOLDER
    python scripts/bench_switches.py char_gpt data.path=FILE --row plain --row 'fast compile=blocks'

Each row is a run in a process of its own, so that what it sets for the whole process stays there. In every
round all of them train the same number of samples, one after the other, each round beginning with another;
loading the batches counts, start-up, evaluation and saving do not. A row is a preset followed by overrides.
Processor time and page faults are of a step of the last round; they hardly depend on what else is running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_tools import interval, machine, silence, version_of  # noqa: E402

ROWS = ("plain", "safe", "fast")


@dataclass
class Contender:
    """One row: its run, in a process that waits for orders."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def ask(self, num_steps: int) -> dict[str, Any]:
        """Have it train so many steps; returns what it says of them."""
        assert self.process.stdin
        assert self.process.stdout
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(num_steps, file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see above")
        return json.loads(line)


def child(words: list[str]) -> None:
    """Build the run of `words`; then, for every number read, train as many steps and say what they took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    from ptfast.config.read import read_config
    from ptfast.core.distributed import Ranks
    from ptfast.core.errors import PtfastError
    from ptfast.core.machine import peak_memory_bytes
    from ptfast.core.plain_display import Display
    from ptfast.training.build import build
    from ptfast.training.loop.step import Trainer

    with tempfile.TemporaryDirectory() as folder, silence(), contextlib.ExitStack() as closing:
        try:
            _, config = read_config(words)
        except PtfastError as error:
            sys.exit(str(error))
        run = build(config, ranks=Ranks(), folder=Path(folder), display=Display())
        # Workers that nobody stops hold a process that has failed for ever.
        closing.callback(run.close)
        trainer, batches = Trainer(run), run.train_loader.steps(0, run.total_steps)
        on_gpu = run.device.type == "cuda"
        for line in sys.stdin:
            if on_gpu:
                # The memory was given back after the last round: this step takes it again.
                trainer.train(batches, run.progress.step + 1)
                trainer.losses.read()
            before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            trainer.train(batches, run.progress.step + int(line))
            loss = trainer.losses.read()
            seconds, used = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
            if on_gpu:
                torch.cuda.empty_cache()
            facts = {
                "seconds": seconds,
                "loss": loss,
                "processor_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
                "page_faults": used.ru_minflt - before.ru_minflt,
                "peak_memory_bytes": peak_memory_bytes(run.device.type),
                "batch_size": run.batch_size,
                "choices": run.choices.values(),
            }
            print(json.dumps(facts, default=str), file=answers, flush=True)


def start(name: str, words: list[str]) -> Contender:
    """The process of one row; `words` go to every row, the row's own over them."""
    preset, *own = name.split()
    long_enough = ["epochs=null", "steps=1000000", "log_every=1000000steps"]
    given = {word.partition("=")[0]: word for word in [*long_enough, *words, *own]}
    command = [sys.executable, __file__, "--child", f"preset={preset}", *given.values()]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    return Contender(name, process)


def table(rows: list[Contender], num_steps: int) -> None:
    """Print the rows as markdown."""
    first = rows[0]
    print(
        f"| switches | samples/s [min-max] | times {first.name} [95 %] | processor | page faults | memory |"
    )
    print("|---|--:|--:|--:|--:|--:|")
    for row in rows:
        samples = num_steps * row.facts["batch_size"]
        rates = sorted(samples / seconds for seconds in row.seconds)
        ratios = [base / own for base, own in zip(first.seconds, row.seconds, strict=True)]
        low, high = interval(ratios)
        speed = f"{statistics.median(rates):,.0f} [{rates[0]:,.0f}-{rates[-1]:,.0f}]"
        gain = f"{statistics.median(ratios):.2f} [{low:.2f}-{high:.2f}]"
        memory = f"{row.facts['peak_memory_bytes'] / 2**20:,.0f} MiB"
        processor = f"{1000 * row.facts['processor_s'] / num_steps:,.0f} ms"
        faults = f"{row.facts['page_faults'] / num_steps:,.0f}"
        print(f"| `{row.name}` | {speed} | {gain} | {processor} | {faults} | {memory} |")


def main() -> int:
    """Measure and print; returns the exit code."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", help="a recipe, and overrides for every row: data.root=FOLDER")
    parser.add_argument(
        "--row", action="append", help="a preset and overrides, such as 'safe precision=bf16'"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of a row in each round")
    args = parser.parse_intermixed_args()
    names = args.row or list(ROWS)
    words = [word if "=" in word else f"recipe={word}" for word in args.words]
    rows = [start(name, words) for name in names]
    left_out = []
    for row in list(rows):
        try:
            row.ask(args.steps)
        except RuntimeError:
            rows.remove(row)
            left_out.append(row.name)
    if not rows or rows[0].name != names[0]:
        print(f"{names[0]}, which all others are compared with, cannot run here", file=sys.stderr)
        return 1
    for index in range(args.rounds):
        turn = index % len(rows)
        for row in rows[turn:] + rows[:turn]:
            row.facts = row.ask(args.steps)
            row.seconds.append(row.facts["seconds"])
        print(f"round {index + 1}/{args.rounds}", file=sys.stderr, flush=True)
    for row in rows:
        assert row.process.stdin
        row.process.stdin.close()
        row.process.wait(timeout=60)
    table(rows, args.steps)
    choices = rows[0].facts["choices"]
    threads = choices["backend.threads"]
    print(
        f"\n{' '.join(args.words)}: {args.rounds} rounds of {args.steps} steps, device"
        f" {choices['device']}, {threads} threads, torch {version_of('torch')}, {machine()}"
    )
    for name in left_out:
        print(f"Left out, as it cannot run here: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
