"""`ptfast pack`: turn images or text into a pack once, so that training starts at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ptfast.errors import EXIT_OK, ConfigError, DataError
from ptfast.units import duration, grouped, num_bytes

_SHOWN_FILES = 10


def pack(flags: dict[str, Any], arguments: list[str]) -> int:
    """Make the pack that the command line asks for, or check one.

    Raises:
        ConfigError: C005, C011 or C016 for flags and folders that make no sense together.
        DataError: what is wrong with the source, or with the pack to be checked.
        MachineError: E001 to E003 where it cannot be written.
    """
    if "--verify" in flags:
        return _verify(flags, arguments)
    if len(arguments) < 2:
        hint = "Usage: ptfast pack SRC DST [--size N|keep]"
        raise ConfigError("C016", "takes a source and a folder to write", key="pack", suggestion=hint)
    source, folder = (Path(word).expanduser() for word in arguments)
    if source.resolve() in (folder.resolve(), *folder.resolve().parents):
        what, hint = "lies within its source", "Write the pack beside it"
        raise ConfigError("C011", what, key="DST", value=folder, suggestion=hint)
    options = {
        "size": _size(flags),
        "jpeg": "--jpeg" in flags,
        "skip_corrupt": _choice(flags, "--on-corrupt", ("error", "skip")) == "skip",
    }
    if options["jpeg"] and options["size"] is not None:
        what, hint = "keeps files as they are, and so at their sizes", "Leave one of the two out"
        raise ConfigError("C011", what, key="--jpeg", suggestion=hint)
    workers = _workers(flags)
    # Imported now: what is wrong with the flags is said without waiting for torch.
    from ptfast.data.pack import check_folder, make
    from ptfast.data.pack_images import plan_images
    from ptfast.data.packed import same_as
    from ptfast.display.counter import counting

    plan = plan_images(source, **options)
    whole = check_folder(folder, plan.header)
    if whole is not None and same_as(whole, plan.header):
        print(f"{folder} is a whole pack of {source} already: nothing to do")
        return EXIT_OK
    start_s = time.perf_counter()
    with counting("packing", "images", plan.num_seen) as count:
        manifest = make(plan, folder, workers, count)
    took_s = time.perf_counter() - start_s
    samples = sum(split.samples for split in manifest.splits.values())
    size = sum(split.bytes for split in manifest.splits.values())
    print(f"packed {grouped(samples)} images into {folder}: {num_bytes(size)} in {duration(took_s)}")
    _list_skipped(manifest, folder)
    print(f"train from it with: ptfast train data=imagefolder data.root={folder}")
    return EXIT_OK


def _verify(flags: dict[str, Any], arguments: list[str]) -> int:
    if len(flags) > 1 or len(arguments) != 1:
        hint = "Usage: ptfast pack --verify DST"
        raise ConfigError("C011", "checks one pack and takes nothing else", key="--verify", suggestion=hint)
    from ptfast.data.packed import check_data, check_source, open_pack
    from ptfast.display.counter import counting

    folder = Path(arguments[0]).expanduser()
    manifest = open_pack(folder, "DST")
    if manifest is None:
        raise DataError("D001", "holds no pack", key="DST", value=folder)
    size = sum(split.bytes for split in manifest.splits.values())
    with counting("checking", "bytes", size) as count:
        check_data(folder, manifest, count)
    check_source(folder, manifest, "DST", whole=True)
    there = Path(manifest.source.path).exists()
    source = "its source has not changed" if there else f"its source {manifest.source.path} is not there"
    print(f"{folder} is whole: {num_bytes(size)} as they were written; {source}")
    return EXIT_OK


def _size(flags: dict[str, Any]) -> int | None:
    word = flags.get("--size", "keep")
    return None if word == "keep" else _count("--size", word, "Give pixels, such as 256, or keep")


def _workers(flags: dict[str, Any]) -> int:
    from ptfast.machine import spare_cores

    if "--workers" not in flags:
        return spare_cores(most=sys.maxsize)
    return _count("--workers", flags["--workers"], "Give a number of processes")


def _count(flag: str, word: str, hint: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) < 1:
        raise ConfigError("C005", "no whole number above 0", key=flag, value=word, suggestion=hint)
    return int(word)


def _choice(flags: dict[str, Any], flag: str, choices: tuple[str, ...]) -> str:
    word = flags.get(flag, choices[0])
    if word not in choices:
        hint = f"Use {' or '.join(choices)}"
        raise ConfigError("C005", "no such way", key=flag, value=word, suggestion=hint)
    return word


def _list_skipped(manifest: Any, folder: Path) -> None:
    skipped = manifest.skipped
    for file in skipped[:_SHOWN_FILES]:
        print(f"skipped {file['file']}: {file['reason']}")
    if len(skipped) > _SHOWN_FILES:
        print(f"skipped {len(skipped):,} files in all; manifest.json in {folder} names them")
