"""Warm-up, stable, decay: the learning rate held until a decay at the end of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.techniques.schedule.lr_schedules import Curve, Shape, Span

FIFTH = Duration(20, "percent")


@dataclass
class Wsd(Shape):
    """The base rate, and in the last part of the run a fall to `end` times it.

    Nothing before the decay depends on the length of the run: any state saved before it can be trained for
    longer, or be decayed at once, in place of a run of each length.

    Args:
        decay: length of the fall at the end of the run; 10 to 20 % do as well as a cosine.
        anneal: `1-sqrt`: one minus the root of the done part of the decay; `linear`: a straight line.
        end: rate after the last step as a part of the base rate, >= 0.

    Sources: Hu et al. 2024, "MiniCPM", arXiv:2404.06395 (the schedule); Hägele et al. 2024, "Scaling Laws and
        Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392 (1-sqrt).
    """

    decay: Duration = FIFTH
    anneal: Literal["1-sqrt", "linear"] = "1-sqrt"
    end: float = 0.0

    def __post_init__(self) -> None:
        self.decay = Duration.parse(self.decay, "steps")

    def factor(self, span: Span) -> Curve:
        decay_steps = span.steps(self.decay)
        if decay_steps > span.total_steps:
            what = f"the decay of {decay_steps:,} steps is longer than the run of {span.total_steps:,}"
            raise ConfigError("C011", what, key="schedule.decay", value=self.decay)
        first, end, by_root = span.total_steps - decay_steps, self.end, self.anneal == "1-sqrt"

        def curve(step: int) -> float:
            if step <= first:
                return 1.0
            done = min((step - first) / decay_steps, 1.0) if decay_steps else 0.0
            return end + (1 - end) * (1 - (math.sqrt(done) if by_root else done))

        return curve
