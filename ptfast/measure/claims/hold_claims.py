"""`ptfast ablate --claims`: what the sources of the techniques promise, beside what this machine shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ptfast.config.applicability import ThisMachine
from ptfast.config.files.overlay import check_out
from ptfast.config.overrides import merge
from ptfast.core import run_directory
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_OK
from ptfast.core.units import clock
from ptfast.measure.claims.claim import CLAIMS, Claim, Finding, Words, judge
from ptfast.measure.experiment.laboratory import Laboratory
from ptfast.measure.experiment.pairs import NOT_REACHED, Pair, measure_pairs
from ptfast.measure.experiment.verdicts import ALPHA
from ptfast.measure.found import RECEIPT, live_line
from ptfast.report.terminal.display import say, table

COMMON: Words = ("preset=plain",)
"""What every trial begins with: the ways of a blog post before its tips."""


@dataclass(frozen=True)
class Row:
    """A claim and what was found."""

    claim: Claim
    finding: Finding
    ratio: str = ""
    why: str = ""


def hold_claims(*, budget_s: float, out: Path | None = None) -> int:
    """Hold every claim that can be tried here against blocked pairs of trials on data made for it.

    Intervals hold all true ratios together in 95 % of cases.

    Args:
        budget_s: seconds for all of them, shared out evenly.
        out: folder of the receipt; None for a new one under `runs`.

    Returns:
        0, whatever is confirmed or refuted, or 130 after Ctrl-C, with what was found by then.

    Raises:
        ReportedError: what stops a trial without the technique.
    """
    check_out(out)
    folder = out or run_directory.new_folder(Path("runs"), "claims")
    machine, code = ThisMachine(), EXIT_OK
    lacks = [claim.takes or next(filter(None, map(machine.lacks, claim.needs)), "") for claim in CLAIMS]
    with (
        tempfile.TemporaryDirectory(prefix="ptfast-") as scratch,
        Laboratory(budget_s=budget_s) as laboratory,
        live_line() as live,
    ):
        pairs = [_pair(claim, Path(scratch)) for claim, lack in zip(CLAIMS, lacks, strict=True) if not lack]

        def on_pair(pair: Pair) -> None:
            live(f"{pair.name}  {clock(max(laboratory.left_s, 0.0))} left")

        try:
            measure_pairs(laboratory, pairs, on_pair)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    found = iter(pairs)
    rows = [
        Row(claim, "not testable here", why=lack) if lack else _found(claim, next(found), len(pairs))
        for claim, lack in zip(CLAIMS, lacks, strict=True)
    ]
    _show(rows)
    run_directory.create_folder(folder)
    facts = {
        "command": ["ptfast", "ablate", "--claims", "--budget", f"{budget_s:g}s"],
        "environment": run_directory.environment([]),
        "claims": [_facts(row) for row in rows],
        "pairs": [pair.receipt(pair.effect(), "cannot tell") for pair in pairs],
    }
    run_directory.write_json(folder / RECEIPT, facts)
    say(f"figures: {folder}")
    return code


def _pair(claim: Claim, scratch: Path) -> Pair:
    data = [*COMMON, *filled_in(claim.workload, scratch)]
    without, with_it = (merge(data, own.split()) for own in (claim.without, claim.with_it))
    return Pair(claim.technique, without, with_it)


def _found(claim: Claim, pair: Pair, num_pairs: int) -> Row:
    effect = pair.effect()
    if effect is None:
        return Row(claim, "cannot tell", why=pair.why or NOT_REACHED)
    if claim.quantity == "memory":
        ratio = pair.memory_ratio()
        return Row(claim, judge(claim, ratio, ratio), f"{ratio:.2f}x")
    low, high = effect.interval(1 - ALPHA / num_pairs)
    return Row(claim, judge(claim, low, high), f"{effect.ratio:.2f}x [{low:.2f}-{high:.2f}]")


def _facts(row: Row) -> dict[str, Any]:
    claim = row.claim
    facts = {"technique": claim.technique, "says": claim.says, "source": claim.source}
    facts |= {"finding": row.finding, "measured": row.ratio, "why": row.why}
    return {**facts, "range": [claim.least, claim.most]}


def _show(rows: list[Row]) -> None:
    cells = []
    for row in rows:
        claim, here = row.claim, row.ratio or row.why
        cells.append([claim.technique, claim.says, claim.against or claim.without, here, row.finding])
    table(["technique", "claim", "against", "here", "finding"], cells)


NUM_IMAGES, NUM_FILES, NUM_TEXTS = 4096, 512, 2000
LENGTHS = (8, 256)
"""Shortest and longest text in characters; most are short, as texts of people are."""


def filled_in(words: Words, folder: Path) -> Words:
    """Replace the placeholders of a workload by paths of data in `folder`, which is made on first use."""
    for name, make in _MAKERS.items():
        if any(f"{{{name}}}" in word for word in words):
            path = folder / name
            if not list(folder.glob(f"{name}*")):
                make(path)
            (found,) = folder.glob(f"{name}*")
            words = tuple(word.replace(f"{{{name}}}", str(found)) for word in words)
    return words


def _make_images(path: Path) -> None:
    chance = np.random.default_rng(0)
    images = chance.integers(0, 256, (NUM_IMAGES, 32, 32, 3), dtype=np.uint8)
    np.savez(path.with_suffix(".npz"), train_x=images, train_y=chance.integers(0, 10, NUM_IMAGES))


def _make_files(path: Path) -> None:
    """JPEG files of 256 x 256 that take about as long to decode as photographs of that size."""
    chance = np.random.default_rng(0)
    for number in range(NUM_FILES):
        pixels = chance.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        file = path / f"class_{number % 2}" / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((256, 256), Image.Resampling.BICUBIC).save(file, quality=90)


def _make_texts(path: Path) -> None:
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(4.0, 0.7, NUM_TEXTS).astype(int), *LENGTHS)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    lines = (chance.choice(letters, length).tobytes().decode() for length in lengths)
    path.with_suffix(".txt").write_text("".join(f"{line.strip() or 'a'}\n" for line in lines))


_MAKERS: dict[str, Callable[[Path], None]] = {
    "images": _make_images,
    "files": _make_files,
    "texts": _make_texts,
}
