"""Sources of packs: a tree of class folders, decoded once, or a text file, tokenized once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ptfast.core.errors import DataError
from ptfast.data.decoding.image_decoding import decode, decode_file, read_file
from ptfast.data.decoding.pictures import resize_shorter
from ptfast.data.decoding.text_tokenizer import BUILT_IN, Tokenizer, Vocabulary, encode_anew, learn_tokenizer
from ptfast.data.packs.pack_reader import ROW, Manifest, SourceFacts, TextFacts
from ptfast.data.packs.pack_writer import Piece, Plan
from ptfast.data.packs.packed_images import pixel_sums
from ptfast.data.sources.class_folders import PassedOver, list_tree
from ptfast.data.sources.text_dataset import split_documents
from ptfast.data.transforms.normalize import finish_statistics

IMAGE_BYTES = 16 * 2**20
"""Bytes of images that a process converts at once; each process needs a few such pieces in memory."""
_PROBES = 32
"""Number of images to read for an estimate of the images per piece."""
_MOST_IMAGES = 4096
"""Maximum number of images per piece."""
TEXT_BYTES = 4 * 2**20
"""Bytes of text that a process converts at once; Python's lists of numbers take 100 times as much."""
WHOLE_BYTES = 64 * 2**20
"""The same for running text and a third-party tokenizer, which may look beyond the end of a line."""
_BLANK = b" \t\r\n"

_ImageJob = tuple[list[str], list[int]]
"""Paths of images and their labels."""


class _TextJob(NamedTuple):
    """A range of bytes of a file."""

    path: str
    start: int
    stop: int


def plan_images(root: Path, *, size: int | None, jpeg: bool, skip_corrupt: bool) -> Plan:
    """Divide the tree at `root` into jobs.

    Args:
        size: resize images with a longer shorter side to this many pixels; None to keep all sizes.
        jpeg: keep the bytes of the files instead of pixels.
        skip_corrupt: leave out unreadable files, instead of stopping at the first.

    Raises:
        DataError: D001 to D003 if there is no such tree.
    """
    passed = PassedOver()
    class_names, listings = tree = list_tree(root, "SRC", passed)
    mean_bytes = _mean_bytes(listings["train"][0], size, jpeg)
    # Unchanged files are decoded too, as a check, but one at a time, so their pixels do not add up in memory.
    per_piece = max(1, min(_MOST_IMAGES, int(IMAGE_BYTES / max(mean_bytes, 1))))
    jobs = [
        (split, (split_paths[i : i + per_piece], labels[i : i + per_piece]))
        for split, (split_paths, labels) in listings.items()
        for i in range(0, len(split_paths), per_piece)
    ]
    options = f"--size {size}" if size else "--jpeg" if jpeg else ""
    manifest = Manifest(
        "jpeg" if jpeg else "pixels",
        SourceFacts.of(root, tree),
        options,
        skip_corrupt,
        size=size,
        class_names=list(class_names),
    )
    files = sum(len(split_paths) for split_paths, _ in listings.values())
    convert = partial(convert_images, size=size, jpeg=jpeg, skip_corrupt=skip_corrupt)
    return Plan(manifest, jobs, files, int(mean_bytes * files), convert, _with_statistics, passed.note)


def _with_statistics(manifest: Manifest, folder: Path) -> Manifest:
    """Add the statistics of the training pixels; raise D003 for a class without a readable image."""
    for split in manifest.splits:
        rows = np.fromfile(folder / f"{split}.index", ROW)
        missing = set(range(len(manifest.class_names))) - set(np.unique(rows["label"]).tolist())
        if missing:
            what = f"none of the {split} images of {manifest.class_names[min(missing)]} can be read"
            hint = "Replace them, or remove the class"
            raise DataError("D003", what, key=manifest.source.path, suggestion=hint)
        if split == "train":
            manifest = replace(manifest, statistics=finish_statistics(*pixel_sums(rows)))
    return manifest


def convert_images(job: _ImageJob, *, size: int | None, jpeg: bool, skip_corrupt: bool) -> Piece:
    """Read, check and downscale the images of a job."""
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
        # Images are never enlarged: it would only cost space.
        if size is not None and min(height, width) > size:
            pixels = resize_shorter(torch.from_numpy(np.ascontiguousarray(pixels)), size).numpy()
        stored = content if jpeg else np.ascontiguousarray(pixels).data.cast("B")
        data.append(stored)
        by_row = pixels.reshape(len(pixels), -1)
        # Rows are summed first, which keeps the inner loop long. Squares of bytes fit into 16 bits.
        sums = by_row.sum(0, dtype=np.int64).reshape(-1, 3).sum(0)
        squares = np.square(by_row, dtype=np.uint16).sum(0, dtype=np.int64).reshape(-1, 3).sum(0)
        rows.append((len(stored), *pixels.shape[:2], height, width, label, converted, sums, squares))
    return Piece(b"".join(data), np.array(rows, ROW).tobytes(), len(job[0]), skipped)


