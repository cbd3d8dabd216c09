"""Images in tar shards as webdataset writes them: files of one sample beside each other, under one name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.core.machine import spare_cores
from ptfast.core.sections.section import Count
from ptfast.data.data_fingerprint import Contents, describe_part
from ptfast.data.dataset import Splits, image_info
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, permutation
from ptfast.data.sources.image_files import ImageFiles, OnCorrupt, set_shapes
from ptfast.data.streams.remote_shards import is_url, open_shards
from ptfast.data.streams.shard_index import Label, Shard
from ptfast.data.streams.tar_headers import InTar

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


class WebDataset:
    """Images and labels in tar shards, on local disks or at URLs.

    Reading the headers shows what lies where. So the data has a length and epochs, and is shuffled, shared
    out over ranks and workers and resumed like any other, whatever the shards. With `data.shuffle_buffer`
    the shards are read nearly in their order, as disks that seek slowly and network disks need it.

    Args:
        shards: of the training data: a pattern such as `DIR/train-{000..146}.tar` or `DIR/*.tar`, a folder,
            a pattern of URLs such as `https://HOST/train-{000..146}.tar`, or a list of these.
        val_shards, test_shards: likewise, of held-out data.
        image_size: side in pixels that images are brought to: shorter side resized, centre cropped. None
            where all have one size.
        on_corrupt: `error`, or `skip` to leave out images that cannot be decoded.

    Raises:
        DataError: D001 for shards that are not there, D002 for one without samples, D003 for classes that
            only held-out data has, D005 for one that is no tar, or truncated; by `load`.
    """

    name = "webdataset"

    def __init__(
        self,
        shards: str | list[str],
        val_shards: str | list[str] | None = None,
        test_shards: str | list[str] | None = None,
        image_size: Count | None = None,
        on_corrupt: OnCorrupt = "error",
    ) -> None:
        self.image_size = image_size
        self.on_corrupt: OnCorrupt = on_corrupt
        wanted = {"train": shards, "val": val_shards, "test": test_shards}
        self.patterns = {split: pattern for split, pattern in wanted.items() if pattern is not None}

    def load(self, *, val: Duration, seed: int) -> Splits:
        indices: dict[str, _Index] = {}
        for split, pattern in self.patterns.items():
            places = expand(pattern, "data.shards" if split == "train" else f"data.{split}_shards")
            indices[split] = _Index(*zip(*open_shards(places), strict=True))
        names = _class_names(indices)
        threads = spare_cores(16)
        sources = {
            split: ShardedImages(
                index.members(),
                _targets(index, names),
                self.image_size,
                self.on_corrupt,
                threads,
            )
            for split, index in indices.items()
        }
        paths = [path for index in indices.values() for path in index.paths]
        num_classes = 0 if names is not None else max(map(int, indices["train"].labels)) + 1
        info = image_info(set_shapes(sources), class_names=names, num_classes=num_classes)
        note = f"in {len(paths)} shard{'s' * (len(paths) > 1)}"

        def cache_key() -> str:
            changes = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
            return f"{changes} {self.image_size}"

        return Splits.of(info, sources, note, contents=lambda: _contents(indices), cache_key=cache_key)


class ShardedImages(ImageFiles):
    """Images that are read out of their shards and decoded each time they are fetched."""

    paths: Members
    shuffle_buffer: int | None = None
    """Draw each sample out of about so many neighbours; None to shuffle all."""

    def order(self, seed: int, epoch: int) -> Indices | None:
        if self.shuffle_buffer is None:
            return None
        return nearby(seed, epoch, self.paths.shards, self.shuffle_buffer)


@dataclass(frozen=True, eq=False)
class Members(Sequence[str]):
    """Names of images in shards, each of which can be read.

    Held as arrays, which worker processes share with their parent; lists of a million names they would not.
    """

    paths: tuple[str, ...]
    """Of the shards."""
    shards: NDArray[np.int32]
    """The number of each image's shard."""
    names: NDArray[np.bytes_]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: Any) -> Any:
        """The image at a place, or the images at several, as with an array."""
        if isinstance(index, (int, np.integer)):
            name = self.names[index].decode("utf-8", "replace")
            place = int(self.offsets[index]), int(self.sizes[index])
            return InTar(self.paths[self.shards[index]], name, *place)
        return Members(
            self.paths, self.shards[index], self.names[index], self.offsets[index], self.sizes[index]
        )


