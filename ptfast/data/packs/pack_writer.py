"""Making packs: pieces of a dataset converted by processes, written in order, resumed where they ended."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.multiprocessing as mp

from ptfast.core.errors import ConfigError, DataError, MachineError, cannot_write
from ptfast.core.machine import die_with_parent
from ptfast.core.units import num_bytes
from ptfast.data.packs.pack_reader import (
    FORMAT,
    JOURNAL,
    MANIFEST,
    MARK,
    Manifest,
    Part,
    SplitFacts,
    read_header,
    read_manifest,
)

_SPLITS = ("train", "val", "test", "text")
PIECE_BYTES = 16 * 2**20
"""Bytes that a process converts at once. A kill costs one piece, and each process needs a few in memory."""


class Piece(NamedTuple):
    """A run of consecutive samples, converted."""

    data: bytes
    rows: bytes
    """Of the index."""
    samples: int
    seen: int
    """Samples and those that were left out."""
    facts: dict[str, Any]
    """JSON-serialisable; given to `Plan.describe`."""


@dataclass
class Written:
    """One split as far as it is written."""

    samples: int = 0
    bytes: int = 0
    """Of the data file."""
    parts: list[Part] = field(default_factory=list)
    index_bytes: int = 0
    facts: list[dict[str, Any]] = field(default_factory=list)
    """Of every piece."""


@dataclass(frozen=True)
class Plan:
    """The jobs of a pack, whose order and extent the source and the options alone decide."""

    header: dict[str, Any]
    """`header_of` the pack and more that an unfinished one must share to be resumed; JSON-serialisable."""
    jobs: Sequence[tuple[str, Any]]
    """Split and what `convert` takes, in the order in which they are written."""
    num_seen: int
    """Samples of all jobs, and those that are left out; for the progress."""
    estimated_bytes: int
    convert: Callable[[Any], Piece]
    """Converts one job; pickled for every one of them, so it holds little."""
    describe: Callable[[dict[str, SplitFacts], dict[str, list[dict[str, Any]]], Path], Manifest]
    """The manifest of the pack in a folder, given its splits so far and the facts of their pieces."""
    note: str = ""
    """A remark for the user on what is passed over."""


def make(
    plan: Plan, folder: Path, workers: int, report: Callable[[int], None] = lambda seen: None
) -> Manifest:
    """Write the pack of `plan` into `folder`, resuming where an earlier attempt ended.

    Pieces are converted by `workers` processes and appended in order by this one, with a line in a journal
    for each; the manifest comes last. Memory stays that of a few pieces for each process. `report` is called
    with the samples seen so far.

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
        with (folder / JOURNAL).open("a+") as journal:
            writer = _Writer(folder, plan, journal)
            written_bytes = sum(written.bytes for written in writer.written.values())
            missing, free = plan.estimated_bytes - written_bytes, shutil.disk_usage(folder).free
            if missing > free:
                what = f"needs about {num_bytes(missing)}, and {num_bytes(free)} are free"
                hint = "Choose a folder on another disk, a smaller --size, or --jpeg"
                raise MachineError("E002", what, key="DST", value=folder, suggestion=hint)
            report(writer.seen)
            for split, piece in _converted(plan, writer.jobs_done, workers):
                writer.append(split, piece)
                report(writer.seen)
            return writer.finish()
    except OSError as error:
        hint = "Give the same command again to resume"
        raise cannot_write(error, "DST", folder, suggestion=hint) from error
    finally:
        torch.set_num_threads(threads)


def _converted(plan: Plan, first: int, workers: int) -> Iterator[tuple[str, Piece]]:
    """Converted jobs from `first` on, in order, with enough under way to keep the processes busy."""
    jobs = plan.jobs[first:]
    if workers <= 1 or len(jobs) <= 1:
        yield from ((split, plan.convert(job)) for split, job in jobs)
        return
    # Forking saves each process the seconds of importing torch; it is only safe on Linux.
    context = mp.get_context("fork" if sys.platform == "linux" else None)
    under_way: deque[tuple[str, Future[Piece]]] = deque()
    pool = ProcessPoolExecutor(min(workers, len(jobs)), context, initializer=_start_process)
    try:
        with warnings.catch_warnings():
            # numpy's threads sleep, and hold no lock.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            for split, job in jobs:
                under_way.append((split, pool.submit(plan.convert, job)))
                if len(under_way) > 2 * workers:
                    done_split, done = under_way.popleft()
                    yield done_split, done.result()
            for done_split, done in under_way:
                yield done_split, done.result()
    except BrokenProcessPool:
        hint = "It may have run out of memory: give the same command fewer --workers, and it goes on"
        what = "a converting process died"
        raise DataError("D008", what, key="--workers", value=workers, suggestion=hint) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_process() -> None:
    # Ctrl-C reaches every process of the terminal; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    torch.set_num_threads(1)


