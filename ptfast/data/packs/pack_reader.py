"""Packs that `ptfast pack` has made of images or text: their files, and the checks when one is opened."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ptfast.core import run_directory
from ptfast.core.distributed import once_per_machine
from ptfast.core.errors import DataError
from ptfast.data.data_fingerprint import size_and_time

FORMAT = 2
"""Version of the files; others are rejected."""
MANIFEST = "manifest.json"
"""Written last: without it a pack is unfinished."""
UNFINISHED = "pack.unfinished"
"""Says what an unfinished pack is to be, and is locked by the process that writes it."""
CHECKED_BYTES = 256 * 2**20
"""Smaller packs are checked byte by byte whenever they are opened, which takes a fraction of a second."""
_READ_BYTES = 4 * 2**20
STAT_LIMIT = 100_000
"""Sources of more files are compared by their folders only when a pack is opened."""
MARK = "ptfast_pack"
OTHER_CHECKSUM = "does not have the checksum that the manifest says"

ROW = np.dtype(
    [
        ("length", "<i8"),
        ("height", "<i4"),
        ("width", "<i4"),
        ("original_height", "<i4"),
        ("original_width", "<i4"),
        ("label", "<i4"),
        ("converted", "<i4"),
        ("sums", "<i8", 3),
        ("squares", "<i8", 3),
    ]
)
"""Index entry of one image: bytes in the data file, sizes in pixels, and sums of its pixels."""


@dataclass(frozen=True)
class SourceFacts:
    """The files that a pack was made from, to see whether they have changed since."""

    path: str
    files: int
    bytes: int
    newest_ns: int
    folders_ns: int
    """Latest change of a folder of the tree; of the file where there is one only."""
    listing: str
    """SHA-256 of the files' names, sizes and times of change; names are relative, so that a tree may move."""

    @classmethod
    def of(cls, root: Path, paths: Iterable[str]) -> SourceFacts:
        """The facts about the files `paths` of the tree `root`, or about the one file that it is."""
        files = num_bytes = newest_ns = 0
        digest, skipped = hashlib.sha256(), len(str(root.parent if root.is_file() else root))
        for path in paths:
            size, time_ns = size_and_time(path)
            files, num_bytes, newest_ns = files + 1, num_bytes + size, max(newest_ns, time_ns)
            digest.update(f"{path[skipped:]} {size} {time_ns}\n".encode(errors="replace"))
        folders_ns = newest_folder(root)
        return cls(str(root.resolve()), files, num_bytes, newest_ns, folders_ns, digest.hexdigest())


@dataclass(frozen=True)
class SplitFacts:
    """One split: `NAME.bin` holds its samples one after another, `NAME.index` where each is."""

    samples: int
    bytes: int
    """Size of the data file."""
    sha256: str
    index_bytes: int
    index_sha256: str
    shape: list[int] | None = None
    """Height, width and channels of every image; None where they differ or are not decoded."""
    converted: int = 0
    """Images that were not 8-bit RGB."""


@dataclass(frozen=True)
class TextFacts:
    """How a text was tokenised."""

    tokenizer: str
    """As `data.tokenizer`."""
    description: dict[str, Any]
    """The tokenizer itself, as it describes itself."""
    documents: str
    """As `data.documents`."""
    dtype: str = "uint16"
    text_bytes: int = 0


@dataclass(frozen=True)
class Manifest:
    """The contents of a whole pack."""

    kind: str
    """`pixels`, `jpeg` (image files as they were) or `tokens`."""
    source: SourceFacts
    splits: dict[str, SplitFacts]
    size: int | None = None
    """Pixels that longer shorter sides were brought to; None where images are as they were."""
    class_names: list[str] = field(default_factory=list)
    statistics: dict[str, list[float]] | None = None
    """Mean and standard deviation of all training pixels, per channel."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """Files that could not be read, and why."""
    text: TextFacts | None = None


def read_manifest(folder: Path, key: str = "data.root") -> Manifest | None:
    """The manifest of a whole pack in `folder`; None where there is no pack at all."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if (folder / UNFINISHED).is_file():
            what = "is an unfinished pack"
            hint = f"Make it with {_command(folder, run_directory.read_json(folder / UNFINISHED))}"
            raise DataError("D007", what, key=key, value=folder, suggestion=hint) from None
        return None
    if f'"{MARK}"'.encode() not in content:
        return None
    try:
        tree = json.loads(content)
        version = tree.pop(MARK)
        if version == FORMAT:
            tree["splits"] = {name: SplitFacts(**split) for name, split in tree["splits"].items()}
            tree["source"] = SourceFacts(**tree["source"])
            tree["text"] = TextFacts(**tree["text"]) if tree["text"] is not None else None
            return Manifest(**tree)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what, hint = f"is damaged: {error}", "Delete the pack and make it anew"
        raise DataError("D007", what, key=str(folder / MANIFEST), suggestion=hint) from None
    what = f"is a pack of format {version}, and this version of ptfast reads format {FORMAT}"
    hint = f"Delete it and make it anew with {_command(folder, tree if isinstance(tree, dict) else {})}"
    raise DataError("D007", what, key=key, value=folder, suggestion=hint)


def is_manifest(path: Path) -> bool:
    """Return True if `path` is the manifest of a pack, of whatever format."""
    return path.is_file() and f'"{MARK}"'.encode() in path.read_bytes()


