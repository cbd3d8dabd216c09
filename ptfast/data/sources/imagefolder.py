"""Images in class folders: `train/<class>/*`, with `val/` and `test/` next to it, or class folders alone."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.sections.section import Count
from ptfast.data.data_fingerprint import Contents
from ptfast.data.dataset import ReadsAsKnown, Splits, image_info
from ptfast.data.packs.pack_reader import STAT_LIMIT, open_pack
from ptfast.data.packs.packed_images import load_packed_images
from ptfast.data.sources.class_folders import (
    Listing,
    PassedOver,
    list_tree,
    newest_folder,
    tree_contents,
)
from ptfast.data.sources.image_files import ImageFiles, OnCorrupt, set_shapes


class ImageFolder(ReadsAsKnown):
    """A tree of class folders of images; the loader decides when they are decoded.

    Args:
        root: folder of `train/` (and `val/`, `test/`) with class folders, of class folders alone, or a pack
            of these made by `ptfast pack`.
        image_size: side in pixels that images are brought to: shorter side resized, center cropped. None if
            all have one size.
        on_corrupt: `error` stops at the first file that cannot be decoded; `skip` leaves such files out, and
            other samples keep their index.

    Raises:
        ConfigError: C011 for a pack with `on_corrupt=skip`.
        DataError: D001 to D003 by `load` when the tree does not fit, D005 for a file that cannot be decoded,
            D007 for a pack that is incomplete or older than its source.
    """

    name = "imagefolder"

    def __init__(
        self,
        root: str,
        image_size: Count | None = None,
        on_corrupt: OnCorrupt = "error",
    ) -> None:
        self.root, self.image_size = Path(root).expanduser(), image_size
        self.on_corrupt: OnCorrupt = on_corrupt

    def load(self, *, val: Duration, seed: int) -> Splits:
        if (manifest := open_pack(self.root)) is not None:
            if self.on_corrupt != "error":
                what = "the pack has left out unreadable files already"
                hint = "Use data.on_corrupt=error here, and ptfast pack --on-corrupt skip to leave files out"
                raise ConfigError("C011", what, key="data.on_corrupt", value=self.on_corrupt, suggestion=hint)
            return load_packed_images(self.root, manifest, self.image_size)
        passed = PassedOver()
        classes, listings = list_tree(self.root, passed=passed, complete=self.complete)
        sources = {
            split: ImageFiles(paths, torch.tensor(labels), self.image_size, self.on_corrupt)
            for split, (paths, labels) in listings.items()
        }
        info = image_info(set_shapes(sources), class_names=classes)
        files = cache(partial(self._look, classes, listings))
        return Splits.of(
            info, sources, passed.note, contents=lambda: files()[0], cache_key=lambda: files()[1]
        )

    def _look(self, classes: tuple[str, ...], listings: dict[str, Listing]) -> tuple[Contents, str]:
        """Return the fingerprint of each split's files, and the cache key of their statistics."""
        contents, newest_ns = tree_contents(self.root, classes, listings, STAT_LIMIT)
        # Overwriting a file does not change its folder's time.
        newest = max(newest_folder(self.root), newest_ns)
        digests = [facts[-1] for facts in contents.values()]
        return contents, " ".join(map(str, (self.root.resolve(), self.image_size, newest, *digests)))
