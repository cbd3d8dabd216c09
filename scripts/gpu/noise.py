"""Data of noise: nothing is downloaded, and what is timed does not depend on what it shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_text(file: Path, num_characters: int, length: int) -> None:
    """Write a text of so many different characters, each of which occurs."""
    if file.exists():
        return
    every = map(chr, (*range(0x100, 0xD800), *range(0x10000, 0x30000)))
    letters = np.array([letter for letter in every if letter.isalpha()][:num_characters])
    assert len(letters) == num_characters
    drawn = np.random.default_rng(0).integers(0, num_characters, length)
    file.write_text("".join([*letters, *letters[drawn]]), encoding="utf-8")


def write_images(file: Path, number: int, size: int, num_classes: int) -> None:
    """Write images of size x size and their classes as .npz."""
    if file.exists():
        return
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (number, size, size, 3), dtype=np.uint8)
    np.savez(file, x=images, y=generator.integers(0, num_classes, number))


def write_folders(folder: Path, num_classes: int, number: int) -> None:
    """Write so many images of 32 x 32 of each class into train/CLASS and test/CLASS."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(num_classes):
            (folder / split / f"class{label}").mkdir(parents=True, exist_ok=True)
            for index in range(number):
                pixels = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / f"class{label}" / f"{index}.png")