def open_pack(folder: Path, key: str = "data.root") -> Manifest | None:
    """The manifest of a pack that is whole and as new as its source; None where there is no pack.

    Files must have the sizes that the manifest says, and indices its checksums; up to 256 MB of data are
    checked byte by byte too (more by `ptfast pack --verify`). The source is compared where it still exists.
    All of it is done once per machine, whatever the number of ranks.

    Raises:
        DataError: D007 naming the file that is damaged, or what has changed.
    """
    manifest = read_manifest(folder, key)
    if manifest is not None:
        once_per_machine(lambda: _check_quickly(folder, manifest, key))
    return manifest


def _check_quickly(folder: Path, manifest: Manifest, key: str) -> None:
    for name, split in manifest.splits.items():
        index = folder / f"{name}.index"
        for path, expected in ((folder / f"{name}.bin", split.bytes), (index, split.index_bytes)):
            found = path.stat().st_size if path.is_file() else None
            if found is None:
                raise _damaged(path, "is missing from its pack", manifest, folder)
            if found != expected:
                what = f"has {found:,} bytes where the manifest says {expected:,}"
                raise _damaged(path, what, manifest, folder)
        if hashlib.sha256(index.read_bytes()).hexdigest() != split.index_sha256:
            raise _damaged(index, OTHER_CHECKSUM, manifest, folder)
    if sum(split.bytes for split in manifest.splits.values()) <= CHECKED_BYTES:
        check_data(folder, manifest)
    check_source(folder, manifest, key, whole=manifest.source.files <= STAT_LIMIT)


def check_data(
    folder: Path, manifest: Manifest, report: Callable[[int], None] = lambda bytes_done: None
) -> None:
    """Raise DataError D007 unless every byte is as written; `report` is called with the bytes read so far."""
    done = 0
    for name, split in manifest.splits.items():
        path, digest = folder / f"{name}.bin", hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                report(done := done + len(chunk))
        if digest.hexdigest() != split.sha256:
            raise _damaged(path, OTHER_CHECKSUM, manifest, folder)


def check_source(folder: Path, manifest: Manifest, key: str, *, whole: bool) -> None:
    """Raise DataError D007 if what the pack was made from has changed since.

    Unless `whole`, files are only looked at if their folders have changed, as by adding or removing files.
    """
    before = manifest.source
    path = Path(before.path)
    if not path.exists():
        return
    if not whole and newest_folder(path) == before.folders_ns:
        return
    try:
        if manifest.kind == "tokens":
            files = [str(path)]
        else:
            from ptfast.data.sources.class_folders import list_tree

            files = [file for paths, _ in list_tree(path)[1].values() for file in paths]
        now = SourceFacts.of(path, files)
    except (DataError, OSError):
        now = SourceFacts(before.path, 0, 0, 0, 0, "")
    changes = [f"{now.files:,} files instead of {before.files:,}"] * (now.files != before.files)
    changes += [f"{now.bytes:,} bytes instead of {before.bytes:,}"] * (now.bytes != before.bytes)
    changes += ["files that are newer"] * (now.newest_ns > before.newest_ns)
    if not changes and now.listing != before.listing:
        changes = ["files that were moved, renamed or replaced"]
    if changes:
        what = f"was packed from {path}, which has changed since: {', '.join(changes)}"
        hint = f"Pack it again with {_command(folder, manifest)}, or use {key}={path}"
        raise DataError("D007", what, key=key, value=folder, suggestion=hint)


def newest_folder(root: Path) -> int:
    """Latest change of a folder in the tree, two levels deep, in nanoseconds; of `root` if it is a file."""
    folders = level = [root]
    for _ in range(2):
        # Entries know whether they are folders: the thousands of files are not asked.
        entries = [entry for folder in level if folder.is_dir() for entry in os.scandir(folder)]
        level = [Path(entry) for entry in entries if entry.is_dir()]
        folders = folders + level
    return max(folder.stat().st_mtime_ns for folder in folders)


def _command(folder: Path, made: Manifest | dict[str, Any]) -> str:
    """The command that makes the pack in `folder` again, as far as its manifest or header shows it."""
    known = asdict(made) if isinstance(made, Manifest) else made
    source, text = known.get("source") or {}, known.get("text") or known
    words = ["ptfast pack", str(source.get("path", "SRC")), str(folder)]
    words += [f"--size {known.get('size')}"] * bool(known.get("size"))
    words += ["--jpeg"] * (known.get("kind") == "jpeg")
    words += [f"--tokenizer {text.get('tokenizer')}"] * (text.get("tokenizer", "characters") != "characters")
    words += [f"--documents {text.get('documents')}"] * (text.get("documents", "none") != "none")
    words += ["--on-corrupt skip"] * bool(known.get("skip_corrupt") or known.get("skipped"))
    return " ".join(words)


def _damaged(path: Path, what: str, manifest: Manifest, folder: Path) -> DataError:
    hint = f"Delete the pack and make it anew with {_command(folder, manifest)}"
    return DataError("D007", what, key=str(path), suggestion=hint)


def header_of(manifest: Manifest) -> dict[str, Any]:
    """What a pack is made from and how: packs that share it are alike."""
    header = {"format": FORMAT, "kind": manifest.kind, "size": manifest.size}
    header["source"] = asdict(manifest.source)
    if (text := manifest.text) is not None:
        header |= {"tokenizer": text.tokenizer, "documents": text.documents}
    return header
