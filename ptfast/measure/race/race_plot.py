"""The share of runs that have reached the target, over time and over steps, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ptfast.measure.race.race_results import Finish


def draw(path: Path, names: Sequence[str], finishes: Sequence[Finish], title: str) -> None:
    """Write a PNG of a curve for each arm; ticks mark runs that ended without reaching the target."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(10, 4.5), layout="constrained")
    panels = {
        "seconds of training": ("train_s", "total_train_s"),
        "optimizer steps": ("steps", "total_steps"),
    }
    for axes, (label, (figure, total)) in zip(
        picture.subplots(1, 2, sharey=True), panels.items(), strict=True
    ):
        for arm, name in enumerate(names):
            runs = [finish for finish in finishes if finish.arm == arm]
            reached = sorted(value for run in runs if (value := getattr(run, figure)) is not None)
            ends = [getattr(run, total) for run in runs]
            shares = [count / len(runs) for count in range(len(reached) + 1)] if runs else [0.0]
            xs = [0.0, *reached, max([*ends, *reached], default=0.0)]
            # Where curves lie upon each other, those below stand out on both sides.
            width = 2 + 2 * min(len(names) - 1 - arm, 4)
            axes.step(xs, [*shares, shares[-1]], where="post", color=f"C{arm}", lw=width, label=name)
            missed = [getattr(run, total) for run in runs if getattr(run, figure) is None]
            axes.plot(missed, [shares[-1]] * len(missed), "|", color=f"C{arm}", markersize=12, mew=2)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(-0.03, 1.03)
        axes.grid(alpha=0.3)
    picture.axes[0].set_ylabel("share of runs that have reached it")
    handles, labels = picture.axes[0].get_legend_handles_labels()
    picture.legend(handles, labels, fontsize=9, loc="outside lower center", ncols=min(len(labels), 3))
    picture.suptitle(title, x=0.01, ha="left", fontsize=11)
    partial = path.with_suffix(".partial")
    picture.savefig(partial, dpi=120, format="png")
    partial.replace(path)
