"""When and whom chaos kills: drawn from a seed, so that a plan can be repeated."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

MOMENTS = ("start-up", "step", "evaluation", "saving")
"""In the order in which they come at one step."""
_CYCLE = ("step", "saving", "evaluation", "start-up", "step", "saving")
START_UP_POINTS = ("launched", "building", "built")
SAVING_POINTS = ("begun", "files written", "in place", "marked as last")
_UNPUBLISHED = 2  # of them leave the state before as the newest


@dataclass(frozen=True)
class RunShape:
    """What a plan needs to know of a run."""

    total_steps: int
    save_steps: Sequence[int]
    eval_steps: Sequence[int]
    num_ranks: int = 1
    launched: bool = False
    workers: int = 0
    """Of each rank."""
    sharded: bool = False


@dataclass(frozen=True)
class Kill:
    """One SIGKILL: at the first such `moment` and `point` of `rank` from `step` on.

    Its `target` is the `rank`, a `worker` of it, or the `launcher`. A start-up has no step: it is the next.
    """

    moment: str
    step: int | None
    target: str = "rank"
    rank: int = 0
    point: str = ""

    def __str__(self) -> str:
        whom = {"rank": f"rank {self.rank}", "worker": f"a worker of rank {self.rank}"}
        when = "after" if self.moment == "step" else f"in {self.moment}"
        when += "" if self.step is None else f"{' at' * (self.moment != 'step')} step {self.step}"
        return f"{whom.get(self.target, self.target)} {when}{self.point and f' ({self.point})'}"


def draw_kills(shape: RunShape, num_kills: int, seed: int, mtbf_steps: float | None = None) -> list[Kill]:
    """Draw a plan, in the order in which its kills come.

    With `mtbf_steps`, a mean of steps from kill to kill, some may be planned for after the last step.
    """
    draws, at = random.Random(seed), 0.0
    places = sorted(draws.uniform(0, shape.total_steps) for _ in range(num_kills))
    if mtbf_steps is not None:
        places = [at := at - mtbf_steps * math.log(1 - draws.random()) for _ in range(num_kills)]
    moments = [_CYCLE[number % len(_CYCLE)] for number in range(num_kills)]
    draws.shuffle(moments)
    steps = [max(math.ceil(place), 1) for place in places]
    kills = [_draw(shape, moment, step, draws) for moment, step in zip(moments, steps, strict=True)]
    kills.sort(key=lambda kill: (kill.step, MOMENTS.index(kill.moment)))
    return [_possible(kill, after, shape) for kill, after in zip(kills, [*kills[1:], None], strict=True)]


def _draw(shape: RunShape, moment: str, step: int, draws: random.Random) -> Kill:
    has_workers = moment == "step" and shape.workers > 0
    target = draws.choice(["rank", "rank", *["launcher"] * shape.launched, *["worker"] * has_workers])
    rank, place = draws.randrange(shape.num_ranks) * (target != "launcher"), draws.random()
    dues = {"saving": shape.save_steps, "evaluation": shape.eval_steps}.get(moment, (step,))
    due = next((due for due in dues if due >= step), None)
    if due is None or step > shape.total_steps:
        return Kill("step", step, target, rank)
    points: Sequence[str] = {"start-up": START_UP_POINTS, "saving": SAVING_POINTS}.get(moment, ("",))
    if moment == "saving" and rank > 0:
        points = points[: 1 + shape.sharded]  # the others write nothing
    return Kill(moment, due, target, rank, points[int(place * len(points))])


def _possible(kill: Kill, after: Kill | None, shape: RunShape) -> Kill:
    """The kill, changed where it or the one `after` it would find no moment."""
    if kill.moment == "start-up":
        return replace(kill, step=None)
    if kill.target == "worker" and after is not None and after.moment == "start-up":
        # A run may outlive a worker, and then does not start up again.
        return replace(kill, target="rank")
    again = after is not None and (after.moment, after.step) == (kill.moment, kill.step)
    if kill.moment == "saving" and (again or kill.step == shape.total_steps):
        # Once the state is in place, this step is not saved again.
        return replace(kill, point=SAVING_POINTS[SAVING_POINTS.index(kill.point) % _UNPUBLISHED])
    return kill