def nearby(seed: int, epoch: int, shards: NDArray[np.integer], size: int) -> Indices:
    """An order of shards drawn at random, in which samples lie less than `size` from their place.

    What a shuffle buffer gives, as a function of (seed, epoch): nothing is held back, and any step is there
    at once. Reads stay within a few shards at a time.

    Args:
        shards: the number of each sample's shard.
        size: >= 1; 1 leaves the samples of a shard in their order.

    Cost: two sorts, 0.1 s for a million samples, once an epoch.
    """
    order = permutation(seed, epoch, int(shards.max()) + 1)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    in_turn = np.argsort(place[shards], kind="stable")
    numbers = np.arange(len(shards))
    shift = (counter_draws.bits(seed, epoch, numbers, counter_draws.NEARBY) >> np.uint64(11)) * (
        size * 2.0**-53
    )
    return in_turn[np.argsort(numbers + shift, kind="stable")]


def expand(pattern: str | Sequence[str], key: str) -> list[str]:
    """The files that a pattern of shards stands for: `{000..146}`, `{a,b}`, `*`, a folder, or a list of such.

    Of URLs only braces are expanded.

    Raises:
        DataError: D001 for one that is not there.
    """
    found: list[str] = []
    for text in [pattern] if isinstance(pattern, str) else pattern:
        if is_url(text):
            found += _braces(text)
            continue
        for each in _braces(str(Path(text).expanduser())):
            path, root = Path(each), Path(Path(each).anchor)
            inside = [path]
            if path.is_dir():
                inside = sorted(path.glob("*.tar"))
            elif not path.exists():
                inside = sorted(root.glob(str(path.relative_to(root))))
            if not inside:
                what = "holds no .tar files" if path.is_dir() else f"no such file: {each}"
                hint = f"Set {key}=DIR/train-{{000..146}}.tar, or to a folder of shards"
                raise DataError("D001", what, key=key, value=text, suggestion=hint)
            found += map(str, inside)
    return found


def _braces(text: str) -> list[str]:
    match = _BRACES.search(text)
    if match is None:
        return [text]
    first, last, words = match.groups()
    parts = words.split(",") if words is not None else _numbers(first, last)
    tails = _braces(text[match.end() :])
    return [text[: match.start()] + part + tail for part, tail in itertools.product(parts, tails)]


def _numbers(first: str, last: str) -> list[str]:
    """Numbers from `first` to `last`, up or down, as wide as the wider one where one has leading zeros."""
    width = max(map(len, (first, last))) if re.match("0.", first) or re.match("0.", last) else 0
    step = 1 if int(first) <= int(last) else -1
    return [str(number).zfill(width) for number in range(int(first), int(last) + step, step)]


@dataclass(frozen=True)
class _Index:
    """The samples of a split, shard by shard."""

    paths: tuple[Path, ...]
    shards: tuple[Shard, ...]

    @cached_property
    def labels(self) -> list[Label]:
        return [label for shard in self.shards for label in shard.labels.tolist()]

    def members(self) -> Members:
        numbers = np.repeat(
            np.arange(len(self.shards), dtype=np.int32), [len(s.offsets) for s in self.shards]
        )
        names, offsets, sizes, _ = (np.concatenate(parts) for parts in zip(*self.shards, strict=True))
        return Members(tuple(map(str, self.paths)), numbers, names, offsets, sizes)


def _contents(indices: dict[str, _Index]) -> Contents:
    return {
        f"{split}/{path.name}": describe_part(len(shard.offsets), "samples", *shard)
        for split, index in indices.items()
        for path, shard in zip(index.paths, index.shards, strict=True)
    }


def _class_names(indices: dict[str, _Index]) -> tuple[str, ...] | None:
    """The classes where labels are names; None where they are numbers."""
    known = set(indices["train"].labels)
    if all(isinstance(label, int) for label in known):
        for split, index in indices.items():
            if named := next((label for label in index.labels if isinstance(label, str)), None):
                what = f"holds the class {named}, and the labels of the training shards are numbers"
                raise DataError("D003", what, key=f"data.{split}_shards")
        return None
    names = tuple(sorted(map(str, known)))
    for split, index in indices.items():
        if unknown := sorted({*map(str, index.labels)} - {*names}):
            what = f"holds the class {unknown[0]}, which the training shards have not"
            raise DataError("D003", what, key=f"data.{split}_shards")
    return names


def _targets(index: _Index, names: tuple[str, ...] | None) -> torch.Tensor:
    if names is None:
        return torch.tensor([int(label) for label in index.labels])
    number = {name: place for place, name in enumerate(names)}
    return torch.tensor([number[str(label)] for label in index.labels])
