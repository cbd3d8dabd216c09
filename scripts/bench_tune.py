"""How good `ptfast tune` is: beside all settings of a grid, and on twelve families of models.

    python scripts/bench_tune.py grid       16 settings by hand: is what tune finds within 5 % of the best?
    python scripts/bench_tune.py families   torchvision's, at 64x64: is what it writes ever slower?

The grid is {fp32, bf16} x {channels first, last} x {one thread, all} x {optimizer step fused, not}, each in
paired trials against the recipe as it is. What tune has written is measured in new processes: against the
best of the grid, and of the families against the config that it was given. To be run on a quiet machine.
Results are added to a file, and those that are in it count: what was interrupted is resumed by the same
command. Once the grid is in it, each further run adds a search.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_tools import add_result, machine, read_results, version_of  # noqa: E402

from ptfast.config.overrides import merge, quoted  # noqa: E402
from ptfast.core.errors import PtfastError, ReportedError  # noqa: E402
from ptfast.core.machine import usable_cores  # noqa: E402
from ptfast.measure.trials.comparison import Arm, Comparison  # noqa: E402
from ptfast.measure.trials.session import Session  # noqa: E402

WORDS = ("+recipe=resnet_digits", "model.width=32", "device=cpu")
FAMILIES: dict[str, tuple[str, ...]] = {
    "resnet18": (),
    "regnet_x_400mf": (),
    "mobilenet_v3_small": (),
    "efficientnet_b0": (),
    "shufflenet_v2_x0_5": (),
    "squeezenet1_1": (),
    "densenet121": (),
    "mnasnet0_5": (),
    "convnext_tiny": (),
    "swin_t": (),
    "vit_b_16": ("model.image_size=64",),
    "googlenet": ("model.aux_logits=false", "model.init_weights=false"),
}
"""Models by torchvision's name, and the keywords that they need."""
GRID_S, TUNE_S, AGAINST_BEST_S = 360.0, 180.0, 40.0
FAMILY_S, FAMILY_CHECK_S = 70.0, 20.0
NEAR, SLOWER = 0.95, 0.98
"""At least so much of the best of the grid is near it; all of an interval below so much is slower."""


def figures(comparison: Comparison) -> dict[str, Any]:
    """What a comparison has shown, for the file."""
    found = {"verdict": comparison.verdict, "why": comparison.why, "rounds": len(comparison.rounds)}
    if (effect := comparison.effect) is None:
        return found
    low, high = effect.interval()
    return found | {"speedup": effect.ratio, "low": low, "high": high}


def cell(result: dict[str, Any]) -> str:
    """A speed-up with its interval, or why there is none."""
    if "speedup" not in result:
        return result["why"] or "too few rounds"
    return "{speedup:.3f} [{low:.3f}-{high:.3f}]".format(**result)


def measure_grid(
    words: Sequence[str], budget_s: float, file: Path, key: dict[str, Any]
) -> list[dict[str, Any]]:
    """Measure the points of the grid that are missing in the file; returns all of them, the fastest first."""
    values = {
        "precision": ("fp32", "bf16"),
        "rewrites.channels_last": ("false", "true"),
        "backend.threads": (1, usable_cores()),
        "optimizer.fused": ("false", "true"),
    }
    points = [
        tuple(f"{name}={value}" for name, value in zip(values, chosen, strict=True))
        for chosen in itertools.product(*values.values())
    ]
    known = [tuple(result["point"]) for result in read_results(file, key)]
    missing = [point for point in dict.fromkeys(points) if point not in known]
    with tempfile.TemporaryDirectory() as folder, endless_session(words, Path(folder)) as session:
        base = Arm("as it is")
        if missing:
            session.calibrate(base)
        for number, point in enumerate(missing, 1):
            seconds = max(session.least_s, budget_s / len(points))
            result = figures(session.compare(base, Arm(" ".join(point), point), seconds=seconds))
            add_result(file, key | {"point": point} | result)
            print(f"{number}/{len(missing)} {' '.join(point)}: {cell(result)}", file=sys.stderr, flush=True)
    return sorted(read_results(file, key), key=lambda result: result.get("speedup", 0.0), reverse=True)


def endless_session(words: Sequence[str], folder: Path, stretch_s: float = 0.5) -> Session:
    """A session whose comparisons are given their time one by one."""
    return Session(words, budget_s=1e6, folder=folder, stretch_s=stretch_s)


