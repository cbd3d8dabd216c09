"""How honest paired trials are: sessions in which the right answer is known, counted by verdict.

    python scripts/bench_trials.py aa                 two equal arms: 40 sessions, at most 4 other verdicts
    python scripts/bench_trials.py nothing            a switch that does nothing: 17 of 20 intervals contain 1
    python scripts/bench_trials.py slow10             a planted slow-down of 10 %: found in 17 of 20
    python scripts/bench_trials.py slow3 --budget 60  one of 3 %: how often, in what budget
    python scripts/bench_trials.py neighbour          aa and slow10 beside a process that takes a core half of
                                                      the time: how often right then

To be run on a quiet machine, one at a time. Sessions are added to a file, and those that are in it count:
what was interrupted is resumed by the same command, and --sessions 5 runs no more than five now.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from bench_tools import add_result, machine, read_results, version_of  # noqa: E402

from ptfast.core.errors import PtfastError, ReportedError  # noqa: E402
from ptfast.measure.trials.comparison import Arm  # noqa: E402
from ptfast.measure.trials.session import Session  # noqa: E402
from ptfast.models.resnet_cifar import ResNetCifar  # noqa: E402

WORDS = ("+recipe=resnet_digits", "model.width=16", "device=cpu")
CALIBRATION_STEPS = 30
UNDECIDED = ("no difference", "cannot tell")


class Slowed(ResNetCifar):
    """The model of the recipe, which computes for nothing for a part of the time that a step takes.

    Args:
        num_classes, in_channels, depth, width: as those of the model.
        slower: the part, of the median step of the first steps.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        depth: int = 8,
        width: int = 16,
        slower: float = 0.1,
    ) -> None:
        super().__init__(num_classes=num_classes, in_channels=in_channels, depth=depth, width=width)
        self.slower, self._steps_s, self._last_s = slower, list[float](), 0.0
        self._matrix = torch.rand(64, 64)

    def forward(self, images: Tensor) -> Tensor:
        now = time.perf_counter()
        if len(self._steps_s) < CALIBRATION_STEPS:
            self._steps_s.append(now - self._last_s)
            self._last_s = now
        else:
            # The first gap began with the process.
            end_s = now + self.slower * statistics.median(self._steps_s[1:])
            while time.perf_counter() < end_s:
                self._matrix @ self._matrix
        return super().forward(images)


@dataclass(frozen=True)
class Check:
    """Sessions of one kind.

    Args:
        other: what is measured against the recipe.
        slower: how much slower it is, as a part of a step.
        sessions: how many there are to be.
        wanted: of those, what has to be right; None where it is only counted.
    """

    other: Arm
    slower: float
    sessions: int
    wanted: int | None


def _slowed(slower: float) -> Arm:
    return Arm(f"slower by {slower:.0%}", ("model._target_=bench_trials.Slowed", f"model.slower={slower}"))


CHECKS = {
    "aa": Check(Arm("again", copy=2), 0.0, 40, 36),
    # Trials log nothing.
    "nothing": Check(Arm("logged seldom", ("log_every=977steps",)), 0.0, 20, 17),
    "slow10": Check(_slowed(0.1), 0.1, 20, 17),
    "slow3": Check(_slowed(0.03), 0.03, 20, None),
}
NEIGHBOUR = ("aa", "slow10")
"""What is run in turns beside the neighbour."""


def run_session(check: Check, words: tuple[str, ...], budget_s: float) -> dict[str, Any]:
    """One session; returns its verdict and figures."""
    base = Arm("recipe")
    with (
        tempfile.TemporaryDirectory() as folder,
        Session(words, budget_s=budget_s, folder=Path(folder)) as session,
    ):
        aa = session.calibrate(base, check.other)
        comparison = session.compare(base, check.other)
        took_s = budget_s - session.left_s
    effect = comparison.effect
    low, high = effect.interval() if effect else (math.nan, math.nan)
    return {
        "verdict": comparison.verdict,
        "why": comparison.why,
        "speedup": effect.ratio if effect else math.nan,
        "low": low,
        "high": high,
        "aa": aa.process_effect.ratio if aa.process_effect else math.nan,
        "rounds": len(comparison.rounds),
        "disturbed": len(comparison.disturbed()),
        "took_s": took_s,
    }


