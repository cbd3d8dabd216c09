"""Steps to a loss at half, one and four critical batches: what the gradient noise predicts, and what happens.

    python scripts/bench_noise.py                                   digits, a few minutes
    python scripts/bench_noise.py resnet_cifar data=imagefolder data.root=FOLDER

Trained by SGD without momentum at a constant rate, micro-batches of one size throughout, so that BatchNorm
sees as many samples at every batch. The rate is tuned for every batch, by factors of two until both
neighbours of the best are worse. At the reference batch the critical one is estimated from each seed's own
steps up to the target, and the mean steps of those runs are the one measured figure that predictions start
from. What the paper's rule gives, without tuning, stands beside.
A step counts as the one at which the training loss, averaged over the steps from 0.8 to 1.25 times it, is at
the target: as wide a part of the run at every batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_tools import machine, version_of  # noqa: E402

FACTORS = (0.5, 1.0, 4.0)
"""Batches, in critical ones."""
MOST = 3.0
"""Predicted steps after which a run has missed the target."""
BEFORE, AFTER = 0.8, 1.25


@dataclass(frozen=True)
class Case:
    """A recipe, where to estimate, and how far to train."""

    reference: int
    micro_batch: int
    target: float
    rates: tuple[float, ...]
    """That the search for the best begins with."""
    most_steps: int


CASES = {
    "resnet_digits": Case(64, 16, 0.1, (0.4,), 400),
    "resnet_cifar": Case(128, 32, 1.7, (0.2,), 400),
}


class Bench:
    """Runs of one recipe, on data that is loaded once."""

    def __init__(self, recipe: str, words: Sequence[str], case: Case) -> None:
        from ptfast.config.read import read_config
        from ptfast.core.distributed import Ranks
        from ptfast.techniques.backend.torch_settings import resolve_device
        from ptfast.training.stages.data_stage import build_choice, load_data

        plain = ["optimizer=sgd", "optimizer.momentum=0", "schedule=constant", "epochs=null"]
        self.case = case
        self.words = [f"+recipe={recipe}", *plain, f"steps={case.most_steps}", *words]
        _, config = read_config(self.words)
        choice = build_choice(config, 1, resolve_device(config.device, Ranks()))
        self.data = load_data(config, Ranks(), choice)

    def train(self, batch: int, lr: float, seed: int, most_steps: int) -> dict[str, list[float]]:
        """Moments and losses of the steps up to the target, or up to the last step allowed."""
        from ptfast.config.read import read_config
        from ptfast.core.distributed import Ranks
        from ptfast.measure.find.gradient_noise import noise_of
        from ptfast.report.terminal.display import Display
        from ptfast.training.build import build

        cut = [f"batch_size={batch}", f"micro_batches={batch // self.case.micro_batch}"]
        _, config = read_config([*self.words, *cut, f"optimizer.lr={lr}", f"seed={seed}"])
        found: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            run = build(config, ranks=Ranks(), folder=Path(folder), display=Display(), data=self.data)
            try:
                for moments in noise_of(run, most_steps, reads=30):
                    for name in ("signal", "noise", "square", "loss"):
                        found.setdefault(name, []).extend(moments[name])
                    if steps_to(found["loss"], self.case.target) is not None:
                        break
            finally:
                run.close()
        return found

    def steps(self, batch: int, lr: float, seed: int, most_steps: int) -> int | None:
        """Steps to the target; None where it is not reached."""
        return steps_to(self.train(batch, lr, seed, most_steps).get("loss", []), self.case.target)


def steps_to(losses: Sequence[float], target: float) -> int | None:
    """The first step around which the mean loss is at `target`; None before there are enough to tell."""
    for step in range(5, int(len(losses) / AFTER) + 1):
        around = losses[int(BEFORE * step) : round(AFTER * step)]
        if sum(around) / len(around) <= target:
            return step
    return None


def tune(
    bench: Bench, batch: int, rates: Sequence[float], seeds: Sequence[int], most_steps: int
) -> dict[float, list[int | None]]:
    """Steps by rate, one for each seed, on a grid that goes on until the best rate has both neighbours."""
    tried: dict[float, list[int | None]] = {}
    left = list(rates)
    while left:
        lr = left.pop(0)
        tried[lr] = [bench.steps(batch, lr, seed, most_steps) for seed in seeds]
        print(f"  batch {batch} rate {lr:.3g}: {tried[lr]} steps", flush=True)
        best = best_rate(tried, most_steps)
        left = left or [beyond for beyond in (best / 2, best * 2) if beyond not in tried]
    return tried


def best_rate(tried: dict[float, list[int | None]], most_steps: int) -> float:
    """The rate of the fewest steps; runs that miss the target count as the most allowed."""
    return min(tried, key=lambda lr: sum(steps or most_steps for steps in tried[lr]))


def run_case(recipe: str, words: Sequence[str], case: Case, num_seeds: int) -> dict[str, Any]:
    """All runs of one recipe, told as they end."""
    from ptfast.measure.find.gradient_noise import estimate

    bench = Bench(recipe, words, case)
    print(f"{recipe}: target loss {case.target}, reference batch {case.reference}", flush=True)
    tried = tune(bench, case.reference, case.rates, [0], case.most_steps)
    best = best_rate(tried, case.most_steps)
    estimates, references = [], []
    for seed in range(1, 6):
        found = bench.train(case.reference, best, seed, case.most_steps)
        steps = steps_to(found["loss"], case.target)
        assert steps is not None
        critical = estimate(*(found[name][:steps] for name in ("signal", "noise", "square")))
        assert critical is not None
        print(
            f"  seed {seed}: {steps} steps, critical batch {critical.batch} +- {critical.error}", flush=True
        )
        if critical.batch is not None:
            estimates.append(critical)
        references.append(steps)
    batches = [critical.batch for critical in estimates if critical.batch is not None]
    middle, spread = statistics.mean(batches), statistics.stdev(batches)
    told = statistics.mean(critical.error for critical in estimates)
    print(f"  critical batch {middle:.0f}, deviation over seeds {spread:.0f}, as told by one run {told:.0f}")
    from ptfast.measure.find.gradient_noise import Critical

    critical = Critical(middle, spread, middle)
    rows = []
    for factor in FACTORS:
        batch = max(round(factor * middle / case.micro_batch), 2) * case.micro_batch
        rule = best / critical.steps_ratio(batch, case.reference)
        predicted = statistics.mean(references) * critical.steps_ratio(batch, case.reference)
        most_steps, seeds = round(MOST * predicted), range(11, 11 + num_seeds)
        by_rate = tune(bench, batch, [rule], seeds, most_steps)
        fewest, ruled = by_rate[best_rate(by_rate, most_steps)], by_rate[rule]
        row = {
            "factor": factor,
            "batch": batch,
            "predicted": predicted,
            "measured": mean_steps(fewest),
            "by_rule": mean_steps(ruled),
            "by_rate": by_rate,
        }
        rows.append(row)
        print(f"  {row}", flush=True)
    return {
        "rate": best,
        "tried": tried,
        "references": references,
        "batches": batches,
        "errors": [critical.error for critical in estimates],
        "critical": middle,
        "deviation": spread,
        "rows": rows,
    }


def mean_steps(found: Sequence[int | None]) -> float | None:
    """Over seeds; None where one of them has missed the target."""
    reached = [steps for steps in found if steps is not None]
    return statistics.mean(reached) if len(reached) == len(found) else None


def show(recipe: str, case: Case, found: dict[str, Any]) -> None:
    """A Markdown table of one recipe."""
    print(
        f"\n{recipe}, to a training loss of {case.target}; critical batch {found['critical']:.0f}, ", end=""
    )
    print(f"standard deviation over {len(found['batches'])} seeds {found['deviation']:.0f}")
    print(f"({', '.join(f'{batch:.0f}' for batch in found['batches'])}), each from ", end="")
    print(f"{statistics.mean(found['references']):.0f} steps of {case.reference} at rate {found['rate']}\n")
    print("| batch | in critical ones | steps predicted | measured | ratio | at the rule's rate | ratio |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for row in found["rows"]:
        cells = [f"{row['batch']}", f"{row['batch'] / found['critical']:.2g}", f"{row['predicted']:.0f}"]
        for steps in (row["measured"], row["by_rule"]):
            known = steps is not None
            cells += [f"{steps:.0f}", f"{steps / row['predicted']:.2f}"] if known else ["not reached", ""]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Train, and print a table for each recipe."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", choices=list(CASES), default="resnet_digits")
    parser.add_argument("words", nargs="*", help="key=value of the config")
    parser.add_argument("--target", type=float, help="training loss to reach")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every batch and rate")
    parser.add_argument("--out", type=Path, help="JSON with every figure")
    arguments = parser.parse_args()
    case = CASES[arguments.recipe]
    if arguments.target is not None:
        case = Case(case.reference, case.micro_batch, arguments.target, case.rates, case.most_steps)
    found = run_case(arguments.recipe, arguments.words, case, arguments.seeds)
    show(arguments.recipe, case, found)
    print(f"\ntorch {version_of('torch')}, {machine()}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
