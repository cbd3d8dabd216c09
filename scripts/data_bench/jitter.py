"""Random crops, flips, colors and turns of 32 x 32 images from memory, in batches of 512"""

from __future__ import annotations

from pathlib import Path

from data_bench import Row
from data_bench.crops import by_pil, epochs, noise, one_by_one


def build(folder: Path) -> list[Row]:
    from torchvision import transforms as T

    data, crop_flip = noise(), {"crop_padding": 4, "flip": True}
    colors = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}
    turns = {"rotation_degrees": 15, "translation": 0.1, "scaling": 0.1}
    both_by_pil = by_pil(
        T.RandomAffine(15, (0.1, 0.1), (0.9, 1.1), interpolation=T.InterpolationMode.BILINEAR),
        T.ColorJitter(0.4, 0.4, 0.4),
    )
    return [
        Row("DataLoader, torchvision v1 on PIL images", one_by_one(data, both_by_pil)),
        Row("memory, colors and turns", epochs(data, "memory", {**crop_flip, **colors, **turns})),
        Row("memory, colors alone", epochs(data, "memory", {**crop_flip, **colors})),
        Row("memory, turns alone", epochs(data, "memory", {**crop_flip, **turns})),
        Row("memory, a square of 8 pixels cut out", epochs(data, "memory", {**crop_flip, "cutout": 8})),
        Row("memory, crops and flips alone", epochs(data, "memory", crop_flip)),
    ]
