"""What an ablation found, as a table and some lines, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ptfast.config.catalogue import Technique
from ptfast.core.errors import name_some
from ptfast.core.units import num_bytes
from ptfast.measure.ablate.ablation import NOT_REACHED, Ablation
from ptfast.measure.trials.comparison import Comparison
from ptfast.report.terminal.display import say, standard_output, table

HEADERS = ("technique", "class", "alone", "95 %", "verdict", "stack", "memory", "loss")
PER_STEP = ("reduced", "training")
"""Classes of which a faster step is not yet the same loss sooner."""


def show(ablation: Ablation, left_out: Mapping[str, str]) -> None:
    """Print the techniques by worth, what was not measured, and the stack with what it came to."""
    measured = [t for t in ablation.techniques if t.name in ablation.added]
    rows = [_row(technique, ablation) for technique in sorted(measured, key=lambda t: _worth(t, ablation))]
    say()
    if rows:
        table(HEADERS, rows, stream=standard_output())
    for line in [*_remarks(ablation), *_unmeasured(ablation, left_out), "", *stack_lines(ablation)]:
        say(line)


def verdict(comparison: Comparison, technique: Technique) -> str:
    """The verdict in words; of what changes the result, on the step alone."""
    word = comparison.verdict
    return f"{word} per step" if word == "faster" and technique.kind in PER_STEP else word


def ratio(comparison: Comparison | None) -> str:
    """A speed-up: `1.20x`."""
    effect = comparison.effect if comparison is not None else None
    return "-" if effect is None else f"{effect.ratio:.2f}x"


def bounds(comparison: Comparison) -> str:
    """The interval of a speed-up: `1.15-1.25`."""
    effect = comparison.effect
    return "-" if effect is None else "{:.2f}-{:.2f}".format(*effect.interval())


def _row(technique: Technique, ablation: Ablation) -> list[str]:
    comparison = ablation.added[technique.name]
    changes = ["-", "-"]
    if comparison.rounds:
        memory, drift = comparison.memory_change_bytes, comparison.loss_drift
        changes[0] = f"{'-' if memory < 0 else '+'}{num_bytes(abs(memory))}"
        changes[1] = "-" if drift is None else f"{drift:+.1%}"
    in_stack = ratio(ablation.removed.get(technique.name))
    words = verdict(comparison, technique)
    return [technique.name, technique.kind, ratio(comparison), bounds(comparison), words, in_stack, *changes]


def _worth(technique: Technique, ablation: Ablation) -> float:
    effect = ablation.added[technique.name].effect
    return -effect.log_ratio if effect is not None else float("inf")


def _remarks(ablation: Ablation) -> Iterator[str]:
    """What the figures mean, and what speaks against them."""
    measured = [(t, ablation.added[t.name]) for t in ablation.techniques if t.name in ablation.added]
    for technique, comparison in measured:
        if comparison.why:
            yield f"{technique.name}: {comparison.why}"
        elif (steps := comparison.pays_after_steps) is not None and comparison.warm[1]["compiles"]:
            yield f"{technique.name}: has paid for compiling after {steps:,} steps"
    if any(verdict(comparison, technique).endswith("per step") for technique, comparison in measured):
        yield "faster per step: ptfast race measures if the same loss is reached sooner"
    if any(comparison.unit == "tokens" and comparison.rounds for _, comparison in measured):
        yield "speed is that of tokens without padding"
    every = ablation.session.comparisons
    disturbed, count = sum(len(each.disturbed()) for each in every), sum(len(each.rounds) for each in every)
    if disturbed:
        example = next(words for each in every for words in each.disturbed().values())
        yield f"interference in {disturbed} of {count} rounds, none left out: {example}"


def _unmeasured(ablation: Ablation, left_out: Mapping[str, str]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for name, why in {**{t.name: NOT_REACHED for t in ablation.not_reached}, **left_out}.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield f"not measured ({why}): {name_some(names)}"


def stack_lines(ablation: Ablation) -> Iterator[str]:
    """The stack step by step, and the promise against what was measured afresh."""
    if not any(comparison.effect for comparison in ablation.added.values()):
        yield "no technique was measured: give a longer --budget"
        return
    yield "the stack, from plain:" if ablation.stack else "nothing is known to be faster than plain"
    for step in ablation.steps:
        name = f"{step.technique.name}{f', for {step.replaces.name}' if step.replaces else ''}"
        kept = "kept" if step.is_kept else "not kept"
        yield f"  + {name:<36} {ratio(step.comparison):>6} [{bounds(step.comparison)}]  {kept}"
    if (again := ablation.over_plain) is not None:
        measured = f"{ratio(again)} [{bounds(again)}]" if again.effect else "not measured (too few rounds)"
        yield f"promised {ablation.promised:.2f}x over plain, measured again in new processes: {measured}"
        kept = [step.comparison.effect for step in ablation.steps if step.is_kept]
        product = math.exp(sum(effect.log_ratio for effect in kept if effect is not None))
        if product > 1.005 * ablation.promised:
            yield f"(the steps multiply to {product:.2f}x: what was picked for its size is partly luck)"
    if (start := ablation.over_start) is not None and (start.why or start.effect):
        name = "the stack" if ablation.stack else "plain"
        found = start.why or f"{ratio(start)} [{bounds(start)}], {start.verdict}"
        yield f"{name} over the config as given: {found}"


def draw(path: Path, ablation: Ablation, title: str) -> None:
    """Write a PNG of what each technique of the stack adds to the speed of plain, and of the stack again.

    Each bar goes from the speed before to the speed with the technique; the line at its end is the interval
    of that step. The last bar is the stack measured in new processes.
    """
    from matplotlib.figure import Figure

    kept = [step for step in ablation.steps if step.is_kept]
    picture = Figure(figsize=(8, 1.6 + 0.5 * (len(kept) + 2)), layout="constrained")
    axes = picture.add_subplot()
    beside: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    labels, total = ["plain"], 1.0
    axes.barh(0, 1.0, color="0.6")
    for place, step in enumerate(kept, 1):
        effect = step.comparison.effect
        assert effect is not None
        low, high = (total * bound for bound in effect.interval())
        after = total * effect.ratio
        axes.barh(place, after - total, left=total, color="C0")
        axes.plot([low, high], [place, place], color="k", lw=1.2)
        axes.annotate(f"{effect.ratio:.2f}x", (max(after, high), place), **beside)
        labels.append(f"+ {step.technique.name}")
        total = after
    again = ablation.over_plain.effect if ablation.over_plain is not None else None
    if again is not None:
        axes.barh(len(labels), again.ratio, color="C2")
        axes.plot(again.interval(), [len(labels)] * 2, color="k", lw=1.2)
        axes.annotate(f"{again.ratio:.2f}x", (again.interval()[1], len(labels)), **beside)
        labels.append("measured again")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.6", lw=0.8)
    axes.set_xlabel("speed, plain = 1")
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    partial = path.with_suffix(".partial")
    picture.savefig(partial, dpi=120, format="png")
    partial.replace(path)
