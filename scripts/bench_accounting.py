"""The cost of the ledger: steps with the clock's marks, beside the same steps without.

    python scripts/bench_accounting.py
    python scripts/bench_accounting.py recipe=resnet_cifar data=imagefolder data.root=FOLDER --steps 2

One run is trained; every other stretch of it has a clock whose marks do nothing. A round is some such pairs,
of which the first stretch changes. On a CPU it is processor time that is compared, which a busy machine
lengthens less than the clock's. Without words it is the worst case, an MLP of a hundred microseconds a step,
and then two ResNets, one on noise of CIFAR-10's size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_tools import interval, machine, silence, version_of

ENDLESS = ("epochs=null", "steps=100000000", "log_every=100000000steps", "device=auto")


def build(folder: Path, words: list[str]) -> Any:
    """The run of `words`, built and not trained."""
    from ptfast.config.read import read_config
    from ptfast.core.distributed import Ranks
    from ptfast.core.errors import PtfastError
    from ptfast.core.plain_display import Display
    from ptfast.training.build import build

    given = {word.partition("=")[0]: word for word in [*ENDLESS, *words]}
    try:
        return build(read_config([*given.values()])[1], ranks=Ranks(), folder=folder, display=Display())
    except PtfastError as error:
        sys.exit(str(error))


def noise(folder: Path) -> list[str]:
    """Words for images of 32 x 32 that hold nothing."""
    import numpy as np

    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "noise.npz", x=images, y=draws.integers(0, 10, 4096))
    return ["data=arrays", f"data.path={folder / 'noise.npz'}", "data.val=0"]


def count_marks(run: Any, trainer: Any, batches: Iterator[Any], num_steps: int) -> float:
    """Marks a step."""
    marks, to = [0], run.clock.to

    def counted(cause: str | None) -> None:
        marks[0] += 1
        to(cause)

    vars(run.clock)["to"] = counted
    trainer.train(batches, run.progress.step + num_steps)
    del vars(run.clock)["to"]
    return marks[0] / num_steps


def measure(words: list[str], steps: int, pairs: int, rounds: int) -> tuple[list[float], list[float], float]:
    """Microseconds of a step without marks, and how many more with them, by round; and marks a step."""
    with tempfile.TemporaryDirectory() as name, silence():
        folder = Path(name)
        run = build(folder, [*words, *(noise(folder) if "recipe=resnet_cifar" in words[-1:] else [])])
        from ptfast.training.loop.step import Trainer

        on_host = run.device.type == "cpu"
        now: Callable[[], float] = time.process_time if on_host else time.perf_counter
        trainer, plain = Trainer(run), run.train_loader.steps(0, run.total_steps)
        told = run.clock.waiting(plain)

        def stretch(with_marks: bool) -> float:
            if not with_marks:
                vars(run.clock)["to"] = lambda cause: None
            start = now()
            trainer.train(told if with_marks else plain, run.progress.step + steps)
            if not on_host:
                trainer.losses.read()
            seconds = now() - start
            vars(run.clock).pop("to", None)
            return seconds / steps * 1e6

        trainer.train(told, steps + 2)
        marks = count_marks(run, trainer, told, steps)
        step_us, more_us = list[float](), list[float]()
        for number in range(rounds):
            without, more = list[float](), list[float]()
            for pair in range(pairs):
                first = (number + pair) % 2 == 0
                took_us = {with_marks: stretch(with_marks) for with_marks in (first, not first)}
                without.append(took_us[False])
                more.append(took_us[True] - took_us[False])
            step_us.append(statistics.median(without))
            more_us.append(statistics.median(more))
        return step_us, more_us, marks


def mark_us() -> float:
    """Microseconds of one mark by itself, the fastest of many."""
    from ptfast.core.clock import Clock

    clock, repeats = Clock(), 100_000
    return (
        min(timeit.repeat(lambda: clock.to("forward"), timer=time.process_time, number=repeats, repeat=7))
        / repeats
        * 1e6
    )


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="recipe and overrides of the run, as for ptfast train")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--pairs", type=int, default=10, help="of stretches in a round; four times for the MLP"
    )
    parser.add_argument("--steps", type=int, default=20, help="of a stretch, where words are given")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    mlp = ["model=mlp", "model.hidden=[64]", "batch_size=64", "data.val=0"]
    rows = [
        ("MLP, batch 64", mlp, 100, 4 * args.pairs),
        ("resnet_digits", ["recipe=resnet_digits"], 10, args.pairs),
        ("resnet_cifar", ["recipe=resnet_cifar"], 1, args.pairs),
    ]
    if args.words:
        rows = [(" ".join(args.words), args.words, args.steps, args.pairs)]
    alone_us = mark_us()
    print("| steps of | us a step | marks | more with marks, us [95 %] | share of the step | by count |")
    print("|---|--:|--:|--:|--:|--:|")
    for title, words, steps, pairs in rows:
        steps_us, mores_us, marks = measure(words, steps, pairs, args.rounds)
        step_us, more_us, (low, high) = (
            statistics.median(steps_us),
            statistics.median(mores_us),
            interval(mores_us),
        )
        counted = marks * alone_us
        print(
            f"| {title} | {step_us:,.0f} [{min(steps_us):,.0f}-{max(steps_us):,.0f}] | {marks:.0f} "
            f"| {more_us:+.2f} [{low:+.2f} to {high:+.2f}] | {more_us / step_us:+.2%} "
            f"| {counted:.2f} us, {counted / step_us:.3%} |",
            flush=True,
        )
    print(f"\n{args.rounds} rounds of interleaved pairs, 1 thread; a mark alone {alone_us:.2f} us.")
    print(f"torch {version_of('torch')}. {machine()}.")


if __name__ == "__main__":
    main()
