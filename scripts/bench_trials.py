"""What the plan of `ptfast ablate` finds, with a synthetic clock and with switches planted in real trials.

    python scripts/bench_trials.py clock [--sessions 200]   as many of 35 switches as 4 minutes reach
    python scripts/bench_trials.py equal [--sessions 10]    12 switches that do nothing, in sessions of 60 s
    python scripts/bench_trials.py planted [--sessions 10]  one of 12 sleeps for 3, 5 and 10 % of a step

Of the switches of the clock six have an effect: 22, 11, 11, 6 and 3 % faster, 10 % slower.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ptfast.measure.experiment.laboratory import Laboratory
from ptfast.measure.experiment.plan import (
    Block,
    Factor,
    Fit,
    columns,
    draw_blocks,
    fit,
    separable,
    turn_means,
)
from ptfast.measure.experiment.verdicts import Verdict, judge
from ptfast.report.terminal.display import say, table

TRUE = {0: 0.20, 1: 0.10, 2: 0.10, 3: 0.06, 4: 0.03, 5: -0.10}
"""Logarithms of the speed-ups of the clock's switches."""
NUM_SWITCHES, BUDGET_S, PARENT_S, LOOK_S, RUN_S, TURN_S, PLAN = 35, 240.0, 12.0, 0.7, 2.0, 0.35, 0.7
CELLS: dict[str, dict[str, Any]] = {
    "processes differ by 2 %": {},
    "5 %": {"process": 0.05},
    "10 %": {"process": 0.10},
    "3 %, a drift of 15 %": {"process": 0.03, "drift": 0.15},
    "2 %, spikes": {"spikes": 0.05},
    "2 %, heavy tails": {"tails": True},
    "5 %, heavy tails": {"tails": True, "process": 0.05},
    "2 %, three in ten 5 % slower": {"bimodal": 0.05},
    "5 %, three in ten 5 % slower": {"bimodal": 0.05, "process": 0.05},
    "2 %, AR(1) of 0.7": {"correlation": 0.7},
    "2 %, two interactions": {"interactions": ((0, 1, -0.04), (2, 7, 0.04))},
    "2 %, 5 not applicable, 2 fail": {"gone": (25, 26, 27, 28, 29, 33, 34)},
}


def clock_session(
    seed: int,
    *,
    process: float = 0.02,
    turn: float = 0.03,
    drift: float = 0.0,
    spikes: float = 0.0,
    tails: bool = False,
    bimodal: float = 0.0,
    correlation: float = 0.0,
    interactions: tuple[tuple[int, int, float], ...] = (),
    gone: tuple[int, ...] = (),
) -> dict[str, float]:
    """Figures of one session, whose times are drawn.

    Args:
        process, turn: deviations of processes, and of turns within them.
        drift: of the machine, there and back in 100 s.
        spikes: part of the turns that take a third longer.
        bimodal: by how much three processes in ten are slower.
        interactions: pairs of switches, and what both together gain besides.
        gone: switches that cannot be had.
    """
    draws = np.random.default_rng(seed)
    left_s = PLAN * (BUDGET_S - PARENT_S - LOOK_S * NUM_SWITCHES)
    num_blocks = max(3, int(left_s / RUN_S / 4))
    switches = [each for each in range(NUM_SWITCHES) if each not in gone]
    factors = separable([Factor(str(each)) for each in switches], num_blocks)
    switches = switches[: len(factors)]
    gains = np.array([TRUE.get(each, 0.0) for each in switches])
    blocks = list(itertools.islice(draw_blocks(factors, seed), num_blocks))
    times: list[list[float]] = []
    now_s = noise = 0.0
    for block in blocks:
        means = -np.array(block) @ gains
        for first, second, gain in interactions:
            both = np.array(block)[:, [switches.index(first), switches.index(second)]].prod(axis=1)
            means = means - gain * both
        means = means + (draws.standard_t(2.5, 4) / 2.2 if tails else draws.normal(0, 1, 4)) * process
        means = means + bimodal * (draws.random(4) < 0.3)
        rounds = []
        for number in range(4):
            row = [0.0] * 4
            for place in sorted(range(4), reverse=number % 2 == 1):
                now_s += TURN_S
                noise = correlation * noise + draws.normal(0, turn) * math.sqrt(1 - correlation**2)
                spike = 0.3 * (draws.random() < spikes)
                row[place] = float(means[place]) + drift * math.sin(now_s / 17) + noise + spike
            rounds.append(row)
        times.append(turn_means(rounds))
    for first, second, gain in interactions:
        # With the partner on in half of all runs.
        gains[[switches.index(first), switches.index(second)]] += gain / 2
    return _judged(factors, blocks, times, gains, dict(enumerate(switches)))


