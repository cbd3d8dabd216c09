"""The time of a training step predicted from its operators' shapes, beside what it takes.

For each recipe some batches are trained on once while the shapes of their operators are noted. Then, in
turns: every operator is timed by itself on random tensors, memory and the framework's part by
micro-benchmarks, and the step of those batches is predicted from that alone; and training on the same batches
is timed, data left out. Ratios are of the two within a round.

    python scripts/bench_prediction.py --cifar FOLDER --text FILE --sst2 FOLDER [--rounds 7] [WORD ...]

WORDs are added to each recipe (`precision=bf16`). On a machine that others use, `--clock cpu` takes the time
of the processor in this thread for both.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from bench_tools import interval, machine, silence
from operator_replay import cache_bytes
from step_prediction import benchmark, predict

from ptfast.config.read import read_config
from ptfast.core.distributed import Ranks
from ptfast.core.run import Run
from ptfast.profiling.limits.machine_peaks import measured_peaks
from ptfast.profiling.limits.step_counting import StepCounter
from ptfast.report.terminal.display import Display
from ptfast.training.build import build
from ptfast.training.step import Trainer

STEPS = 8


def measure(run: Run, rounds: int, clock: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Predicted and measured seconds of a step, a pair for each round."""
    trainer = Trainer(run)
    batches = list(itertools.islice(run.train_loader.steps(0, run.total_steps), STEPS))

    def train() -> float:
        start = clock()
        trainer.train(iter(batches), run.progress.step + STEPS)
        trainer.window.read()
        return (clock() - start) / STEPS

    train()
    near = cache_bytes(run.device)
    counter = StepCounter(run, near)
    with counter.counting(iter(batches), STEPS) as given:
        trainer.train(given, run.progress.step + STEPS)
    counted = counter.counted
    assert counted is not None
    bandwidth = measured_peaks(run.device).bytes_per_s
    gradients = sum(p.numel() * p.element_size() for p in trainer.parameters)
    fresh = counted.kept_bytes + STEPS * gradients
    predicted, measured = [], []
    for _ in range(rounds):
        found = benchmark(counted.operators, run.device, bandwidth, near, clock)
        predicted.append(predict(counted.operators, fresh, found, STEPS).step_s)
        measured.append(train())
    return predicted, measured


def main() -> None:
    """Print a row for each recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar", help="a folder with train/CLASS/*.jpg and test/CLASS/*.jpg")
    parser.add_argument("--text", help="a text file")
    parser.add_argument("--sst2", help="a folder with train.tsv, dev.tsv and test.tsv")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("words", nargs="*")
    args = parser.parse_args()
    clock = time.perf_counter if args.clock == "wall" else time.thread_time
    recipes = {
        "resnet_cifar": args.cifar and ("data=imagefolder", f"data.root={args.cifar}"),
        "char_gpt": args.text and (f"data.path={args.text}",),
        "text_sst2": args.sst2 and (f"data.root={args.sst2}",),
    }
    print(f"{args.clock} time, torch {torch.__version__}, {torch.get_num_threads()} threads; {machine()}\n")
    print("| recipe | predicted ms | measured ms | predicted / measured | 95 % | range |")
    print("|---|---|---|---|---|---|")
    for recipe, words in recipes.items():
        if not words:
            continue
        with tempfile.TemporaryDirectory() as folder, silence():
            config = read_config([f"+recipe={recipe}", *words, *args.words])[1]
            run = build(config, ranks=Ranks(), folder=Path(folder), display=Display())
            predicted, measured = measure(run, args.rounds, clock)
        ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
        low, high = interval(ratios)
        p, m, ratio = (statistics.median(values) for values in (predicted, measured, ratios))
        print(
            f"| {recipe} | {p * 1e3:.1f} | {m * 1e3:.1f} | {ratio:.2f} | {low:.2f} to {high:.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