def is_right(name: str, check: Check, result: dict[str, Any]) -> bool:
    """Return True if a session has found what there is."""
    if name == "nothing":
        return result["low"] <= 1 <= result["high"]
    return result["verdict"] == "slower" if check.slower else result["verdict"] in UNDECIDED


@contextmanager
def neighbour(is_there: bool) -> Iterator[None]:
    """A process that takes a core half of the time."""
    process = multiprocessing.get_context("spawn").Process(target=_bother, daemon=True)
    if is_there:
        process.start()
    try:
        yield
    finally:
        if is_there:
            process.kill()


def _bother() -> None:
    while True:
        end_s = time.perf_counter() + 0.1
        while time.perf_counter() < end_s:
            pass
        time.sleep(0.1)


def show(name: str, check: Check, results: list[dict[str, Any]]) -> None:
    """Print the row of a check."""
    words = Counter(result["verdict"] for result in results)
    right = sum(is_right(name, check, result) for result in results)
    truth = 1 / (1 + check.slower)
    covered = sum(result["low"] <= truth <= result["high"] for result in results)
    known = [result for result in results if not math.isnan(result["speedup"])]
    middle = (
        "{:.3f} [{:.3f}-{:.3f}]".format(
            *(statistics.median(result[key] for result in known) for key in ("speedup", "low", "high"))
        )
        if known
        else "-"
    )
    wanted = "" if check.wanted is None else f" (wanted {check.wanted} of {check.sessions})"
    verdicts = ", ".join(f"{count} {word}" for word, count in words.most_common())
    took_s = statistics.median(result["took_s"] for result in results)
    rounds = statistics.median(result["rounds"] for result in results)
    cells = (
        name,
        len(results),
        f"{right}{wanted}",
        verdicts,
        covered,
        middle,
        f"{rounds:g}",
        f"{took_s:.0f}",
    )
    print(f"| {' | '.join(map(str, cells))} |")


def main() -> int:
    """Run the sessions that are missing, and print what all of them came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=[*CHECKS, "neighbour"])
    parser.add_argument("--sessions", type=int, help="run no more than so many now")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of a session")
    parser.add_argument(
        "--file", type=Path, default=Path("bench_trials.jsonl"), help="where results are kept"
    )
    parser.add_argument("words", nargs="*", help="a config to measure with, in place of the script's own")
    args = parser.parse_intermixed_args()
    words = tuple(args.words) or WORDS
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    names = NEIGHBOUR if args.check == "neighbour" else (args.check,)
    key = {"check": args.check, "budget_s": args.budget, "words": list(words)}

    def found(name: str) -> list[dict[str, Any]]:
        return read_results(args.file, key | {"name": name})

    left = {name: CHECKS[name].sessions - len(found(name)) for name in names}
    # In turns, so that what a machine goes through concerns both.
    missing = [name for turn in range(max(left.values())) for name in names if turn < left[name]]
    for number, name in enumerate(missing[: args.sessions], 1):
        try:
            with neighbour(args.check == "neighbour"):
                result = run_session(CHECKS[name], words, args.budget)
        except (PtfastError, ReportedError) as error:
            print(error, file=sys.stderr)
            return 1
        add_result(args.file, key | {"name": name} | result)
        print(
            f"{name} {number}/{len(missing[: args.sessions])}: {result['verdict']} {result['speedup']:.3f}"
            f" [{result['low']:.3f}-{result['high']:.3f}] in {result['took_s']:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    print("| check | sessions | right | verdicts | interval holds the truth | median speed-up | rounds | s |")
    print("|---|--:|--:|---|--:|--:|--:|--:|")
    for name in names:
        if results := found(name):
            show(name, CHECKS[name], results)
    beside = ", beside a process that takes a core half of the time" if args.check == "neighbour" else ""
    print(f"\n{' '.join(words)}{beside}; torch {version_of('torch')}, {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
