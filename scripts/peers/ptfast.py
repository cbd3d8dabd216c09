"""ptfast: its command line, in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peers import LOG_STEPS, Clock

if TYPE_CHECKING:
    from peers.tasks import TaskJob

WATCH = "callbacks=[{_target_: peers.ptfast.Watch}]"
_clock = Clock()


class Watch:
    """The callback that hands a run to the clock."""

    def on_start(self, run: Any) -> None:
        _clock.watch(run.model)

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        if split == "val":
            _clock.evaluated(figures[run.task.metric])


def words_of(job: TaskJob, seed: int) -> list[str]:
    """The command line for a job."""
    epoch_steps = -(-job.num_train // job.batch_size)
    return [
        *("train", f"preset={'fast' if job.bf16 else 'safe'}", f"device={job.device}", f"seed={seed}"),
        *(f"batch_size={job.batch_size}", f"eval.batch_size={job.batch_size}", f"log_every={LOG_STEPS}steps"),
        *("schedule=linear", "schedule.warmup=0", "saving.every=100%"),
        *(f"run.root={job.folder}", WATCH),
        *("epochs=null", f"steps={job.epochs * epoch_steps}", f"eval.every={epoch_steps}steps"),
        *(*job.words(), f"optimizer.lr={job.lr}"),
    ]


def train(words: Sequence[str], clock: Clock) -> None:
    """Run the command line: composing, logging, seeding, saving and report included."""
    global _clock
    _clock = clock
    from ptfast.__main__ import main

    before, sys.argv = sys.argv, ["ptfast", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"ptfast ended with exit code {ended.code}") from ended
    finally:
        sys.argv = before
