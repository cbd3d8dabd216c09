"""The files of packs made by `ptfast pack` from images or text, and the checks on opening a pack."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ptfast.core.distributed import once_per_machine
from ptfast.core.errors import DataError, name_some
from ptfast.core.run_records import checked
from ptfast.data.data_fingerprint import Contents, describe_part, differing, size_and_time
from ptfast.data.sources.class_folders import Listing, list_tree, newest_folder, tree_contents

FORMAT = 3
"""Version of the file format; others are rejected."""
MANIFEST = "manifest.json"
"""Written last; a pack without it is unfinished."""
UNFINISHED = "pack.unfinished"
"""Contains the command that makes an unfinished pack, and is locked by the process that writes the pack."""
CHECKED_BYTES = 256 * 2**20
"""Packs up to this size are checked byte by byte on opening, which takes a fraction of a second."""
_READ_BYTES = 4 * 2**20
STAT_LIMIT = 100_000
"""For sources with more files, opening a pack compares only the folders."""
MARK = "ptfast_pack"

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
"""Index entry of one image: bytes in the data file, sizes in pixels, label, and sums of its pixels."""


@dataclass(frozen=True)
class SourceFacts:
    """Facts about the files that a pack was made from, to detect changes."""

    path: str
    contents: Contents
    newest_ns: int
    """Latest change of a file."""
    folders_ns: int
    """Latest change of a folder of the tree, or of a single file."""

    @classmethod
    def of(cls, root: Path, tree: tuple[tuple[str, ...], dict[str, Listing]] | None = None) -> SourceFacts:
        """Collect the facts about a text file, or about a `tree` of class folders listed by `list_tree`."""
        if tree is not None:
            contents, newest_ns = tree_contents(root, *tree)
        else:
            size, newest_ns = size_and_time(str(root))
            contents = {"text": describe_part(size, "bytes")}
        return cls(str(root.resolve()), contents, newest_ns, newest_folder(root))


@dataclass(frozen=True)
class TextFacts:
    """The tokenization of a text."""

    tokenizer: str
    """The value of `data.tokenizer`."""
    description: dict[str, Any]
    """The tokenizer's own description."""
    documents: str
    """The value of `data.documents`."""
    text_bytes: int = 0


