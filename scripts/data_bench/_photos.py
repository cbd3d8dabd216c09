"""JPEG files that cost as much to decode as photographs: edges, textures and the grain of a sensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

QUALITY = 90
"""Of the files, which then take 1.2 to 2 bits for each pixel, as photographs do."""
RADIUS = (8, 200)
"""Smallest and largest disc, in pixels."""
GRAIN = 0.8
"""Deviation of the noise of a sensor, in levels of 255."""


def photo(seed: int, height: int = 400, width: int = 500) -> NDArray[np.uint8]:
    """A picture with the statistics of a photograph: uint8 (height, width, 3).

    Discs that cover one another, of a power law of sizes, give the edges and the 1/f spectrum of natural
    scenes; on each of them lies a texture, noise of a 1/f spectrum. Then come lens and sensor.

    Source: Lee, Mumford, Huang 2001, Occlusion Models for Natural Images (the dead leaves model).
    """
    generator = np.random.default_rng(seed)
    scene = np.empty((height, width, 3), np.float32)
    scene[:] = generator.uniform(40, 215, 3)
    contrast = np.full((height, width), 5.0, np.float32)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    smallest, largest = RADIUS
    for _ in range(generator.integers(50, 150)):
        # Radii of the density 1 / r**3.
        radius = smallest / np.sqrt(1 - generator.random() * (1 - (smallest / largest) ** 2))
        inside = (y - generator.random() * height) ** 2 + (x - generator.random() * width) ** 2 < radius**2
        scene[inside] = generator.uniform(20, 235) + generator.normal(0, 18, 3)
        contrast[inside] = generator.gamma(1.5, 3.0)
    scene += (contrast * pink_noise(generator, height, width))[..., None]
    for axis in (0, 1):
        # A lens spreads every edge over some pixels.
        scene = (np.roll(scene, 1, axis) + 2 * scene + np.roll(scene, -1, axis)) / 4
    scene += generator.normal(0, GRAIN, (height, width, 1)) + generator.normal(0, GRAIN / 2, scene.shape)
    return scene.clip(0, 255).round().astype(np.uint8)


def pink_noise(generator: np.random.Generator, height: int, width: int) -> NDArray[np.float32]:
    """Noise of deviation 1 whose amplitude falls as 1 / frequency."""
    spectrum = np.fft.rfft2(generator.normal(size=(height, width)))
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(spectrum / frequency, (height, width))
    return (noise / noise.std()).astype(np.float32)


def write_photos(folder: Path, number: int, height: int = 400, width: int = 500) -> list[Path]:
    """Write `number` photographs as JPEG, in two class folders of `folder`, and return their paths."""
    paths = [folder / f"class_{i % 2}" / f"{i:04d}.jpg" for i in range(number)]
    for seed, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo(seed, height, width)).save(path, quality=QUALITY)
    return paths
