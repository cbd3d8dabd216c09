"""Images in class folders: `train/<class>/*`, with `val/` and `test/` beside it, or class folders alone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ptfast.data.contents import class_parts
from ptfast.data.crops import Boxes, Sizes, resized_crop
from ptfast.data.images import SUFFIXES, Decoder, Pixels, decode_all, mixed_sizes, size_of
from ptfast.data.packed import STAT_LIMIT, newest_folder, open_pack
from ptfast.data.packed_images import PackedFolder
from ptfast.data.source import Held, Source, Splits, TensorSource, as_tensor
from ptfast.data.threads import in_threads
from ptfast.errors import ConfigError, DataError
from ptfast.machine import spare_cores
from ptfast.run import IGNORE_INDEX, DataInfo

if TYPE_CHECKING:
    from torch import Tensor

    from ptfast.data.sampler import Indices
    from ptfast.data.sharing import Holder
    from ptfast.durations import Duration

_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "dev"), "test": ("test",)}
OnCorrupt = Literal["error", "skip"]
DecodesJpeg = Literal["cpu", "nvjpeg"]
_SOME = 64
"""Files whose sizes tell how large all are, about."""
Listing = tuple[list[str], list[int]]


class ImageFolder:
    """A tree of class folders, of which the loader decides when images are decoded.

    Args:
        root: the folder: with `train/` (and `val/`, `test/`) of class folders, with class folders, or with a
            pack of these, made by `ptfast pack`.
        image_size: side in pixels that images are brought to: shorter side resized, centre cropped. None
            where all have one size.
        threads: that decode what is held in memory; `auto` for one per core.
        on_corrupt: what is done about files that cannot be decoded: `error` names the first and stops; `skip`
            leaves them out, without moving any other sample to another index.
        decoder: of JPEG files for `augment.resized_crop`: `cpu`, or `nvjpeg` for the GPU that trains, which
            leaves other files to the CPU.

    Raises:
        ConfigError: C011 for a pack that a GPU is to decode, or of which files are to be skipped.
        MachineError: E005 for a GPU that decodes no JPEG.
        DataError: D001 to D003 by `load` when the tree does not fit, D005 for a file that cannot be decoded,
            D007 for a pack that is not whole or older than its source.
    """

    name = "imagefolder"

    def __init__(
        self,
        root: str,
        image_size: int | None = None,
        threads: int | Literal["auto"] = "auto",
        on_corrupt: OnCorrupt = "error",
        decoder: DecodesJpeg = "cpu",
    ) -> None:
        self.decoder: DecodesJpeg = decoder
        self.root, self.image_size = Path(root).expanduser(), image_size
        self.on_corrupt: OnCorrupt = on_corrupt
        self.threads = spare_cores(16) if threads == "auto" else threads

    def load(self, *, val: Duration, seed: int) -> Splits:
        if (manifest := open_pack(self.root)) is not None:
            if self.decoder != "cpu":
                what, hint = "packs are read on the host", "Use data.decoder=cpu"
                raise ConfigError("C011", what, key="data.decoder", value=self.decoder, suggestion=hint)
            if self.on_corrupt != "error":
                what = "the pack has left out already what cannot be read"
                hint = "Use data.on_corrupt=error here, and ptfast pack --on-corrupt skip to leave files out"
                raise ConfigError("C011", what, key="data.on_corrupt", value=self.on_corrupt, suggestion=hint)
            return PackedFolder(self.root, manifest, self.image_size).load()
        classes, listings = list_tree(self.root)
        decoder, files_class = Decoder(self.image_size), self._files_class()
        sources = {
            split: files_class(paths, torch.tensor(labels), decoder, self.on_corrupt, self.threads)
            for split, (paths, labels) in listings.items()
        }
        height, width, channels = sources["train"].fetch(np.arange(1))[0].shape[1:]
        for source in sources.values():
            source.shape = height, width, channels
        looks = {
            split: class_parts(split, self.root, classes, *listing, STAT_LIMIT)
            for split, listing in listings.items()
        }
        contents = {name: facts for parts, _ in looks.values() for name, facts in parts.items()}
        # Files that are written over leave their folder as it is.
        newest = max(newest_folder(self.root), *(newest_ns for _, newest_ns in looks.values()))
        digests = [facts[-1] for facts in contents.values()]
        key = (self.root.resolve(), self.image_size, newest, *digests)
        info = DataInfo(
            kind="image",
            task="classification",
            num_classes=len(classes),
            class_names=classes,
            input_shape=(channels, height, width),
            in_channels=channels,
            extra={"cache_key": " ".join(map(str, key))},
        )
        return Splits(
            info, sources["train"], sources.get("val"), sources.get("test"), contents=lambda: contents
        )

    def _files_class(self) -> type[ImageFiles]:
        if self.decoder == "cpu":
            return ImageFiles
        from ptfast.data.nvjpeg import NvJpegFiles, check_decoder

        check_decoder()
        return NvJpegFiles


class ImageFiles(Source):
    """Images that are decoded each time they are fetched, by as many threads as torch has here.

    Decoding leaves the interpreter to others, so that threads of one process do it side by side.

    Args:
        paths: of the files.
        targets: int64 (files,).
        decoder: brings whole images to their size.
        on_corrupt: `error` refuses a file that cannot be decoded. `skip` shows the next one that can be in
            its place, with a label that does not count, so that every other sample keeps its index.
    """

    images = True
    repeatable = True

    def __init__(
        self,
        paths: Sequence[str],
        targets: Tensor,
        decoder: Decoder,
        on_corrupt: OnCorrupt = "error",
        threads: int = 1,
    ) -> None:
        self.paths, self.targets, self.decoder, self.skips = paths, targets, decoder, on_corrupt == "skip"
        self.threads = threads
        self.corrupt: set[int] = set()
        """Samples that are known to be unreadable."""
        self._converted: set[int] = set()
        self.shape: tuple[int, ...] = ()
        """(height, width, channels) of every image; empty until it is known."""
        self.image_size = decoder.image_size
        self._whole = Decoder()
        self._sizes = np.zeros((2, len(paths)), np.int32)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def held_bytes(self) -> int | None:
        return len(self.paths) * math.prod(self.shape) if self.shape else None

    @property
    def original_bytes(self) -> int:
        some = np.unique(np.linspace(0, len(self) - 1, _SOME).astype(np.int64))
        return int(3 * len(self) * np.prod(self.sizes(some), 0).mean())

    @property
    def num_converted(self) -> int:
        # In place of an unreadable file another is shown, which counts for itself.
        return len(self._converted - self.corrupt)

    def fetch(self, indices: Indices, epoch: int = 0) -> tuple[Tensor, Tensor]:
        pixels = self._pixels(indices, self.decoder)
        expected = self.shape or pixels[0].shape
        for index, image in zip(indices, pixels, strict=True):
            if image.shape != expected:
                raise mixed_sizes(self.paths[int(index)], image.shape, expected)
        return torch.from_numpy(np.stack(pixels)), self.labels(indices)

    def labels(self, indices: Indices) -> Tensor:
        """The targets of samples `indices`, which have been fetched; `IGNORE_INDEX` for unreadable ones."""
        labels = super().labels(indices)
        if self.corrupt:
            labels[torch.from_numpy(np.isin(indices, list(self.corrupt)))] = IGNORE_INDEX
        return labels

    def originals(self, indices: Indices) -> list[Pixels]:
        return self._pixels(indices, self._whole)

    def sizes(self, indices: Indices) -> tuple[Sizes, Sizes]:
        """Heights and widths of the images by their files, each read once."""
        for index in indices:
            if not self._sizes[0, index]:
                self._sizes[:, index] = self._size_of(index)
        heights, widths = self._sizes[:, indices].astype(np.int64)
        return heights, widths

    def crops(self, indices: Indices, boxes: Boxes, size: int, mirrored: Indices) -> Tensor:
        def crop(path: str, place: int) -> Tensor:
            return resized_crop(self._whole(path).pixels, boxes[place], bool(mirrored[place]), size)

        return torch.stack(self._each(indices, crop))

    def see(self, indices: Indices, targets: Tensor) -> None:
        self.corrupt.update(indices[targets.numpy() == IGNORE_INDEX].tolist())

    def unreadable(self) -> list[str]:
        return [self.paths[i] for i in sorted(self.corrupt)]

    def ignores_labels(self) -> bool:
        return self.skips or super().ignores_labels()

    def _size_of(self, index: int) -> tuple[int, int]:
        try:
            return size_of(self.paths[index])
        except DataError:
            if not self.skips:
                raise
            return 1, 1

    def _pixels(self, indices: Indices, decoder: Decoder) -> list[Pixels]:
        decoded = self._each(indices, lambda path, _: decoder(path))
        self._converted.update(int(i) for i, image in zip(indices, decoded, strict=True) if image.converted)
        return [image.pixels for image in decoded]

    def _each(self, indices: Indices, read: Callable[[str, int], Any]) -> list[Any]:
        """What `read` makes of the file and the place of each of `indices`."""
        return in_threads(len(indices), lambda place: self._readable(int(indices[place]), place, read))

    def _readable(self, index: int, place: int, read: Callable[[str, int], Any]) -> Any:
        """What `read` makes of file `index`, or where files may be skipped, of the next that it can read."""
        if not self.skips:
            return read(self.paths[index], place)
        for other in chain(range(index, len(self.paths)), range(index)):
            if other not in self.corrupt:
                try:
                    return read(self.paths[other], place)
                except DataError:
                    self.corrupt.add(other)
        raise DataError("D005", "cannot be decoded, nor any other file", key=self.paths[index])

    def hold(self, holder: Holder | None = None) -> Held:
        if self.skips:
            return Held(super().hold().source, self.num_converted)
        images, num_converted = decode_all(self.decoder, self.paths, self.threads, holder)
        return Held(TensorSource(images, self.targets, images=True), num_converted)

    def take(self, indices: Indices) -> ImageFiles:
        taken = type(self)(
            [self.paths[int(i)] for i in indices],
            self.targets.index_select(0, as_tensor(indices)),
            self.decoder,
            "skip" if self.skips else "error",
            self.threads,
        )
        taken.shape = self.shape
        return taken


def list_tree(root: Path, key: str = "data.root") -> tuple[tuple[str, ...], dict[str, Listing]]:
    """Class names, and for each split its files and their labels, in the order of their names.

    Args:
        key: that led here, for messages.

    Raises:
        DataError: D001 to D003 when there is no such tree.
    """
    folders = _subfolders(root, key)
    by_split = {split: [root / name for name in names if name in folders] for split, names in _SPLITS.items()}
    if not by_split["train"]:
        found = [folder.name for group in by_split.values() for folder in group]
        if found:
            what = f"has {found[0]}/ but no train/"
            raise DataError("D003", what, key=key, value=root, suggestion="Put class folders in train/")
        by_split = {"train": [root]}
    classes: tuple[str, ...] = ()
    listings: dict[str, Listing] = {}
    for split, split_folders in by_split.items():
        if not split_folders:
            continue
        names, listings[split] = _list_split(split_folders[0], key)
        if split == "train":
            classes = names
        elif names != classes:
            raise _differ(split_folders[0], names, classes)
    return classes, listings


def _list_split(folder: Path, key: str) -> tuple[tuple[str, ...], Listing]:
    names = tuple(_subfolders(folder, key))
    if not names:
        raise DataError("D002", "holds no class folders", key=key, value=folder)
    if len(names) == 1:
        what = f"holds one class only ({names[0]}), which leaves nothing to tell apart"
        raise DataError("D003", what, key=key, value=folder, suggestion="Give each class a folder of its own")
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


def _subfolders(folder: Path, key: str) -> list[str]:
    hint = f"Set {key} to a folder of class folders"
    if not folder.exists():
        raise DataError("D001", "no such folder", key=key, value=folder, suggestion=hint)
    if not folder.is_dir():
        raise DataError("D001", "is a file, not a folder", key=key, value=folder, suggestion=hint)
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise DataError("D001", what, key=key, value=folder) from None
    if not entries:
        raise DataError("D002", "is an empty folder", key=key, value=folder, suggestion=hint)
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