@dataclass(frozen=True)
class Manifest:
    """The contents of a whole pack."""

    kind: str
    """`pixels`, `jpeg` (unchanged image files) or `tokens`."""
    source: SourceFacts
    options: str
    """Options of the command that makes the pack, without `--on-corrupt`."""
    skips: bool = False
    """Whether unreadable files were left out."""
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Size and SHA-256 of each file: SPLIT.bin contains the samples, SPLIT.index an entry for each."""
    size: int | None = None
    """Images with a longer shorter side were resized to this many pixels; None if no size was changed."""
    class_names: list[str] = field(default_factory=list)
    statistics: dict[str, list[float]] | None = None
    """Mean and standard deviation of all training pixels, per channel."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """Files that could not be read, and why."""
    text: TextFacts | None = None

    @property
    def splits(self) -> list[str]:
        return [name.removesuffix(".bin") for name in self.files if name.endswith(".bin")]

    @property
    def data_bytes(self) -> int:
        return sum(size for name, (size, _) in self.files.items() if name.endswith(".bin"))

    def command(self, folder: Path) -> str:
        """Return the command that makes the pack in `folder`."""
        skip = " --on-corrupt skip" * self.skips
        return f"ptfast pack {self.source.path} {folder} {self.options}".rstrip() + skip

    def made_as(self, other: Manifest) -> bool:
        """Return whether both have the same data and settings, apart from handling of unreadable files."""
        return (self.kind, self.source, self.options) == (other.kind, other.source, other.options)


def read_manifest(folder: Path, key: str = "data.root") -> Manifest | None:
    """Return the manifest of a finished pack in `folder`; None if there is no pack."""
    try:
        content = (folder / MANIFEST).read_text(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        if (folder / UNFINISHED).is_file():
            command = (folder / UNFINISHED).read_text(errors="replace")
            # A process that was killed early did not write it, and older versions wrote something else.
            hint = f"Make it with {command if command.startswith('ptfast pack ') else 'ptfast pack'}"
            raise DataError("D007", "is an unfinished pack", key=key, value=folder, suggestion=hint) from None
        return None
    if f'"{MARK}"' not in content:
        return None
    try:
        tree = json.loads(content)
        version = tree.pop(MARK)
        if version == FORMAT:
            return checked(Manifest, json.dumps(tree))
    except (ValueError, AttributeError) as error:
        what, hint = f"is damaged: {error}", "Delete the pack and make it anew"
        raise DataError("D007", what, key=str(folder / MANIFEST), suggestion=hint) from None
    what = f"is a pack of format {version}, and this version of ptfast reads format {FORMAT}"
    hint = "Delete it and make it anew with ptfast pack"
    raise DataError("D007", what, key=key, value=folder, suggestion=hint)


def is_manifest(path: Path) -> bool:
    """Return True if `path` is the manifest of a pack of any format version."""
    return path.is_file() and f'"{MARK}"'.encode() in path.read_bytes()


def open_pack(folder: Path, key: str = "data.root") -> Manifest | None:
    """Check a pack against its manifest and source, and return the manifest; None if there is no pack.

    Files must have the sizes in the manifest, and index files its checksums. Packs of up to 256 MB are
    checked byte by byte (`ptfast pack --verify` checks larger ones). The source is compared if it still
    exists. The checks run once per machine, not on every rank.

    Raises:
        DataError: D007 naming the damaged file, or the changes.
    """
    manifest = read_manifest(folder, key)
    if manifest is not None:
        once_per_machine(lambda: _check_quickly(folder, manifest, key))
    return manifest


def _check_quickly(folder: Path, manifest: Manifest, key: str) -> None:
    for name, (size, _) in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(path, "is missing from its pack", manifest)
        if (found := path.stat().st_size) != size:
            raise _damaged(path, f"has {found:,} bytes where the manifest says {size:,}", manifest)
    small = manifest.data_bytes <= CHECKED_BYTES
    check_data(folder, manifest, names=[n for n in manifest.files if small or n.endswith(".index")])
    whole = sum(part[0] for part in manifest.source.contents.values()) <= STAT_LIMIT
    check_source(folder, manifest, key, whole=whole or manifest.text is not None)


def check_data(
    folder: Path,
    manifest: Manifest,
    report: Callable[[int], None] = lambda bytes_done: None,
    names: Iterable[str] | None = None,
) -> None:
    """Raise DataError D007 if a file's checksum differs; `report` is called with the bytes read so far."""
    done = 0
    for name in manifest.files if names is None else names:
        path, digest = folder / name, hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                report(done := done + len(chunk))
        if digest.hexdigest() != manifest.files[name][1]:
            raise _damaged(path, "does not have the checksum that the manifest says", manifest)


def check_source(folder: Path, manifest: Manifest, key: str, *, whole: bool) -> None:
    """Raise DataError D007 if the source of the pack has changed since.

    Unless `whole`, files are only inspected if a folder has changed, as by adding or removing files.
    """
    before = manifest.source
    path = Path(before.path)
    if not path.exists() or (not whole and newest_folder(path) == before.folders_ns):
        return
    try:
        now = SourceFacts.of(path, None if manifest.text is not None else list_tree(path))
    except (DataError, OSError):
        now = SourceFacts(before.path, {}, 0, 0)
    changes = [*differing(before.contents, now.contents).values()]
    changes += ["files that are newer"] * (now.newest_ns > before.newest_ns)
    if changes:
        what = f"was packed from {path}, which has changed since: {name_some(changes, 3)}"
        hint = f"Pack it again with {manifest.command(folder)}, or use {key}={path}"
        raise DataError("D007", what, key=key, value=folder, suggestion=hint)


def _damaged(path: Path, what: str, manifest: Manifest) -> DataError:
    hint = f"Delete the pack and make it anew with {manifest.command(path.parent)}"
    return DataError("D007", what, key=str(path), suggestion=hint)
