"""The parts of each stage, in the order in which they run."""

from __future__ import annotations

from scripts.gpu.check import Part
from scripts.gpu.correctness import STAGE_1, STAGE_4
from scripts.gpu.limits import STAGE_3
from scripts.gpu.speed import STAGE_2

STAGES: dict[int, list[Part]] = {1: STAGE_1, 2: STAGE_2, 3: STAGE_3, 4: STAGE_4}
