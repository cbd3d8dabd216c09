"""Images in webdataset tar shards: consecutive files of one name make a sample."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ByteSize, TypeAdapter

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.sections.section import Count
from ptfast.data.data_fingerprint import Contents, describe_part
from ptfast.data.dataset import Splits, image_info
from ptfast.data.decoding.image_decoding import InTar, is_hidden, without_hidden
from ptfast.data.label_checks import number_names
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.sampler import Indices, permutation
from ptfast.data.sources.image_files import ImageFiles, OnCorrupt, set_shapes
from ptfast.data.streams.shard_cache import ShardCache, is_url
from ptfast.data.streams.shard_index import Label, Shard, index_shard
from ptfast.data.streams.shard_stream import Shards, ShardStream

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}")


class WebDataset:
    """Images and labels in tar shards, on local disks or at URLs.

    The headers of local shards show where each sample is. So the data has a length and epochs, and is
    shuffled, split over ranks and workers, and resumed like any other. With `data.shuffle_buffer`, shards are
    read nearly in order, which slow and network disks need. Shards at URLs are a stream: they are downloaded
    as training reaches them, and need `steps` and `classes`.

    Args:
        shards: of the training data: a pattern such as `DIR/train-{000..146}.tar` or `DIR/*.tar`, a folder,
            a pattern of URLs such as `https://HOST/train-{000..146}.tar`, or a list of these.
        val_shards, test_shards: shards of held-out data, in the same forms.
        image_size: side in pixels that images are brought to: shorter side resized, center cropped. None if
            all have one size.
        on_corrupt: `error`, or `skip` to leave out images that cannot be decoded.
        classes: number or names of the classes; for shards at URLs.
        cache: largest disk space for copies of shards at URLs, such as `20GB`.

    Raises:
        ConfigError: C005 if `cache` is not a size; by `load`, C011 if it is too small and C016 without
            `classes`.
        DataError: D001 for missing shards, D002 for one without samples, D003 for labels of two kinds, D004
            for captions and for classes that only held-out data has, D005 for a shard that is truncated or
            not a tar; by `load`.
    """

    name = "webdataset"

    def __init__(
        self,
        shards: str | list[str],
        val_shards: str | list[str] | None = None,
        test_shards: str | list[str] | None = None,
        image_size: Count | None = None,
        on_corrupt: OnCorrupt = "error",
        classes: int | list[str] | None = None,
        cache: str | int = "20GB",
    ) -> None:
        self.image_size, self.classes, self.cache = image_size, classes, cache
        try:
            self.cache_bytes: int = TypeAdapter(ByteSize).validate_python(cache)
        except ValueError:
            raise ConfigError("C005", "is no size such as 20GB", key="data.cache", value=cache) from None
        self.on_corrupt: OnCorrupt = on_corrupt
        wanted = {"train": shards, "val": val_shards, "test": test_shards}
        self.patterns = {split: pattern for split, pattern in wanted.items() if pattern is not None}

    def load(self, *, val: Duration, seed: int) -> Splits:
        places, hidden = dict[str, list[str]](), list[str]()
        for split, pattern in self.patterns.items():
            key = "data.shards" if split == "train" else f"data.{split}_shards"
            places[split] = expand(pattern, key, hidden)
        if any(is_url(place) for found in places.values() for place in found):
            urls = {
                split: [each if is_url(each) else Path(each).absolute().as_uri() for each in found]
                for split, found in places.items()
            }
            return self._stream(urls, seed)
        if self.classes is not None:
            what, hint = "is for shards at URLs: labels of local ones show them", "Leave it out"
            raise ConfigError("C011", what, key="data.classes", value=self.classes, suggestion=hint)
        shards = {
            split: [(Path(place), index_shard(Path(place))) for place in found]
            for split, found in places.items()
        }
        names, targets = _number_labels(shards)
        sources = {
            split: ShardedImages(Members.of(found), targets[split], self.image_size, self.on_corrupt)
            for split, found in shards.items()
        }
        info = image_info(set_shapes(sources), class_names=names)
        paths = [path for found in shards.values() for path, _ in found]
        num_hidden = len(hidden) + sum(int(shard.hidden) for found in shards.values() for _, shard in found)
        note = f"in {len(paths)} shard{'s' * (len(paths) > 1)}"
        note = "; ".join(filter(None, [note, without_hidden(num_hidden)]))

        def contents() -> Contents:
            return {
                f"{split}/{path.name}": describe_part(len(shard.offsets), "samples", *shard[:-2])
                for split, found in shards.items()
                for path, shard in found
            }

        def cache_key() -> str:
            changes = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
            return f"{changes} {self.image_size}"

        return Splits.of(info, sources, note, contents=contents, cache_key=cache_key)

    def _stream(self, places: dict[str, list[str]], seed: int) -> Splits:
        """Return splits, some of which are at URLs."""
        if self.classes is None:
            what = "is needed, because labels at URLs are not read beforehand"
            hint = "Set data.classes=1000, or the list of their names"
            raise ConfigError("C016", what, key="data.classes", suggestion=hint)
        names = None if isinstance(self.classes, int) else tuple(self.classes)
        sources = {
            split: ShardStream(
                Shards(found, ShardCache(self.cache_bytes), seed),
                self.classes,
                self.image_size,
                self.on_corrupt,
            )
            for split, found in places.items()
        }
        shape = tuple(sources["train"].first_image().shape)
        for source in sources.values():
            source.shape = shape
        info = image_info((shape[2], *shape[:2]), class_names=names)
        info = replace(info, num_classes=len(names) if names else self.classes)
        num_shards = sum(map(len, places.values()))
        note = f"in {num_shards} shards that are fetched as they are read, {self.cache} at a time"
        return Splits.of(info, sources, note)


class ShardedImages(ImageFiles):
    """Images read from their shards and decoded on every fetch."""

    joins = False
    paths: Members
    shuffle_buffer: int | None = None
    """Draw each sample from about this many neighbors; None to shuffle all."""

    def order(self, seed: int, epoch: int) -> Indices | None:
        if self.shuffle_buffer is None:
            return None
        return nearby(seed, epoch, self.paths.shards, self.shuffle_buffer)


@dataclass(frozen=True, eq=False)
class Members(Sequence[str]):
    """Names of images in shards, kept as arrays: worker processes share them with their parent."""

    paths: tuple[str, ...]
    """Paths of the shards."""
    shards: NDArray[np.int32]
    """Index of each image's shard."""
    names: NDArray[np.bytes_]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, shards: Sequence[tuple[Path, Shard]]) -> Members:
        counts = [len(shard.offsets) for _, shard in shards]
        numbers = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
        columns = zip(*((shard.names, shard.offsets, shard.sizes) for _, shard in shards), strict=True)
        return cls(tuple(str(path) for path, _ in shards), numbers, *map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, index: Any) -> Any:
        """Return the image at an index, or the images at several, like an array."""
        if isinstance(index, (int, np.integer)):
            name = self.names[index].decode("utf-8", "replace")
            place = int(self.offsets[index]), int(self.sizes[index])
            return InTar(self.paths[self.shards[index]], name, *place)
        names, offsets, sizes = self.names[index], self.offsets[index], self.sizes[index]
        return Members(self.paths, self.shards[index], names, offsets, sizes)