class _Writer:
    """The files of an unfinished pack, which only one process writes."""

    def __init__(self, folder: Path, plan: Plan, journal: TextIO) -> None:
        self._folder, self._plan, self._journal = folder, plan, journal
        self.written = {split: Written() for split, _ in plan.jobs}
        self.jobs_done = self.seen = 0
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            what, hint = "is being written by another process", "Wait for it to finish"
            raise MachineError("E003", what, key="DST", value=folder, suggestion=hint) from error
        with contextlib.suppress(FileNotFoundError):
            (folder / MANIFEST).unlink()
        self._read_journal()
        for name in _SPLITS if not self.jobs_done else ():
            # A run that still maps the old pack keeps its files.
            (folder / f"{name}.bin").unlink(missing_ok=True)
            (folder / f"{name}.index").unlink(missing_ok=True)
        # A half-written piece may follow the last one in the journal.
        for split, written in self.written.items():
            for name, size in ((f"{split}.bin", written.bytes), (f"{split}.index", written.index_bytes)):
                with (folder / name).open("ab") as file:
                    file.truncate(size)

    def append(self, split: str, piece: Piece) -> None:
        """Write one piece, then the line that says so."""
        line = {
            "split": split,
            "samples": piece.samples,
            "seen": piece.seen,
            "part": asdict(Part.of(piece.data)),
            "index": asdict(Part.of(piece.rows)),
            "facts": piece.facts,
        }
        for name, content in ((f"{split}.bin", piece.data), (f"{split}.index", piece.rows)):
            with (self._folder / name).open("ab") as file:
                file.write(content)
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()
        self._add(line)

    def finish(self) -> Manifest:
        """Flush the data to disk, then write the manifest."""
        folder, splits = self._folder, dict[str, SplitFacts]()
        for name, split in self.written.items():
            index = folder / f"{name}.index"
            for path in (folder / f"{name}.bin", index):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            checksum = hashlib.sha256(index.read_bytes()).hexdigest()
            splits[name] = SplitFacts(split.samples, split.parts, split.index_bytes, checksum)
        facts = {name: split.facts for name, split in self.written.items()}
        manifest, partial = self._plan.describe(splits, facts, folder), folder / f"{MANIFEST}.partial"
        with partial.open("w") as file:
            json.dump({MARK: FORMAT, **asdict(manifest)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / MANIFEST)
        (folder / JOURNAL).unlink()
        return manifest

    def _add(self, line: dict[str, Any]) -> None:
        written = self.written[line["split"]]
        written.samples += line["samples"]
        written.bytes += line["part"]["bytes"]
        written.parts.append(Part(**line["part"]))
        written.index_bytes += line["index"]["bytes"]
        written.facts.append(line["facts"])
        self.seen += line["seen"]
        self.jobs_done += 1

    def _read_journal(self) -> None:
        """Take over the pieces whose bytes are still as written, and delete all other lines."""
        self._journal.seek(0)
        found, valid = self._journal.readlines(), [json.dumps(self._plan.header) + "\n"]
        is_resumed = read_header(self._folder) == self._plan.header
        for text, (split, _) in zip(found[1:] if is_resumed else [], self._plan.jobs, strict=False):
            try:
                line = json.loads(text)
                written, data = self.written[split], self._folder / f"{split}.bin"
                whole = (
                    line["split"] == split
                    and Part(**line["part"]).is_at(data, written.bytes)
                    and Part(**line["index"]).is_at(data.with_suffix(".index"), written.index_bytes)
                )
            except (ValueError, KeyError, TypeError):
                break  # a kill cut it short
            if not whole:
                break
            self._add(line)
            valid.append(text)
        if found != valid:
            self._journal.truncate(0)
            self._journal.write("".join(valid))
            self._journal.flush()


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
        # An unfinished pack is resumed; a damaged one or another format is made anew.
        before = read_header(folder)
        if before and before["source"]["path"] != path:
            what = f"holds an unfinished pack of {before['source']['path']}"
    if what is not None:
        raise ConfigError("C011", what, key="DST", value=folder, suggestion=hint)
    return manifest
