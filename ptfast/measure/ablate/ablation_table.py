"""What an ablation found, as a table and some lines, and as a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from ptfast.core.errors import name_some
from ptfast.core.units import num_bytes
from ptfast.measure.ablate.ablation import Ablation
from ptfast.measure.ablate.findings import Worth, described
from ptfast.measure.experiment.verdicts import Effect
from ptfast.report.terminal.display import say, standard_output, table

HEADERS = ("technique", "class", "worth", "95 %", "verdict", "expect", "memory", "loss")


def show(ablation: Ablation, left_out: Mapping[str, str]) -> None:
    """Print the techniques by worth, what was not measured, and the pick with what it came to."""
    measured = sorted(measured_findings(ablation), key=lambda finding: -_log_ratio(finding))
    say()
    if measured:
        table(HEADERS, [_row(finding) for finding in measured], stream=standard_output())
    for line in [*_remarks(ablation, measured), *_unmeasured(ablation, left_out), "", *pick_lines(ablation)]:
        say(line)


def measured_findings(ablation: Ablation) -> list[Worth]:
    """What has a figure."""
    return [finding for finding in ablation.findings if finding.effect is not None and not finding.why]


def _log_ratio(finding: Worth) -> float:
    return finding.effect.log_ratio if finding.effect is not None else -math.inf


def _row(finding: Worth) -> list[str]:
    effect, memory, drift = finding.effect, finding.memory_bytes, finding.loss_drift
    assert effect is not None
    return [
        finding.technique.name,
        finding.technique.kind,
        f"{effect.ratio:.2f}x",
        "{:.2f}-{:.2f}".format(*effect.interval()),
        finding.words,
        "beside" if finding.is_apart else f"{math.exp(finding.expected):.2f}x",
        "-" if memory is None else f"{'-' if memory < 0 else '+'}{num_bytes(abs(memory))}",
        "-" if drift is None else f"{drift:+.1%}",
    ]


def _remarks(ablation: Ablation, measured: list[Worth]) -> Iterator[str]:
    """What the figures mean, and what speaks against them."""
    fitted, laboratory = ablation.fitted, ablation.laboratory
    if fitted is not None:
        runs = sum(math.isfinite(time) for times in ablation.times for time in times)
        half = statistics.median(
            math.expm1(math.log(effect.interval()[1] / effect.ratio)) for effect in fitted.effects if effect
        )
        yield (
            f"{runs} runs of {len(ablation.factors)} switches at once; processes of one config differ by "
            f"{ablation.process_sd or 0.0:.1%} here, and intervals reach {half:.1%} to either side"
        )
        for first, second, more in ablation.pairs:
            names = (" or ".join(each.name for each in term) for term in (first, second))
            yield f"together {math.exp(more):.2f}x of what each does alone: {', and '.join(names)}"
        if ablation.fits_poorly:
            yield "some switches do other things together than alone, which widens the intervals: try --only"
        doubted = sum(weight < 0.5 for weight in fitted.weights)
        if doubted:
            noun = "run lies" if doubted == 1 else "runs lie"
            yield f"{doubted} {noun} far from the rest; all count (their weights are in measure.json)"
    if any(finding.is_apart for finding in measured):
        yield "beside: measured in a block with the pick, not in the plan"
    if any(finding.words.endswith("per step") for finding in measured):
        yield "faster per step: ptfast race measures if the same loss is reached sooner"
    if laboratory.num_again:
        yield f"{laboratory.num_again} blocks were measured again: other processes took a core meanwhile"


def _unmeasured(ablation: Ablation, left_out: Mapping[str, str]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    failed = {finding.technique.name: finding.why for finding in ablation.findings if finding.why}
    for name, why in {**failed, **left_out}.items():
        reasons.setdefault(why.rstrip("."), []).append(name)
    for why, names in reasons.items():
        yield f"not measured ({why}): {name_some(names)}"


def pick_lines(ablation: Ablation) -> Iterator[str]:
    """The pick, what the plan predicts of it, and what fresh processes confirm."""
    if not measured_findings(ablation):
        yield "no technique was measured: give a longer --budget"
        return
    names = ", ".join(technique.name for technique in ablation.picked)
    yield f"the pick: {names}" if names else "the pick: plain, as nothing is expected to be faster"
    confirmed = ablation.confirmed
    if confirmed is None:
        yield "it was not confirmed: give a longer --budget"
        return
    # Effects that do not multiply predict nothing.
    predicted = "" if ablation.fits_poorly else f"predicted {ablation.predicted:.2f}x, "
    yield f"over plain: {predicted}confirmed in fresh processes {described(confirmed.over_plain)}"
    yield f"over the config as given: {described(confirmed.over_given)}"
    if not ablation.best_is_pick:
        yield "the config as given is no slower, so best.yaml holds that"


def draw(path: Path, ablation: Ablation, title: str) -> None:
    """Write a PNG of every effect with its interval, the pick's confirmed speed below them."""
    from matplotlib.figure import Figure

    found = sorted(measured_findings(ablation), key=_log_ratio)
    picture = Figure(figsize=(8, 1.4 + 0.26 * (len(found) + 2)), layout="constrained")
    axes = picture.add_subplot()
    rows: list[tuple[str, Effect, str]] = []
    if ablation.confirmed is not None:
        rows.append(("the pick, confirmed", ablation.confirmed.over_plain, "C2"))
    for finding in found:
        assert finding.effect is not None
        clear = finding.verdict in ("faster", "slower")
        rows.append((finding.technique.name, finding.effect, "C0" if clear else "0.6"))
    for place, (_, effect, color) in enumerate(rows):
        axes.plot(effect.interval(), [place, place], color=color, lw=2, solid_capstyle="butt")
        axes.plot(effect.ratio, place, "o", color=color, ms=5)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.axvline(1.0, color="0.4", lw=0.8)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], minor=False)
    axes.minorticks_off()
    bounds = [bound for _, effect, _ in rows for bound in effect.interval()] or [1.0]
    axes.set_xlim(max(min(bounds) * 0.97, 0.3), min(max(bounds) * 1.03, 4.0))
    axes.set_xlabel("speed with it over speed without it, 95 % interval; grey: not told apart from 1")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    partial = path.with_suffix(".partial")
    picture.savefig(partial, dpi=120, format="png")
    partial.replace(path)