def _mean_bytes(paths: Sequence[str], size: int | None, jpeg: bool) -> float:
    """Estimate the mean bytes of a stored image, by a sample of the files."""
    found: list[float] = []
    for path in paths[:: max(1, len(paths) // _PROBES)][:_PROBES]:
        try:
            if jpeg:
                found.append(len(read_file(path)))
                continue
            height, width, _ = decode_file(path).pixels.shape
        except DataError:
            continue  # reported when it is converted
        scale = 1 if size is None else min(1.0, size / min(height, width))
        found.append(height * width * 3 * scale**2)
    return float(np.mean(found)) if found else float(IMAGE_BYTES)


def plan_text(path: Path, *, tokenizer: str = "characters", documents: str = "none") -> Plan:
    """Divide the text file `path` into jobs, between lines or documents.

    Args:
        tokenizer, documents: as for `TextFile`.

    Raises:
        DataError: D001, D002 or D005 for a file that is missing, empty or not UTF-8.
    """
    path = path.resolve()
    whole = documents == "none" and tokenizer not in BUILT_IN
    jobs = list(_jobs(path, WHOLE_BYTES if whole else TEXT_BYTES, blank_lines=documents == "paragraphs"))
    found = learn_tokenizer(tokenizer, map(_read, jobs), None)
    if isinstance(found, Vocabulary) and not any(entry.strip() for entry in found.entries):
        raise DataError("D002", "contains no text", key="SRC", value=path)
    given = {"--tokenizer": (tokenizer, "characters"), "--documents": (documents, "none")}
    options = " ".join(f"{flag} {value}" for flag, (value, default) in given.items() if value != default)
    text = TextFacts(tokenizer, found.describe(), documents)
    size = path.stat().st_size
    return Plan(
        Manifest("tokens", SourceFacts.of(path), options, text=text),
        jobs=[("text", job) for job in jobs],
        num_seen=size,
        # Character tokens take two or four bytes each; longer tokens take fewer per character.
        estimated_bytes=2 * size if tokenizer == "characters" else size,
        convert=partial(convert_text, tokenizer=found, documents=documents),
        complete=_with_tokens,
    )


def _with_tokens(manifest: Manifest, folder: Path) -> Manifest:
    if not manifest.data_bytes:
        raise DataError("D002", "contains no text", key="SRC", value=manifest.source.path)
    return manifest


def convert_text(job: _TextJob, *, tokenizer: Tokenizer, documents: str) -> Piece:
    """Tokenize the text of a job."""
    texts = split_documents(_read(job), documents)
    encoded = encode_anew(texts, tokenizer)
    rows = encoded.lengths.astype("<i8").tobytes()
    tokens = encoded.tokens.astype(encoded.tokens.dtype.newbyteorder("<"), copy=False)
    text_bytes = sum(len(part.encode()) for part in texts)
    return Piece(tokens.tobytes(), rows, job.stop - job.start, text_bytes=text_bytes)


def _read(job: _TextJob) -> str:
    with Path(job.path).open("rb") as file:
        file.seek(job.start)
        content = file.read(job.stop - job.start)
    try:
        return content.decode("utf-8-sig" if job.start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        what, hint = f"is not UTF-8 text (byte {job.start + error.start:,})", "Convert it with iconv -t utf-8"
        raise DataError("D005", what, key="SRC", value=job.path, suggestion=hint) from None


def _jobs(path: Path, piece_bytes: int, *, blank_lines: bool) -> Iterator[_TextJob]:
    """Yield pieces of at least `piece_bytes` that end with a line, or with `blank_lines` before a text."""
    size, start = path.stat().st_size, 0
    if not size:
        raise DataError("D002", "contains no text", key="SRC", value=path)
    with path.open("rb") as file:
        while start < size:
            file.seek(start + piece_bytes)
            # Skip the rest of the line at the seek position, which may look blank.
            file.readline()
            stop = file.tell()
            if blank_lines:
                while (line := file.readline()) and line.strip(_BLANK):
                    pass
                stop = file.tell()
                while (line := file.readline()) and not line.strip(_BLANK):
                    stop = file.tell()
            stop = min(stop, size)
            yield _TextJob(str(path), start, stop)
            start = stop
