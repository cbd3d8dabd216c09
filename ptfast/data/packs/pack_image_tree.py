"""Packing a tree of class folders: its images decoded once, as pixels or as the files they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptfast.core.errors import DataError
from ptfast.data.decoding.image_decoding import decode, decode_file, read_file
from ptfast.data.decoding.pictures import resize_shorter
from ptfast.data.packs.pack_reader import ROW, Manifest, SourceFacts, SplitFacts, header_of
from ptfast.data.packs.pack_writer import PIECE_BYTES, Piece, Plan
from ptfast.data.packs.packed_images import pixel_sums
from ptfast.data.sources.class_folders import PassedOver, list_tree
from ptfast.data.transforms.normalize import finish_statistics

_PROBES = 32
"""Images that are decoded to see how much a piece holds."""
_MOST_IMAGES = 4096
"""Of a piece, however small they are."""


_ImageJob = tuple[list[str], list[int]]
"""Paths of images and their labels."""


def plan_images(root: Path, *, size: int | None, jpeg: bool, skip_corrupt: bool) -> Plan:
    """Cut the tree at `root` into jobs.

    Args:
        size: pixels that longer shorter sides are brought to; None to keep all sizes.
        jpeg: keep the bytes of the files instead of pixels.
        skip_corrupt: leave out files that cannot be read, instead of stopping at the first.

    Raises:
        DataError: D001 to D003 when there is no such tree.
    """
    passed = PassedOver()
    class_names, listings = list_tree(root, "SRC", passed)
    paths = [path for split_paths, _ in listings.values() for path in split_paths]
    source = SourceFacts.of(root, paths)
    mean_bytes = source.bytes / source.files if jpeg else _mean_pixels(listings["train"][0], size)
    # Files that are kept are decoded too, to check them, but one at a time: they need no memory together.
    per_piece = max(1, min(_MOST_IMAGES, int(PIECE_BYTES / max(mean_bytes, 1))))
    jobs = [
        (split, (split_paths[i : i + per_piece], labels[i : i + per_piece]))
        for split, (split_paths, labels) in listings.items()
        for i in range(0, len(split_paths), per_piece)
    ]
    kind = "jpeg" if jpeg else "pixels"
    manifest = Manifest(kind, source, {}, size=size, class_names=list(class_names))
    return Plan(
        header={**header_of(manifest), "skip_corrupt": skip_corrupt, "jobs": len(jobs)},
        jobs=jobs,
        num_seen=source.files,
        estimated_bytes=int(mean_bytes * source.files),
        convert=partial(convert_images, size=size, jpeg=jpeg, skip_corrupt=skip_corrupt),
        describe=partial(_describe, manifest),
        note=passed.note,
    )


def _describe(
    manifest: Manifest, splits: dict[str, SplitFacts], facts: dict[str, list[dict[str, Any]]], folder: Path
) -> Manifest:
    """`manifest` with what has been written."""
    described, statistics = dict[str, SplitFacts](), None
    for name, split in splits.items():
        rows = np.fromfile(folder / f"{name}.index", ROW)
        missing = set(range(len(manifest.class_names))) - set(np.unique(rows["label"]).tolist())
        if missing:
            what = f"none of the {name} images of {manifest.class_names[min(missing)]} can be read"
            hint = "Replace them, or remove the class"
            raise DataError("D003", what, key=manifest.source.path, suggestion=hint)
        sizes = np.unique(rows[["height", "width"]])
        same = manifest.kind == "pixels" and len(sizes) == 1
        described[name] = replace(
            split,
            shape=[int(sizes["height"][0]), int(sizes["width"][0]), 3] if same else None,
            converted=int(rows["converted"].sum()),
        )
        if name == "train":
            statistics = finish_statistics(*pixel_sums(rows))
    skipped = [file for pieces in facts.values() for piece in pieces for file in piece["skipped"]]
    return replace(manifest, splits=described, statistics=statistics, skipped=skipped)


def convert_images(job: _ImageJob, *, size: int | None, jpeg: bool, skip_corrupt: bool) -> Piece:
    """Read, check and shrink the images of a job."""
    data: list[bytes | memoryview] = []
    rows: list[tuple[Any, ...]] = []
    skipped: list[dict[str, str]] = []
    for path, label in zip(*job, strict=True):
        try:
            content = read_file(path)
            pixels, converted = decode(content, path)
        except DataError as error:
            if skip_corrupt:
                skipped.append({"file": path, "reason": error.what})
                continue
            hint = "Replace the file, or leave such files out with --on-corrupt skip"
            raise DataError(error.code, error.what, key=path, suggestion=hint) from None
        height, width, _ = pixels.shape
        # Nothing is gained by storing enlarged images.
        if size is not None and min(height, width) > size:
            pixels = resize_shorter(torch.from_numpy(np.ascontiguousarray(pixels)), size).numpy()
        stored = content if jpeg else np.ascontiguousarray(pixels).data.cast("B")
        data.append(stored)
        by_row = pixels.reshape(len(pixels), -1)
        # Whole rows are added up first, which keeps the inner loop long; squares of bytes fit into 16 bits.
        sums = by_row.sum(0, dtype=np.int64).reshape(-1, 3).sum(0)
        squares = np.square(by_row, dtype=np.uint16).sum(0, dtype=np.int64).reshape(-1, 3).sum(0)
        rows.append((len(stored), *pixels.shape[:2], height, width, label, converted, sums, squares))
    return Piece(b"".join(data), np.array(rows, ROW).tobytes(), len(rows), len(job[0]), {"skipped": skipped})


def _mean_pixels(paths: Sequence[str], size: int | None) -> float:
    """Mean bytes of an image once decoded and shrunk, by a sample of the files."""
    found: list[float] = []
    for path in paths[:: max(1, len(paths) // _PROBES)][:_PROBES]:
        try:
            pixels = decode_file(path).pixels
        except DataError:
            continue  # reported when it is converted
        height, width, _ = pixels.shape
        scale = 1 if size is None else min(1.0, size / min(height, width))
        found.append(height * width * 3 * scale**2)
    return float(np.mean(found)) if found else float(PIECE_BYTES)