def nearby(seed: int, epoch: int, shards: NDArray[np.integer], size: int) -> Indices:
    """Return a random order of shards in which each sample moves by less than `size` (>= 1) places.

    It acts like a shuffle buffer, as a function of (seed, epoch): no samples are buffered, and any step is
    known at once. Reads stay within a few shards at a time; `shards` gives the shard of each sample.

    Cost: two sorts, 0.1 s for a million samples, once per epoch.
    """
    order = permutation(seed, epoch, int(shards.max()) + 1)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    in_turn = np.argsort(place[shards], kind="stable")
    numbers = np.arange(len(shards))
    bits = counter_draws.bits(seed, epoch, numbers, counter_draws.NEARBY)
    shift = (bits >> np.uint64(11)) * (size * 2.0**-53)
    return in_turn[np.argsort(numbers + shift, kind="stable")]


def expand(pattern: str | Sequence[str], key: str, hidden: list[str]) -> list[str]:
    """Return the files of a shard pattern: `{000..146}`, `{a,b}`, `*` (not in URLs), a folder or a list.

    `hidden` collects hidden shards, such as those of macOS, which are left out.

    Raises:
        DataError: D001 for a missing shard.
    """
    found: list[str] = []
    for text in [pattern] if isinstance(pattern, str) else pattern:
        if is_url(text):
            found += _braces(text)
            continue
        for each in _braces(str(Path(text).expanduser())):
            path, root = Path(each), Path(Path(each).anchor)
            inside = [path]
            if path.is_dir() or not path.exists():
                fitting = path.glob("*.tar") if path.is_dir() else root.glob(str(path.relative_to(root)))
                everything = sorted(fitting)
                inside = [each for each in everything if not is_hidden(each.name)]
                hidden += [str(each) for each in everything if is_hidden(each.name)]
            if not inside:
                what = "contains no .tar files" if path.is_dir() else f"no such file: {each}"
                hint = f"Set {key}=DIR/train-{{000..146}}.tar, or to a folder of shards"
                raise DataError("D001", what, key=key, value=text, suggestion=hint)
            found += map(str, inside)
    return found


def _braces(text: str) -> list[str]:
    match = _BRACES.search(text)
    if match is None:
        return [text]
    first, last, words = match.groups()
    if words is not None:
        parts = words.split(",")
    else:
        # Count up or down; pad to the wider number if either has leading zeros.
        width = max(len(first), len(last)) if re.match("0.", first) or re.match("0.", last) else 0
        step = 1 if int(first) <= int(last) else -1
        parts = [str(number).zfill(width) for number in range(int(first), int(last) + step, step)]
    tails = _braces(text[match.end() :])
    return [text[: match.start()] + part + tail for part, tail in itertools.product(parts, tails)]


def _number_labels(
    shards: dict[str, list[tuple[Path, Shard]]],
) -> tuple[tuple[str, ...] | None, dict[str, torch.Tensor]]:
    """Return the class names (None if labels are numbers) and the class numbers of each split."""
    labels: dict[str, list[Label]] = {
        split: [label for _, shard in found for label in shard.labels.tolist()]
        for split, found in shards.items()
    }
    known = set(labels["train"])
    if all(isinstance(label, int) for label in known):
        for split, own in labels.items():
            if named := next((label for label in own if isinstance(label, str)), None):
                what = f"contains the class {named}, and the labels of the training shards are numbers"
                raise DataError("D003", what, key=f"data.{split}_shards")
        return None, {split: torch.tensor(own) for split, own in labels.items()}
    facts, targets = number_names({split: [*map(str, own)] for split, own in labels.items()})
    return facts["class_names"], targets
