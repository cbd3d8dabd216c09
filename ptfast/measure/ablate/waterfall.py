"""From plain to the best, technique by technique, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.measure.ablate.ablation import Ablation


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
