"""The curve of a learning rate range test as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(
    path: Path,
    lrs: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    found: Mapping[str, float],
    chosen: float | None,
    title: str,
) -> None:
    """Write a PNG of the losses over the learning rate, with the rates that it suggests.

    Args:
        lrs: of each step.
        losses: of each step.
        smoothed: of the first of them, up to where the curve ends.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 4.5), layout="constrained")
    axes = picture.add_subplot()
    axes.plot(lrs, losses, ".", color="0.75", markersize=4, label="loss of a step")
    axes.plot(lrs[: len(smoothed)], smoothed, color="C0", lw=2, label="smoothed")
    for index, (rule, lr) in enumerate(found.items(), 1):
        axes.axvline(lr, color=f"C{index}", ls=":", lw=1.4, label=f"{rule}: {lr:.2g}")
    if chosen is not None:
        axes.axvline(chosen, color="k", lw=1.6, label=f"chosen: {chosen:.2g}")
    axes.set_xscale("log")
    spread = max(smoothed) - min(smoothed)
    # A loss that comes apart would flatten all that is of interest.
    axes.set_ylim(min(losses[: len(smoothed)]) - 0.05 * spread, max(smoothed) + 0.25 * spread)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="lower left")
    partial = path.with_suffix(".partial")
    picture.savefig(partial, dpi=120, format="png")
    partial.replace(path)
