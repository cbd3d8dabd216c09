"""Policies and other changes after crops and flips of 32 x 32 images from memory, in batches of 512"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from data_bench import Row
from data_bench.crops import NUM_IMAGES, by_v2, epochs, noise, one_by_one

SHARE = NUM_IMAGES // 5


def build(folder: Path) -> list[Row]:
    from torchvision.transforms import v2 as T

    data = noise()
    few = replace(data, train=data.train.take(np.arange(SHARE)))
    rows: list[Row] = []
    for name, theirs, ours in (
        ("TrivialAugment", [T.TrivialAugmentWide()], {"policy": "trivial"}),
        ("RandAugment", [T.RandAugment()], {"policy": "rand"}),
        (
            "AutoAugment",
            [T.AutoAugment(T.AutoAugmentPolicy.CIFAR10)],
            {"policy": "auto", "auto_table": "cifar10"},
        ),
        ("color jitter with hue", [T.ColorJitter(0.4, 0.4, 0.4, 0.1)], {"color_jitter": 0.4, "hue": 0.1}),
        (
            "grayscale and blur",
            [T.RandomGrayscale(0.2), T.RandomApply([T.GaussianBlur(3, (0.1, 2.0))], 0.5)],
            {"grayscale": 0.2, "blur": 0.5},
        ),
        ("random erasing", [T.RandomErasing(0.25)], {"erasing": 0.25}),
    ):
        rows.append(Row(f"{name}, DataLoader, torchvision v2", one_by_one(data, by_v2(*theirs))))
        for kind in ("memory", "plain"):
            changes = {"crop_padding": 4, "flip": True, **ours}
            rows.append(Row(f"{name}, {kind}", epochs(few, kind, changes)))
    return rows
