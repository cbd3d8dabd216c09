"""The curve of a learning rate range test as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(path: Path, facts: dict[str, Any], title: str) -> None:
    """Write a PNG of the losses over the learning rate, with the rates that it suggests and the trials.

    Args:
        facts: `lrs` and `losses` of each step, `smoothed` of the first of them, up to where the curve ends,
            `suggestions`, `trials` and the rate `chosen`.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, 4.5), layout="constrained")
    axes = picture.add_subplot()
    lrs, losses, smoothed, chosen = facts["lrs"], facts["losses"], facts["smoothed"], facts["chosen"]
    axes.plot(lrs, losses, ".", color="0.75", markersize=4, label="loss of a step")
    axes.plot(lrs[: len(smoothed)], smoothed, color="C0", lw=2, label="smoothed")
    for index, (rule, lr) in enumerate(facts["suggestions"].items(), 1):
        axes.axvline(lr, color=f"C{index}", ls=":", lw=1.4, label=f"{rule}: {lr:.2g}")
    trials = [(lr, loss) for lr, loss in facts["trials"] if loss is not None]
    axes.plot(
        *zip(*trials, strict=True), "ks", markersize=5, label=f"after {facts['trial_steps']} steps at it"
    )
    if chosen is not None:
        axes.axvline(chosen, color="k", lw=1.6, label=f"chosen: {chosen:.2g}")
    axes.set_xscale("log")
    spread = max(smoothed) - min(smoothed)
    # A loss that diverges would flatten all that is of interest.
    lowest = min([*losses[: len(smoothed)], *(loss for _, loss in trials)])
    axes.set_ylim(lowest - 0.05 * spread, max(smoothed) + 0.25 * spread)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="lower left")
    partial = path.with_suffix(".partial")
    picture.savefig(partial, dpi=120, format="png")
    partial.replace(path)
