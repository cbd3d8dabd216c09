"""What sessions of `ptfast ablate` promise, held against the same configs measured again afterwards.

    python scripts/bench_ablate.py --images FOLDER --texts FOLDER --text FILE [--budget 4m] [--only char_gpt]

FOLDERs are those of `data=imagefolder` and of `recipe=text_sst2`, FILE is that of `recipe=char_gpt`. Each
recipe has some sessions. After each, for `--again` seconds and from a parent of their own, blocks of the pick
and plain run in turns with those of `best.yaml` and the config as given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_tools import machine

from ptfast.__main__ import WAITING
from ptfast.config.catalogue import CATALOGUE
from ptfast.config.overrides import merge
from ptfast.measure.ablation import PLAIN
from ptfast.measure.experiment.laboratory import Comparison, Laboratory
from ptfast.report.terminal.display import say, table

RECIPES = {
    "resnet_digits": (),
    "resnet_cifar": ("data=imagefolder", "data.root={images}"),
    "text_sst2": ("data.root={texts}",),
    "char_gpt": ("data.path={text}",),
}
PROMISE = 0.05
"""Largest difference between a promise and what is measured again, as a part."""


def session(words: list[str], budget: str, again_s: float, folder: Path) -> list[dict[str, Any]]:
    """The record of a session, with what was measured again as `again`; None if its budget is rejected."""
    command = [sys.executable, "-m", "ptfast", "ablate", *words, "--budget", budget, "--out", str(folder)]
    screen, environment = folder.parent / f"{folder.name}.txt", {**os.environ, "COLUMNS": "120"}
    with screen.open("w") as output:
        code = subprocess.call(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    if code:
        say(screen.read_text().splitlines()[-1])
        return []
    found = json.loads((folder / "measure.json").read_text())
    plain = merge(words, PLAIN)
    switches = [word for each in CATALOGUE if each.name in found["selected"] for word in each.on]
    pairs = {"the selected config over plain": (plain, merge(plain, switches))}
    if found["best"]:
        pairs["best.yaml over the config as given"] = words, merge(words, found["best"])
    again: dict[str, Any] = {}
    with Laboratory(budget_s=again_s) as laboratory:
        for left, (name, (base, other)) in enumerate(pairs.items()):
            comparison = Comparison(base, {name: other})
            comparison.measure(laboratory, keep_s=again_s * (len(pairs) - 1 - left) / len(pairs))
            again |= {name: effect.record() for name, effect in comparison.effects()[0].items()}
    return [found | {"again": again}]


def effects_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The effect of each switch with a figure."""
    return {each["technique"]: each["effect"] for each in found["findings"] if each["effect"]}


def row(recipe: str, found: dict[str, Any]) -> list[str]:
    """What a session came to."""
    effects, again = effects_of(found), found["again"]
    whys = [each["why"] for each in found["findings"] if not each["effect"]]
    num_applicable = len(effects) + sum(not why or why.startswith("not reached") for why in whys)
    halves = [each["interval"][1] / each["ratio"] - 1 for each in effects.values()]

    def text(effect: dict[str, Any] | None) -> str:
        return (
            "-" if effect is None else "{:.2f} [{:.2f}-{:.2f}]".format(effect["ratio"], *effect["interval"])
        )

    confirmed = found["confirmed"] or {}
    return [
        recipe,
        f"{len(effects)} of {num_applicable}",
        f"{statistics.median(halves):.1%}" if halves else "-",
        f"{found['predicted_speedup']:.2f}",
        text(confirmed.get("over_plain")),
        text(again.get("the selected config over plain")),
        text(confirmed.get("over_given")),
        text(again.get("best.yaml over the config as given")),
    ]


def main() -> None:
    """Run the sessions and print what they came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("images", "texts", "text"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--again", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    # As every command of ptfast.
    os.environ.update(WAITING)
    say(machine())
    out = asked.out or Path(tempfile.mkdtemp(prefix="bench-ablate-"))
    out.mkdir(exist_ok=True)
    headers = ["recipe", "figures", "half-width", "predicted", "confirmed", "again", "over given", "again"]
    rows: list[list[str]] = []
    close = disagree = compared = 0
    for recipe in asked.only:
        places = {name: str(getattr(asked, name).absolute()) for name in ("images", "texts", "text")}
        words = [f"recipe={recipe}", *(word.format(**places) for word in RECIPES[recipe])]
        sessions: list[dict[str, Any]] = []
        for turn in range(asked.sessions):
            sessions += session(words, asked.budget, asked.again, out / f"{recipe}-{turn}")
        for found in sessions:
            (out / "sessions.jsonl").open("a").write(json.dumps(found) + "\n")
            rows.append(row(recipe, found))
            table(headers, rows[-1:])
            again = found["again"].get("the selected config over plain")
            if found["confirmed"] and again:
                promised = found["confirmed"]["over_plain"]["log_ratio"]
                close += abs(promised - again["log_ratio"]) <= math.log1p(PROMISE)
        first, second = ([*map(effects_of, sessions), {}, {}][place] for place in (0, 1))
        for name in first.keys() & second.keys():
            lows, highs = zip(first[name]["interval"], second[name]["interval"], strict=True)
            compared += 1
            disagree += max(lows) > min(highs)
    table(headers, rows)
    say(f"promised within {PROMISE:.0%} of what was measured again in {close} of {len(rows)} sessions")
    if asked.sessions > 1:
        say(f"intervals of two sessions that do not overlap: {disagree} of {compared}")


if __name__ == "__main__":
    main()
