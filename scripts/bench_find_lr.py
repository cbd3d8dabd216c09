"""Train at the rate of `ptfast find lr`, at a tenth and at ten times it.

    python scripts/bench_find_lr.py recipe=resnet_digits
    python scripts/bench_find_lr.py recipe=resnet_cifar data.root=FOLDER --steps 200 --seeds 3
    python scripts/bench_find_lr.py recipe=resnet_cifar data.root=FOLDER --cycle    as --write made it

Without `--cycle` the rate stays what it is over all steps, and the figure is the mean training loss of the
last quarter. With it the rate found is the maximum of one cycle, trained from the file that `--write` made,
against the recipe's own rate divided by ten; the figure is the accuracy after the last step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_tools import machine, silence, version_of  # noqa: E402

from ptfast.cli import command_line  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="+", help="recipe=NAME and overrides")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cycle", action="store_true")
    arguments = parser.parse_intermixed_args()
    words = [*arguments.words, f"schedule={'onecycle' if arguments.cycle else 'constant'}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = folder / "found.yaml"
        call("find", "lr", "--out", str(folder / "found"), "--write", str(written), *words)
        found = json.loads((folder / "found" / "lr.json").read_text())
        chosen, given = found["chosen"], found["lr"]
        print(
            f"{arguments.words[0]}: found {chosen:.3g}, the recipe has {given:.3g}; {arguments.steps} steps"
        )
        if arguments.cycle:
            sides = {
                f"{chosen:.3g} (written)": [f"recipe={written}"],
                f"{given / 10:.3g} (a tenth of the recipe's)": [*words, f"optimizer.lr={given / 10}"],
            }
        else:
            sides = {
                f"{times * chosen:.3g} ({times:g}x)": [*words, f"optimizer.lr={times * chosen}"]
                for times in (0.1, 1, 10)
            }
        for label, side in sides.items():
            losses, accuracies = [], []
            for seed in range(arguments.seeds):
                summary = trained(folder, arguments.steps, seed, side)
                losses.append(summary["train"]["loss"] if summary else float("nan"))
                accuracies.append((summary or {}).get("test", (summary or {}).get("val", {})).get("accuracy"))
            line = f"  lr {label:<34} loss {statistics.mean(losses):.4f} ({spread(losses)})"
            if None not in accuracies:
                line += f"  accuracy {statistics.mean(accuracies):.2%} ({spread(accuracies)})"
            print(line, flush=True)
    print(f"{' '.join(arguments.words)}, torch {version_of('torch')}, {machine()}")


def trained(folder: Path, steps: int, seed: int, words: list[str]) -> dict[str, Any] | None:
    """The summary of one run; None where its loss was no number."""
    target = folder / f"run-{seed}"
    while target.exists():
        target = target.with_name(target.name + "-")
    fixed = [f"steps={steps}", "epochs=null", f"log_every={steps // 4}", f"eval.every={steps}steps"]
    exit_code = call("train", *words, *fixed, f"seed={seed}", f"run.dir={target}", accepts=(0, 5))
    return json.loads((target / "summary.json").read_text()) if exit_code == 0 else None


def call(*words: str, accepts: tuple[int, ...] = (0,)) -> int:
    with silence():
        exit_code = command_line.run(list(words))
    if exit_code not in accepts:
        sys.exit(f"ptfast {' '.join(words)} failed with exit code {exit_code}")
    return exit_code


def spread(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
