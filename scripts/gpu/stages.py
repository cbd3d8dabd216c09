"""The parts of each stage, in the order in which they run."""

from __future__ import annotations

from scripts.gpu.check import Part
from scripts.gpu.correctness import STAGE_1, STAGE_4

STAGES: dict[int, list[Part]] = {1: STAGE_1, 4: STAGE_4}
