"""`ptfast train` that kills itself, or processes around it, as planned. No ordinary run loads this."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptfast.core.protocols import Callback
from ptfast.core.run_directory import read_json, write_json
from ptfast.measure.chaos.kill_plan import Kill, RunShape

MODULE = "ptfast.measure.chaos.struck_run"
VARIABLE = "PTFAST_CHAOS"
"""Names the folder of the files."""
PLAN, STRIKES, SHAPE = "plan.json", "strikes.jsonl", "shape.json"
_DYING_S = 20.0
"""How long a process waits for its own end once it has killed the one that it dies with."""


class Strikes(Callback):
    """Delivers the kills in order, each once those before it are written down. A launcher has no rank."""

    def __init__(self, folder: Path, rank: int | None) -> None:
        self._kills = [Kill(**each) for each in json.loads((folder / PLAN).read_text())]
        self._file, self._rank = folder / STRIKES, rank

    def at(self, moment: str, step: int | None = None, point: str = "") -> None:
        """Kill whom the plan names for this moment of this process."""
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
    """Have this process call `strikes` around what builds, evaluates and saves."""
    from ptfast.core.tensors import saved_state
    from ptfast.core.tensors.saved_state import ShardedDraft, list_states, step_of
    from ptfast.training import build, evaluate, fit, state

    build_run, interruptible = build.build, evaluate.interruptible

    def struck_build(*given: Any, **named: Any) -> Any:
        strikes.at("start-up", point="building")
        run = build_run(*given, **named)
        run.debug_aids.append(strikes)
        if run.ranks.is_first and not (folder / SHAPE).exists():
            last, launched = run.total_steps, "TORCHELASTIC_RUN_ID" in os.environ
            saves = [*run.cadence.save_steps, last]
            evals = [*run.cadence.eval_steps, last] if "val" in run.eval_loaders else []
            parts = run.ranks.num_ranks, launched, run.resolved.workers, run.sharded
            write_json(folder / SHAPE, asdict(RunShape(last, saves, evals, *parts)))
        strikes.at("start-up", point="built")
        return run

    def struck_batches(run: Any, batches: Iterator[Any], **options: Any) -> Iterator[Any]:
        for batch in interruptible(run, batches, **options):
            yield batch
            strikes.at("evaluation", run.progress.step)
        strikes.at("evaluation", run.progress.step)

    def saving(module: Any, name: str, point: str, step: Callable[..., int]) -> None:
        inner = getattr(module, name)

        def struck(*given: Any, **named: Any) -> Any:
            strikes.at("saving", step(*given), point)
            return inner(*given, **named)

        setattr(module, name, struck)

    build.build, evaluate.interruptible = struck_build, struck_batches
    saving(fit, "save_training", "begun", lambda run, *_: run.progress.step)
    saving(ShardedDraft, "publish", "files written", lambda draft, *_: draft._step)
    saving(saved_state, "write_manifest", "files written", lambda draft, step, *_: step)
    saving(saved_state, "point", "in place", lambda saved, name, folder: step_of(folder))
    saving(state, "prune", "marked as last", lambda saved, *_: step_of(list_states(saved)[0]))


def main() -> None:
    """`train WORDS...`, or the arguments of a rank, whose first is a folder."""
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
