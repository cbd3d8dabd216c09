"""Draw kills of a run from a seed, and deliver them when this module runs in place of `ptfast`.

Ordinary runs never import it.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ptfast.core.protocols import Callback
from ptfast.core.run_directory import read_json, write_json

MODULE = "ptfast.measure.chaos.kills"
VARIABLE = "PTFAST_CHAOS"
"""Environment variable with the folder of the files below."""
PLAN, STRIKES, SHAPE = "plan.json", "strikes.jsonl", "shape.json"
_DYING_S = 20.0
"""Seconds that a process waits to be terminated after it has killed its parent."""
MOMENTS = ("start-up", "step", "evaluation", "saving")
"""Moments at which a kill can strike, in their order within a step."""
_CYCLE = ("step", "saving", "evaluation", "start-up", "step", "saving")
START_UP_POINTS = ("launched", "building", "built")
SAVING_POINTS = ("begun", "files written", "in place", "marked as last")
_UNPUBLISHED = 2  # the first two points leave the previous checkpoint as the newest


@dataclass(frozen=True)
class RunShape:
    """Properties of a run from which kills are planned."""

    total_steps: int
    save_steps: Sequence[int]
    eval_steps: Sequence[int]
    world_size: int = 1
    launched: bool = False
    workers: int = 0
    """Data workers per rank."""
    sharded: bool = False


@dataclass(frozen=True)
class Kill:
    """A SIGKILL at the first matching `moment` and `point` of `rank`, at `step` or later.

    Its `target` is the `rank`, one of its data workers, or the `launcher`. A start-up kill has no step.
    """

    moment: str
    step: int | None
    target: str = "rank"
    rank: int = 0
    point: str = ""

    def __str__(self) -> str:
        whom = {"rank": f"rank {self.rank}", "worker": f"a data worker of rank {self.rank}"}
        when = "after" if self.moment == "step" else f"in {self.moment}"
        when += "" if self.step is None else f"{' at' * (self.moment != 'step')} step {self.step}"
        return f"{whom.get(self.target, self.target)} {when}{self.point and f' ({self.point})'}"


def draw_kills(shape: RunShape, num_kills: int, seed: int) -> list[Kill]:
    """Draw a plan: the kills in order of delivery."""
    draws = random.Random(seed)
    places = sorted(draws.uniform(0, shape.total_steps) for _ in range(num_kills))
    moments = [_CYCLE[number % len(_CYCLE)] for number in range(num_kills)]
    draws.shuffle(moments)
    steps = [max(math.ceil(place), 1) for place in places]
    kills = [_draw(shape, moment, step, draws) for moment, step in zip(moments, steps, strict=True)]
    kills.sort(key=lambda kill: (kill.step, MOMENTS.index(kill.moment)))
    return [_possible(kill, after, shape) for kill, after in zip(kills, [*kills[1:], None], strict=True)]


def _draw(shape: RunShape, moment: str, step: int, draws: random.Random) -> Kill:
    has_workers = moment == "step" and shape.workers > 0
    target = draws.choice(["rank", "rank", *["launcher"] * shape.launched, *["worker"] * has_workers])
    rank, place = draws.randrange(shape.world_size) * (target != "launcher"), draws.random()
    dues = {"saving": shape.save_steps, "evaluation": shape.eval_steps}.get(moment, (step,))
    due = next((due for due in dues if due >= step), None)
    if due is None or step > shape.total_steps:
        return Kill("step", step, target, rank)
    points: Sequence[str] = {"start-up": START_UP_POINTS, "saving": SAVING_POINTS}.get(moment, ("",))
    if moment == "saving" and rank > 0:
        points = points[: 1 + shape.sharded]  # other ranks write no files
    return Kill(moment, due, target, rank, points[int(place * len(points))])


def _possible(kill: Kill, after: Kill | None, shape: RunShape) -> Kill:
    """Return the kill, changed if needed so that it and the one `after` it can be delivered."""
    if kill.moment == "start-up":
        return replace(kill, step=None)
    if kill.target == "worker" and after is not None and after.moment == "start-up":
        # If a run survives the death of a worker, it does not start up again.
        return replace(kill, target="rank")
    again = after is not None and (after.moment, after.step) == (kill.moment, kill.step)
    if kill.moment == "saving" and (again or kill.step == shape.total_steps):
        # Once the checkpoint is in place, this step is not saved again.
        return replace(kill, point=SAVING_POINTS[SAVING_POINTS.index(kill.point) % _UNPUBLISHED])
    return kill


class Strikes(Callback):
    """Delivers the kills in order, each once the earlier ones are recorded; a launcher has rank None."""

    def __init__(self, folder: Path, rank: int | None) -> None:
        self._kills = [Kill(**each) for each in json.loads((folder / PLAN).read_text())]
        self._file, self._rank = folder / STRIKES, rank

    def at(self, moment: str, step: int | None = None, point: str = "") -> None:
        """Deliver the kills that are due at this moment in this process."""
        while (number := self._file.read_text().count("\n")) < len(self._kills):
            kill = self._kills[number]
            is_here = kill.rank == self._rank or (kill.target == "launcher" and self._rank is None)
            is_due = kill.step is None or (step is not None and step >= kill.step)
            if (kill.moment, kill.point) != (moment, point) or not (is_here and is_due):
                return
            pid = os.getppid() if kill.target == "launcher" and self._rank is not None else os.getpid()
            if kill.target == "worker":
                workers = sorted(child.pid or 0 for child in multiprocessing.active_children())
                if not workers:
                    return
                pid = workers[number % len(workers)]
            with self._file.open("a") as file:
                file.write(json.dumps({"step": step, "pid": pid, "time": time.time()}) + "\n")
            os.kill(pid, signal.SIGKILL)
            if kill.target != "worker":
                time.sleep(_DYING_S)

    def on_step(self, run: Any, step: int) -> None:
        self.at("step", step)


def install(strikes: Strikes, folder: Path) -> None:
    """Call `strikes` around building, evaluating and saving in this process."""
    from ptfast.core.tensors import checkpoint_files
    from ptfast.core.tensors.checkpoint_files import ShardedDraft
    from ptfast.core.tensors.checkpoint_folders import list_checkpoints, step_of
    from ptfast.training import build, checkpointer, evaluate
    from ptfast.training.checkpointer import Checkpointer

    shards: Any = ShardedDraft
    build_run, interruptible, publish = build.build, evaluate.interruptible, shards.publish

    def struck_build(*given: Any, **named: Any) -> Any:
        strikes.at("start-up", point="building")
        run = build_run(*given, **named)
        run.debug_aids.append(strikes)
        if run.ranks.is_first and not (folder / SHAPE).exists():
            last, launched = run.total_steps, "TORCHELASTIC_RUN_ID" in os.environ
            saves = [*run.plan.intervals.save_steps, last]
            evals = [*run.plan.intervals.eval_steps, last] if "val" in run.eval_loaders else []
            parts = run.ranks.world_size, launched, run.train_loader.workers, run.sharded
            write_json(folder / SHAPE, asdict(RunShape(last, saves, evals, *parts)))
        strikes.at("start-up", point="built")
        return run

    def struck_batches(run: Any, batches: Iterator[Any], **options: Any) -> Iterator[Any]:
        for batch in interruptible(run, batches, **options):
            yield batch
            strikes.at("evaluation", run.progress.step)
        strikes.at("evaluation", run.progress.step)

    def saving(owner: Any, name: str, point: str, step: Callable[..., int]) -> None:
        inner = getattr(owner, name)

        def struck(*given: Any, **named: Any) -> Any:
            strikes.at("saving", step(*given), point)
            return inner(*given, **named)

        setattr(owner, name, struck)

    def struck_publish(draft: Any, written: Callable[[], Any]) -> Path:
        def struck() -> Any:
            # Without background saving, files are written here.
            found = written()
            strikes.at("saving", draft.step, "files written")
            return found

        return publish(draft, struck)

    build.build, evaluate.interruptible = struck_build, struck_batches
    shards.publish = struck_publish
    saving(Checkpointer, "save", "begun", lambda checkpointer, *_: checkpointer.run.progress.step)
    saving(checkpoint_files, "write_manifest", "files written", lambda draft, step, *_: step)
    saving(checkpoint_files, "point", "in place", lambda saved, name, folder: step_of(folder))
    saving(checkpointer, "prune", "marked as last", lambda saved, *_: step_of(list_checkpoints(saved)[0]))


def main() -> None:
    """Run `train WORDS...`, or a rank if the first argument is a folder."""
    from ptfast import __main__ as program

    folder, is_rank = Path(os.environ[VARIABLE]), sys.argv[1] != "train"
    launches = not is_rank and bool(read_json(folder / SHAPE).get("launched"))
    strikes = Strikes(folder, None if launches else int(os.environ.get("RANK", "0")))
    strikes.at("start-up", point="launched")
    if not launches:
        install(strikes, folder)
    from ptfast.launch import launcher, rank_main

    run_elastic = launcher.run_elastic
    launcher.run_elastic = lambda module, arguments, options: run_elastic(MODULE, arguments, options)
    (rank_main if is_rank else program).main()


if __name__ == "__main__":
    main()
