"""Makes packs: processes convert pieces of a dataset, which are written in order."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import torch

from ptfast.core.errors import ConfigError, DataError, MachineError, cannot_write
from ptfast.core.units import num_bytes
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.packs.pack_reader import FORMAT, MANIFEST, MARK, UNFINISHED, Manifest, read_manifest

_SPLITS = ("train", "val", "test", "text")


class Piece(NamedTuple):
    """Consecutive samples, converted."""

    data: bytes
    rows: bytes
    """Rows of the index."""
    seen: int
    """Number of samples, including those left out; bytes of a text."""
    skipped: Sequence[dict[str, str]] = ()
    """Files that could not be read, and why."""
    text_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """The jobs of a pack. Their order and size depend only on the source and the options."""

    manifest: Manifest
    """The manifest as far as it is known before writing."""
    jobs: Sequence[tuple[str, Any]]
    """The split and the argument of `convert` of each job, in writing order."""
    num_seen: int
    """Number of samples of all jobs, including those left out, or bytes of a text; for the progress bar."""
    estimated_bytes: int
    convert: Callable[[Any], Piece]
    """Converts one job."""
    complete: Callable[[Manifest, Path], Manifest] = lambda manifest, folder: manifest
    """Completes the manifest from the written files in the folder, or raises if samples are missing."""
    note: str = ""
    """A remark for the user on skipped files."""


def make(
    plan: Plan, folder: Path, workers: int, report: Callable[[int], None] = lambda seen: None
) -> Manifest:
    """Write the pack of `plan` into `folder`; an interrupted attempt is replaced.

    `workers` processes convert pieces, and this process appends them in order; the manifest comes last.
    Each process needs memory for a few pieces only. `report` is called with the samples seen so far.

    Raises:
        DataError: errors of the conversion; D008 for a process that died.
        MachineError: E001 if the folder cannot be written, E002 if disk space is short, E003 while another
            process writes to it.
    """
    threads = torch.get_num_threads()
    # Threads of this process do not survive a fork.
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
    """Mark the pack as unfinished, by a locked file, and remove the old files."""
    try:
        fcntl.flock(unfinished, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        what, hint = "is being written by another process", "Wait for it to finish"
        raise MachineError("E003", what, key="DST", value=folder, suggestion=hint) from error
    unfinished.truncate(0)
    unfinished.write(plan.manifest.command(folder))
    unfinished.flush()
    # Unlinked, not overwritten: a run that still maps the old pack keeps its files.
    for name in (MANIFEST, *(f"{split}.{ending}" for split in _SPLITS for ending in ("bin", "index"))):
        (folder / name).unlink(missing_ok=True)
    if plan.estimated_bytes > (free := shutil.disk_usage(folder).free):
        what = f"needs about {num_bytes(plan.estimated_bytes)}, and {num_bytes(free)} are free"
        hint = "Choose a folder on another disk, a smaller --size, or --jpeg"
        raise MachineError("E002", what, key="DST", value=folder, suggestion=hint)


def _converted(plan: Plan, workers: int) -> Iterator[Piece]:
    """Convert jobs in order, prefetching enough to keep the processes busy."""
    jobs = [job for _, job in plan.jobs]
    if workers <= 1 or len(jobs) <= 1:
        return map(plan.convert, jobs)
    return WorkerPool(plan.convert, min(workers, len(jobs)), 2, key="--workers").fetch(jobs)


def _write(
    plan: Plan, folder: Path, workers: int, report: Callable[[int], None], stack: ExitStack
) -> Manifest:
    """Write all pieces, and the manifest last."""
    files: dict[str, BinaryIO] = {}
    for split in dict.fromkeys(split for split, _ in plan.jobs):
        for name in (f"{split}.bin", f"{split}.index"):
            files[name] = stack.enter_context((folder / name).open("wb"))
    digests = {name: hashlib.sha256() for name in files}
    manifest, skipped, text_bytes, seen = plan.manifest, list[dict[str, str]](), 0, 0
    report(seen)
    for (split, _), piece in zip(plan.jobs, _converted(plan, workers), strict=True):
        for ending, content in (("bin", piece.data), ("index", piece.rows)):
            files[f"{split}.{ending}"].write(content)
            digests[f"{split}.{ending}"].update(content)
        skipped += piece.skipped
        text_bytes, seen = text_bytes + piece.text_bytes, seen + piece.seen
        report(seen)
    if manifest.text is not None:
        manifest = replace(manifest, text=replace(manifest.text, text_bytes=text_bytes))
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
    found = {name: (file.tell(), digests[name].hexdigest()) for name, file in files.items()}
    manifest = plan.complete(replace(manifest, files=found, skipped=skipped), folder)
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("w") as file:
        json.dump({MARK: FORMAT, **asdict(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MANIFEST)
    (folder / UNFINISHED).unlink()
    return manifest


def check_folder(folder: Path, wanted: Manifest) -> Manifest | None:
    """Return the finished pack of the same source in `folder`; None if it has yet to be made.

    Raises:
        ConfigError: C011 if the folder contains something else.
    """
    hint, what = "Choose another folder, or remove it", None
    if not folder.exists():
        return None
    try:
        manifest = read_manifest(folder)
    except DataError:
        return None  # an unfinished or damaged pack, or one of another format, is made again
    if not folder.is_dir():
        what = "is a file"
    elif manifest is None and any(folder.iterdir()):
        what, hint = "is not empty and contains no pack", "Choose another folder"
    elif manifest is not None and manifest.source.path != wanted.source.path:
        what = f"contains a pack of {manifest.source.path}"
    if what is not None:
        raise ConfigError("C011", what, key="DST", value=folder, suggestion=hint)
    return manifest