def tune(words: Sequence[str], budget_s: float, folder: Path) -> Path | None:
    """Run the command, its screen on standard error; returns the recipe, None where it has written none."""
    recipe = folder / "tuned.yaml"
    flags = ["--budget", f"{budget_s:g}s", "--write", str(recipe), "--out", str(folder / "measured")]
    subprocess.run(
        [sys.executable, "-m", "ptfast", "tune", *words, *flags],
        check=True,
        stdout=sys.stderr,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    return recipe if recipe.exists() else None


def tune_and_compare(
    words: Sequence[str], rival: Sequence[str], tune_s: float, check_s: float
) -> dict[str, Any]:
    """Tune a config, and measure what is written against a rival, afresh.

    Args:
        words: of the config; they are what is measured where none was written.
        rival: all words of the other.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = tune(words, tune_s, folder)
        found = {"written": "" if recipe is None else settings(recipe)}
        if recipe is None and tuple(words) == tuple(rival):
            return found
        base = Arm("rival", tuple(rival))
        other = Arm("tuned", tuple(words) if recipe is None else (f"+recipe={quoted(recipe)}",), copy=1)
        (folder / "trials").mkdir()
        with endless_session((), folder / "trials", stretch_s=0.3) as session:
            session.calibrate(base, other)
            return found | figures(session.compare(base, other, seconds=max(session.least_s, check_s)))


def settings(recipe: Path) -> str:
    """The settings of a tuned recipe with what each was worth by itself, from its head."""
    head = [line.removeprefix("#   ") for line in recipe.read_text().splitlines() if line.startswith("#   ")]
    return ", ".join(line for line in head if not line.startswith("ptfast"))


def check_grid(words: Sequence[str], budget_s: float, tune_s: float, file: Path) -> None:
    """Measure the grid, tune, and print both."""
    key = {"check": "grid", "words": list(words)}
    points = measure_grid(words, budget_s, file, key | {"budget_s": budget_s})
    best = points[0]["point"]
    searched = key | {"best": best, "tune_s": tune_s}
    add_result(file, searched | tune_and_compare(words, merge(words, best), tune_s, AGAINST_BEST_S))
    print("| precision | channels last | threads | fused | over the recipe as it is [95 %] | rounds |")
    print("|---|---|--:|---|--:|--:|")
    for result in points:
        values = [word.partition("=")[2] for word in result["point"]]
        print(f"| {' | '.join(values)} | {cell(result)} | {result['rounds']} |")
    print(f"\n| ptfast tune --budget {tune_s:g}s | over the best of the grid [95 %] | within 5 % |")
    print("|---|--:|---|")
    for result in read_results(file, searched):
        near = "yes" if result.get("speedup", 0.0) >= NEAR else "no"
        print(f"| {result['written'] or 'nothing written'} | {cell(result)} | {near} |")
    print(f"\n{' '.join(words)}", end="")


def check_families(names: Sequence[str], budget_s: float, check_s: float, file: Path) -> None:
    """Tune the families that are missing in the file, and print all that are there."""
    key = {"check": "families", "budget_s": budget_s}
    with tempfile.TemporaryDirectory() as name:
        images = Path(name) / "images.npz"
        chance = np.random.default_rng(0)
        pixels = chance.integers(0, 256, (1024, 64, 64, 3), dtype=np.uint8)
        np.savez(images, train_x=pixels, train_y=chance.integers(0, 10, len(pixels)))
        for family in names:
            if read_results(file, key | {"family": family}):
                continue
            data = ("data=arrays", f"data.path={quoted(images)}", "batch_size=16", "device=cpu")
            words = (*data, "model=torchvision", f"model.name={family}", *FAMILIES.get(family, ()))
            result = tune_and_compare(words, words, budget_s, check_s)
            add_result(file, key | {"family": family} | result)
            print(f"{family}: {result['written'] or 'nothing written'}", file=sys.stderr)
    print("| model | written, each by itself | over the start [95 %] | slower |")
    print("|---|---|--:|---|")
    for result in read_results(file, key):
        slower = "yes" if result.get("high", 1.0) < SLOWER else "no"
        speed = cell(result) if result["written"] else "as it was"
        print(f"| {result['family']} | {result['written'] or 'nothing'} | {speed} | {slower} |")
    print(f"\n64x64, batches of 16, ptfast tune --budget {budget_s:g}s", end="")


def main() -> int:
    """Measure what is missing, and print what all of it came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("check", choices=["grid", "families"])
    parser.add_argument("--budget", type=float, help="seconds of the grid, or of tuning one family")
    parser.add_argument("--tune", type=float, default=TUNE_S, help="seconds of tuning beside the grid")
    parser.add_argument("--file", type=Path, default=Path("bench_tune.jsonl"), help="where results are kept")
    parser.add_argument("words", nargs="*", help="a config for the grid, or models, in place of the script's")
    args = parser.parse_intermixed_args()
    try:
        if args.check == "grid":
            check_grid(tuple(args.words) or WORDS, args.budget or GRID_S, args.tune, args.file)
        else:
            check_families(args.words or list(FAMILIES), args.budget or FAMILY_S, FAMILY_CHECK_S, args.file)
    except (PtfastError, ReportedError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(f"; torch {version_of('torch')}, {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
