"""How long training stands still for a state, and how much slower steps are while one is written.

    python scripts/bench_saving.py                  a network of 25 million weights under AdamW, on the CPU
    python scripts/bench_saving.py --rounds 9 --threads 2

Each round saves once at once and once beside training, and takes the same steps beside writing and without
it, in turns. Steps are timed by the wall clock and by the processor time of the thread that trains, which a
busy neighbor does not change.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--hidden", type=int, default=4950, help="width of two layers (default: 25 M weights)"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--folder", type=Path, help="where states are written (default: the temporary folder)"
    )
    given = parser.parse_args()
    import torch
    from bench_tools import machine

    from ptfast.config.read import read_config
    from ptfast.core.distributed import Ranks
    from ptfast.core.plain_display import Display
    from ptfast.training.build import build
    from ptfast.training.loop.step import Trainer

    folder = Path(tempfile.mkdtemp(dir=given.folder))
    words = ("data=digits", "model=mlp", f"model.hidden=[{given.hidden},{given.hidden}]", "device=cpu")
    words = (*words, f"batch_size={given.batch}", "steps=100000", "optimizer=adamw", "optimizer.lr=1e-6")
    words = (*words, f"backend.threads={given.threads}", "saving.background=true")
    run = build(read_config(words)[1], ranks=Ranks(), folder=folder, display=Display())
    trainer, saver = Trainer(run), run.checkpointer.writer
    batches = run.train_loader.steps(0, run.total_steps)

    def seconds(of: object) -> float:
        start_s = time.perf_counter()
        of()  # type: ignore[operator]
        return time.perf_counter() - start_s

    def steps(number: int | None = None) -> tuple[int, float, float]:
        """Take `number` steps, or steps while a state is written; their wall and processor time in s."""
        taken, wall_s, processor_s = 0, time.perf_counter(), time.thread_time()
        while taken < number if number is not None else not saver.is_written:
            trainer.train(batches, run.progress.step + 1)
            taken += 1
        return taken, (time.perf_counter() - wall_s) / taken, (time.thread_time() - processor_s) / taken

    steps(3)
    run.checkpointer.save(background=True)
    steps()
    rows = []
    for _ in range(given.rounds):
        at_once_s = seconds(lambda: run.checkpointer.save())
        before_s = saver.writing_s
        stall_s = seconds(lambda: run.checkpointer.save(background=True))
        taken, *beside = steps()
        writing_s = saver.writing_s - before_s
        saver.finish()
        _, *alone = steps(taken)
        rows.append((at_once_s, stall_s, writing_s, *beside, *alone))
    at_once, stall, writing, *_ = zip(*rows, strict=True)
    weights = sum(parameter.numel() for parameter in run.model.parameters())
    print(
        f"{weights / 1e6:.1f} million weights, AdamW, {given.threads} threads, {given.rounds} rounds: "
        "median [range]"
    )
    for name, values in {
        "saving at once, s": at_once,
        "stall beside training, s": stall,
        "stall / saving at once": [row[1] / row[0] for row in rows],
        "writing beside training, s": writing,
        "step alone, s": [row[5] for row in rows],
        "step beside writing / alone, wall": [row[3] / row[5] for row in rows],
        "the same, processor time": [row[4] / row[6] for row in rows],
    }.items():
        print(f"{name:36} {median(values):7.3f} [{min(values):.3f}-{max(values):.3f}]")
    print(f"torch {torch.__version__}, {machine()}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
