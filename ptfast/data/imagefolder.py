"""Images in class folders: `train/<class>/*`, with `val/` and `test/` beside it, or class folders alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ptfast.data.images import SUFFIXES, Decoder, decode_all
from ptfast.data.source import Source, Splits, TensorSource, as_tensor
from ptfast.errors import DataError
from ptfast.machine import available_memory, spare_cores
from ptfast.run import DataInfo

if TYPE_CHECKING:
    from torch import Tensor

    from ptfast.data.sampler import Indices
    from ptfast.durations import Duration

_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "dev"), "test": ("test",)}
Listing = tuple[list[str], list[int]]


class ImageFolder:
    """A tree of class folders.

    Images that fit in a quarter of the memory are decoded once, by all cores; others each time they are
    needed.

    Args:
        root: the folder: with `train/` (and `val/`, `test/`) of class folders, or with class folders.
        image_size: side in pixels that images are brought to: shorter side resized, centre cropped. None
            where all have one size.
        threads: that decode; `auto` for one per core.

    Raises:
        DataError: D001 to D003 when the tree does not fit, D005 for a file that cannot be decoded (by
            `load`).
    """

    name = "imagefolder"

    def __init__(self, root: str, image_size: int | None = None, threads: int | str = "auto") -> None:
        self.root, self.image_size = Path(root).expanduser(), image_size
        self.threads = spare_cores(16) if threads == "auto" else int(threads)

    def load(self, *, val: Duration, seed: int) -> Splits:
        classes, listings = list_tree(self.root)
        decoder = Decoder(self.image_size)
        height, width, channels = decoder(listings["train"][0][0]).pixels.shape
        num_files = sum(len(paths) for paths, _ in listings.values())
        fits = num_files * height * width * channels <= available_memory() // 4
        sources: dict[str, Source] = {}
        converted = 0
        for split, (paths, labels) in listings.items():
            targets = torch.tensor(labels)
            if fits:
                images, split_converted = decode_all(decoder, paths, self.threads)
                sources[split] = TensorSource(images, targets, images=True)
                converted += split_converted
            else:
                sources[split] = ImageFiles(paths, targets, decoder)
        note = f"{converted:,} images that are not 8-bit RGB were converted" if converted else ""
        info = DataInfo(
            kind="image",
            task="classification",
            num_classes=len(classes),
            class_names=classes,
            input_shape=(channels, height, width),
            in_channels=channels,
            extra={
                "cache_key": f"{self.root.resolve()} {num_files} {self.image_size} {_newest(self.root)}",
            },
        )
        return Splits(info, sources["train"], sources.get("val"), sources.get("test"), note)


class ImageFiles(Source):
    """Images that are decoded each time they are fetched."""

    images = True

    def __init__(self, paths: list[str], targets: Tensor, decoder: Decoder) -> None:
        self.paths, self.targets, self.decoder = paths, targets, decoder

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        pixels, _ = self.decoder.stack([self.paths[i] for i in indices])
        return torch.from_numpy(pixels), self.targets.index_select(0, as_tensor(indices))


def list_tree(root: Path) -> tuple[tuple[str, ...], dict[str, Listing]]:
    """Class names, and for each split its files and their labels, in the order of their names.

    Raises:
        DataError: D001 to D003 when there is no such tree.
    """
    folders = _subfolders(root)
    by_split = {split: [root / name for name in names if name in folders] for split, names in _SPLITS.items()}
    if not by_split["train"]:
        found = [folder.name for group in by_split.values() for folder in group]
        if found:
            what = f"has {found[0]}/ but no train/"
            raise DataError(
                "D003", what, key="data.root", value=root, suggestion="Put class folders in train/"
            )
        by_split = {"train": [root]}
    classes: tuple[str, ...] = ()
    listings: dict[str, Listing] = {}
    for split, split_folders in by_split.items():
        if not split_folders:
            continue
        names, listings[split] = _list_split(split_folders[0])
        if split == "train":
            classes = names
        elif names != classes:
            raise _differ(split_folders[0], names, classes)
    return classes, listings


def _list_split(folder: Path) -> tuple[tuple[str, ...], Listing]:
    names = tuple(_subfolders(folder))
    if not names:
        raise DataError("D002", "holds no class folders", key="data.root", value=folder)
    if len(names) == 1:
        what = f"holds one class only ({names[0]}), which leaves nothing to tell apart"
        raise DataError(
            "D003", what, key="data.root", value=folder, suggestion="Give each class a folder of its own"
        )
    paths: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        found = _image_files(folder / name)
        if not found:
            hint = f"Put images in it ({', '.join(SUFFIXES[:3])}, ...), or remove it"
            raise DataError("D003", "class folder without images", key=str(folder / name), suggestion=hint)
        paths += found
        labels += [label] * len(found)
    return names, (paths, labels)


def _subfolders(folder: Path) -> list[str]:
    hint = "Set data.root to a folder of class folders"
    if not folder.exists():
        raise DataError("D001", "no such folder", key="data.root", value=folder, suggestion=hint)
    if not folder.is_dir():
        raise DataError("D001", "is a file, not a folder", key="data.root", value=folder, suggestion=hint)
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise DataError("D001", what, key="data.root", value=folder) from None
    if not entries:
        raise DataError("D002", "is an empty folder", key="data.root", value=folder, suggestion=hint)
    return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_files(folder: Path) -> list[str]:
    found = []
    for place, _, files in os.walk(folder, followlinks=True):
        found += [f"{place}/{name}" for name in files if name.lower().endswith(SUFFIXES) and name[0] != "."]
    return sorted(found)


def _differ(folder: Path, names: tuple[str, ...], classes: tuple[str, ...]) -> DataError:
    extra, missing = sorted(set(names) - set(classes)), sorted(set(classes) - set(names))
    parts = [f"has {', '.join(extra[:3])}, which train/ has not"] if extra else []
    parts += [f"lacks {', '.join(missing[:3])}"] if missing else []
    what = f"its classes differ from those of train/: {' and '.join(parts)}"
    return DataError("D003", what, key=str(folder), suggestion="Give every split the same class folders")


def _newest(root: Path) -> int:
    """Latest change of a folder in the tree, two levels deep, in nanoseconds."""
    folders = [root, *(root.glob("*/")), *(root.glob("*/*/"))]
    return max(folder.stat().st_mtime_ns for folder in folders if folder.is_dir())
