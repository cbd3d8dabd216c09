"""Data on which claims are tried: made on the spot, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from ptfast.measure.claims.claim import Words

NUM_IMAGES, NUM_FILES, NUM_TEXTS = 4096, 512, 2000
LENGTHS = (8, 256)
"""Shortest and longest text in characters; most are short, as texts of people are."""


def filled_in(words: Words, folder: Path) -> Words:
    """Replace the placeholders of a workload by paths of data in `folder`, which is made on first use."""
    for name, make in _MAKERS.items():
        if any(f"{{{name}}}" in word for word in words):
            path = folder / name
            if not list(folder.glob(f"{name}*")):
                make(path)
            (found,) = folder.glob(f"{name}*")
            words = tuple(word.replace(f"{{{name}}}", str(found)) for word in words)
    return words


def _make_images(path: Path) -> None:
    chance = np.random.default_rng(0)
    images = chance.integers(0, 256, (NUM_IMAGES, 32, 32, 3), dtype=np.uint8)
    np.savez(path.with_suffix(".npz"), train_x=images, train_y=chance.integers(0, 10, NUM_IMAGES))


def _make_files(path: Path) -> None:
    """JPEG files of 256 x 256 that take about as long to decode as photographs of that size."""
    chance = np.random.default_rng(0)
    for number in range(NUM_FILES):
        pixels = chance.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        file = path / f"class_{number % 2}" / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((256, 256), Image.Resampling.BICUBIC).save(file, quality=90)


def _make_texts(path: Path) -> None:
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(4.0, 0.7, NUM_TEXTS).astype(int), *LENGTHS)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    lines = (chance.choice(letters, length).tobytes().decode() for length in lengths)
    path.with_suffix(".txt").write_text("".join(f"{line.strip() or 'a'}\n" for line in lines))


_MAKERS: dict[str, Callable[[Path], None]] = {
    "images": _make_images,
    "files": _make_files,
    "texts": _make_texts,
}
