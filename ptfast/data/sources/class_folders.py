"""Trees of class folders: the classes, and the image files of each split."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path

from ptfast.core.errors import DataError
from ptfast.data.data_fingerprint import Contents, class_parts
from ptfast.data.decoding.image_decoding import SUFFIXES, is_hidden, without_hidden
from ptfast.data.label_checks import differing_names

SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "dev"), "test": ("test",)}
"""Accepted folder names of each split."""
Listing = tuple[list[str], list[int]]


@dataclass
class PassedOver:
    """Paths in file trees that are skipped."""

    hidden: set[str] = field(default_factory=set)
    no_files: list[str] = field(default_factory=list)
    """Pipes and devices (reading them would never end), links back to a folder above, unreadable folders."""

    @property
    def note(self) -> str:
        """A note for the user; empty if nothing was skipped."""
        first, more = min(self.no_files, default=""), f" and {len(self.no_files) - 1:,} more"
        others = f"passed over {first}{more * (len(self.no_files) > 1)}: no files" if first else ""
        hidden = without_hidden(len(self.hidden), min(self.hidden, default=""))
        return "; ".join(filter(None, [others, hidden]))


def splits_among(names: Container[str]) -> dict[str, str]:
    """Map each split that has a folder among `names` to the folder's name, `train` first."""
    found = {split: next((name for name in known if name in names), None) for split, known in SPLITS.items()}
    return {split: name for split, name in found.items() if name is not None}


def list_tree(
    root: Path,
    key: str = "data.root",
    passed: PassedOver | None = None,
    complete: Callable[[dict[str, Path]], dict[str, Path]] = dict,
) -> tuple[tuple[str, ...], dict[str, Listing]]:
    """Return the class names, and the files and labels of each split, sorted by class and name.

    `passed` collects skipped paths; `complete` adds a missing `train`, as `ReadsAsKnown` does.

    Raises:
        DataError: D001 to D003 if the tree does not consist of class folders.
    """
    passed = passed or PassedOver()
    inside = _subfolders(root, key, passed)
    folders = complete({split: root / name for split, name in splits_among(inside).items()})
    if "train" not in folders:
        if (other := next(iter(folders.values()), None)) is not None:
            what = f"has {other.name}/ but no train/"
            raise DataError("D003", what, key=key, value=root, suggestion="Put class folders in train/")
        folders["train"] = root
    classes: tuple[str, ...] = ()
    listings: dict[str, Listing] = {}
    for split, folder in folders.items():
        names = tuple(_subfolders(folder, key, passed))
        if not names:
            raise DataError("D002", "contains no class folders", key=key, value=folder)
        if len(names) == 1:
            what = f"contains one class only ({names[0]}), so there is nothing to classify"
            hint = "Give each class a folder of its own"
            raise DataError("D003", what, key=key, value=folder, suggestion=hint)
        classes = classes or names
        if names != classes:
            differing = differing_names(names, classes, "which train/ lacks")
            what = f"its classes differ from those of train/: {differing}"
            hint = "Give every split the same class folders"
            raise DataError("D003", what, key=str(folder), suggestion=hint)
        paths, labels = list[str](), list[int]()
        for label, name in enumerate(names):
            found = image_files(folder / name, passed)
            if not found:
                hint = f"Put images in it ({', '.join(SUFFIXES[:3])}, ...), or remove it"
                what = "class folder without images"
                raise DataError("D003", what, key=str(folder / name), suggestion=hint)
            paths += found
            labels += [label] * len(found)
        listings[split] = paths, labels
    return classes, listings


def _subfolders(folder: Path, key: str, passed: PassedOver) -> list[str]:
    hint = f"Set {key} to a folder of class folders"
    if not folder.exists():
        raise DataError("D001", "no such folder", key=key, value=folder, suggestion=hint)
    if not folder.is_dir():
        raise DataError("D001", "is a file, not a folder", key=key, value=folder, suggestion=hint)
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise DataError("D001", f"cannot be read: {error.strerror}", key=key, value=folder) from None
    if not entries:
        raise DataError("D002", "is an empty folder", key=key, value=folder, suggestion=hint)
    passed.hidden.update(entry.path for entry in entries if is_hidden(entry.name))
    return sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))


def image_files(folder: Path, passed: PassedOver) -> list[str]:
    """Return the files at any depth of `folder` that have an image suffix, sorted."""
    found = list[str]()
    places = [(str(folder), [os.path.realpath(folder)])]
    for place, above in places:
        try:
            entries = list(os.scandir(place))
        except OSError:
            passed.no_files.append(place)
            continue
        for entry in entries:
            try:
                if is_hidden(entry.name):
                    passed.hidden.add(entry.path)
                elif entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if any(Path(each).is_relative_to(real) for each in above):
                        passed.no_files.append(entry.path)
                    else:
                        places.append((entry.path, [*above, real]))
                elif entry.name.lower().endswith(SUFFIXES):
                    # List broken links, so that they are reported like any unreadable file.
                    is_file = entry.is_file() or (entry.is_symlink() and not Path(entry.path).exists())
                    (found if is_file else passed.no_files).append(entry.path)
            except OSError:
                passed.no_files.append(entry.path)
    return sorted(found)


def tree_contents(
    root: Path, classes: tuple[str, ...], listings: dict[str, Listing], most: int = sys.maxsize
) -> tuple[Contents, int]:
    """Return the fingerprint of class folders, by up to `most` files per split, and their latest change."""
    looks = [class_parts(split, root, classes, *listing, most) for split, listing in listings.items()]
    contents = {name: facts for parts, _ in looks for name, facts in parts.items()}
    return contents, max(newest_ns for _, newest_ns in looks)


def newest_folder(root: Path) -> int:
    """Return the latest change of folders up to two levels deep, in ns; of `root` if it is a file."""
    folders = level = [root]
    for _ in range(2):
        # scandir entries know whether they are folders, without a stat of thousands of files.
        entries = [entry for folder in level if folder.is_dir() for entry in os.scandir(folder)]
        level = [Path(entry) for entry in entries if entry.is_dir()]
        folders = folders + level
    return max(folder.stat().st_mtime_ns for folder in folders)
