"""Making packs: pieces of a dataset converted by processes and written in order."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from ptfast.core.errors import ConfigError, DataError, MachineError, cannot_write
from ptfast.core.units import num_bytes
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.packs.pack_reader import (
    FORMAT,
    MANIFEST,
    MARK,
    UNFINISHED,
    Manifest,
    SplitFacts,
    read_manifest,
)

_SPLITS = ("train", "val", "test", "text")
PIECE_BYTES = 16 * 2**20
"""Bytes that a process converts at once; each process needs a few such pieces in memory."""


class Piece(NamedTuple):
    """A run of consecutive samples, converted."""

    data: bytes
    rows: bytes
    """Of the index."""
    samples: int
    seen: int
    """Samples and those that were left out."""
    facts: dict[str, Any]
    """JSON-serializable; given to `Plan.describe`."""


@dataclass(frozen=True)
class Plan:
    """The jobs of a pack, whose order and extent the source and the options alone decide."""

    header: dict[str, Any]
    """`header_of` the pack and more that tells it from others of its source; JSON-serializable."""
    jobs: Sequence[tuple[str, Any]]
    """Split and what `convert` takes, in the order in which they are written."""
    num_seen: int
    """Samples of all jobs, and those that are left out; for the progress."""
    estimated_bytes: int
    convert: Callable[[Any], Piece]
    """Converts one job."""
    describe: Callable[[dict[str, SplitFacts], dict[str, list[dict[str, Any]]], Path], Manifest]
    """The manifest of the pack in a folder, given its splits so far and the facts of their pieces."""
    note: str = ""
    """A remark for the user on what is passed over."""


def make(
    plan: Plan, folder: Path, workers: int, report: Callable[[int], None] = lambda seen: None
) -> Manifest:
    """Write the pack of `plan` into `folder`, anew after an attempt that was interrupted.

    Pieces are converted by `workers` processes and appended in order by this one; the manifest comes last.
    Memory stays that of a few pieces for each process. `report` is called with the samples seen so far.

    Raises:
        DataError: what converting raises; D008 for a process that died.
        MachineError: E001 where it cannot be written, E002 without the space, E003 while another process
            writes it.
    """
    threads = torch.get_num_threads()
    # Threads of this process would not survive in the processes that it forks.
    torch.set_num_threads(1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            _begin(plan, folder, stack.enter_context((folder / UNFINISHED).open("a+")))
            return _write(plan, folder, workers, report, stack)
    except OSError as error:
        hint = "Then give the same command again"
        raise cannot_write(error, "DST", folder, suggestion=hint) from error
    finally:
        torch.set_num_threads(threads)


def _begin(plan: Plan, folder: Path, unfinished: TextIO) -> None:
    """Mark the pack as unfinished, by a file that locks it, and remove what was there."""
    try:
        fcntl.flock(unfinished, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        what, hint = "is being written by another process", "Wait for it to finish"
        raise MachineError("E003", what, key="DST", value=folder, suggestion=hint) from error
    unfinished.truncate(0)
    unfinished.write(json.dumps(plan.header))
    unfinished.flush()
    # A run that still maps the old pack keeps its files.
    for name in (MANIFEST, *(f"{split}.{ending}" for split in _SPLITS for ending in ("bin", "index"))):
        (folder / name).unlink(missing_ok=True)
    if plan.estimated_bytes > (free := shutil.disk_usage(folder).free):
        what = f"needs about {num_bytes(plan.estimated_bytes)}, and {num_bytes(free)} are free"
        hint = "Choose a folder on another disk, a smaller --size, or --jpeg"
        raise MachineError("E002", what, key="DST", value=folder, suggestion=hint)


def _converted(plan: Plan, workers: int) -> Iterator[Piece]:
    """Converted jobs in order, with enough under way to keep the processes busy."""
    jobs = [job for _, job in plan.jobs]
    if workers <= 1 or len(jobs) <= 1:
        return map(plan.convert, jobs)
    return WorkerPool(plan.convert, min(workers, len(jobs)), 2, key="--workers").fetch(jobs)


class _Split:
    """The two files of a split, with what the manifest says of them."""

    def __init__(self, folder: Path, name: str) -> None:
        self._files = {ending: (folder / f"{name}.{ending}").open("wb") for ending in ("bin", "index")}
        self._digests = {ending: hashlib.sha256() for ending in self._files}
        self._samples, self.facts = 0, list[dict[str, Any]]()

    def append(self, piece: Piece) -> None:
        for ending, content in (("bin", piece.data), ("index", piece.rows)):
            self._files[ending].write(content)
            self._digests[ending].update(content)
        self._samples += piece.samples
        self.facts.append(piece.facts)

    def finish(self) -> SplitFacts:
        """Flush both files to disk."""
        sizes: dict[str, int] = {}
        for ending, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[ending] = file.tell()
        data, index = (digest.hexdigest() for digest in self._digests.values())
        return SplitFacts(self._samples, sizes["bin"], data, sizes["index"], index)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _write(
    plan: Plan, folder: Path, workers: int, report: Callable[[int], None], stack: ExitStack
) -> Manifest:
    """Write all pieces, and the manifest last."""
    splits: dict[str, _Split] = {}
    for name, _ in plan.jobs:
        if name not in splits:
            splits[name] = split = _Split(folder, name)
            stack.callback(split.close)
    seen = 0
    report(seen)
    for (name, _), piece in zip(plan.jobs, _converted(plan, workers), strict=True):
        splits[name].append(piece)
        seen += piece.seen
        report(seen)
    facts = {name: split.facts for name, split in splits.items()}
    manifest = plan.describe({name: split.finish() for name, split in splits.items()}, facts, folder)
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w") as file:
        json.dump({MARK: FORMAT, **asdict(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MANIFEST)
    (folder / UNFINISHED).unlink()
    return manifest


def check_folder(folder: Path, header: dict[str, Any]) -> Manifest | None:
    """The pack in `folder` if it is whole and made by the same command; None where it is still to be made.

    Raises:
        ConfigError: C011 where the folder holds something else.
    """
    path, hint = header["source"]["path"], "Choose another folder, or remove it"
    manifest = what = None
    if not folder.exists():
        return None
    try:
        manifest = read_manifest(folder)
        if not folder.is_dir():
            what = "is a file"
        elif manifest is None and any(folder.iterdir()):
            what, hint = "is not empty and holds no pack", "Choose another folder"
        elif manifest is not None and manifest.source.path != path:
            what = f"holds a pack of {manifest.source.path}"
    except DataError:
        pass  # an unfinished pack, a damaged one or another format is made anew
    if what is not None:
        raise ConfigError("C011", what, key="DST", value=folder, suggestion=hint)
    return manifest