def _judged(
    factors: list[Factor],
    blocks: list[Block],
    times: list[list[float]],
    gains: np.ndarray,
    names: dict[int, int],
) -> dict[str, float]:
    fitted = fit(factors, blocks, times)
    words = judge(fitted.effects)
    intervals = [effect.interval() for effect in fitted.effects if effect is not None]
    faster = [names[index] for index, word in enumerate(words) if word == "faster"]
    selected = np.array(fitted.shrunk) > 0.005
    best = gains.clip(0).sum()
    return {
        "switches": len(factors),
        "runs": 4 * len(blocks),
        "half-width": statistics.median(math.sqrt(high / low) - 1 for low, high in intervals),
        "coverage": statistics.fmean(
            low <= math.exp(gain) <= high for (low, high), gain in zip(intervals, gains, strict=True)
        ),
        "false": float(any(map(_is_false, words, gains))),
        "finds 10 %": statistics.fmean(each in faster for each in (1, 2)),
        "finds 3 %": float(4 in faster),
        "of the best": math.exp(float(gains[selected].sum()) - best),
    }


def _is_false(word: Verdict, gain: float) -> bool:
    wrong = {"faster": gain <= 0, "slower": gain >= 0, "no difference": abs(gain) > 0.021}
    return bool(wrong.get(word, False))


def run_clock(sessions: int) -> None:
    """Print a row for each kind of noise."""
    rows: list[list[str]] = []
    headers: list[str] = []
    for name, how in CELLS.items():
        found = [clock_session(seed, **how) for seed in range(sessions)]
        means = {key: statistics.fmean(each[key] for each in found) for key in found[0]}
        headers = ["noise", *means]
        rows.append([name, *(f"{mean:.0f}" if mean >= 2 else f"{mean:.3f}" for mean in means.values())])
    table(headers, rows)


WORDS = (
    *("data=digits", "model=custom", "model._target_=bench_trials.Switched", "batch_size=64"),
    *("preset=plain", "epochs=1000", "device=cpu"),
)
NUM_PLANTED, PLANTED_S = 12, 60.0


class Switched(nn.Module):
    """A network with switches, of which the first may sleep in each forward pass."""

    def __init__(self, num_classes: int = 10, switches: int = 0, sleep_s: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, num_classes))
        self.sleep_s = sleep_s if switches & 1 else 0.0

    def forward(self, images: Tensor) -> Tensor:
        """Map a batch of images to logits."""
        if self.sleep_s:
            end_s = time.perf_counter() + self.sleep_s
            while time.perf_counter() < end_s:
                pass
        return self.layers(images)


def real_session(seed: int, sleep_s: float) -> tuple[Fit, list[Verdict]]:
    """Measure 12 switches for 60 s, of which the first sleeps."""
    factors = [Factor(str(each)) for each in range(NUM_PLANTED)]
    blocks: list[Block] = []
    times: list[list[float]] = []
    with Laboratory(budget_s=PLANTED_S) as laboratory:
        laboratory.try_configs([WORDS])
        for block in draw_blocks(factors, seed):
            if laboratory.left_s < laboratory.block_s:
                break
            bits = [sum(level << place for place, level in enumerate(run)) for run in block]
            words = [[*WORDS, f"model.switches={each}", f"model.sleep_s={sleep_s}"] for each in bits]
            found = laboratory.measure(words)
            blocks.append(block)
            times.append([run.time for run in found])
    fitted = fit(factors, blocks, times)
    assert len(fitted.effects) == len(columns(factors))
    return fitted, judge(fitted.effects)


def run_real(sessions: int, sizes: tuple[float, ...]) -> None:
    """Print a line for each session, and what they come to."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Laboratory(budget_s=math.inf) as laboratory:
        (plain,) = laboratory.measure([WORDS])
        plain.raise_failure()
        step_s = plain.facts["step_s"]
    for size in sizes:
        found = false = 0
        for seed in range(sessions):
            fitted, words = real_session(seed, size * step_s)
            false += any(word in ("faster", "slower") for word in words[1 if size else 0 :])
            found += size > 0 and words[0] == "slower"
            effect = fitted.effects[0]
            low, high = effect.interval() if effect is not None else (math.nan, math.nan)
            figures = f"{words[0]} [{low:.3f}-{high:.3f}], processes differ by {fitted.residual_sd:.1%}"
            say(f"planted {size:.0%}: {figures}")
        say(f"planted {size:.0%}: found in {found}, false verdicts in {false} of {sessions} sessions")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("clock", "equal", "planted"))
    parser.add_argument("--sessions", type=int, default=0)
    asked = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if asked.what == "clock":
        run_clock(asked.sessions or 200)
    else:
        run_real(asked.sessions or 10, (0.0,) if asked.what == "equal" else (0.03, 0.05, 0.10))


if __name__ == "__main__":
    main()
