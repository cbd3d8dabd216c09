"""`ptfast pack`: convert images or text once, so that training starts immediately."""

from __future__ import annotations

import contextlib
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ptfast.core.errors import EXIT_OK, ConfigError, DataError
from ptfast.core.machine import spare_cores
from ptfast.core.units import duration, grouped, num_bytes
from ptfast.report.terminal.display import build_display

if TYPE_CHECKING:
    from ptfast.data.packs.pack_reader import Manifest

_OF_IMAGES = ("--size", "--jpeg", "--on-corrupt")
_OF_TEXT = ("--tokenizer", "--documents")
_SHOWN_FILES = 10


def pack(args: Namespace) -> int:
    """Create the pack named on the command line, or check an existing one."""
    if args.verify:
        return _verify(args)
    if len(args.words) < 2:
        hint = "Usage: ptfast pack SRC DST [--size N|keep]"
        raise ConfigError("C016", "needs a source and a folder to write", key="pack", suggestion=hint)
    source, folder = (Path(word).expanduser() for word in args.words)
    if source.resolve() in (folder.resolve(), *folder.resolve().parents):
        what, hint = "lies within its source", "Write the pack outside the source folder"
        raise ConfigError("C011", what, key="DST", value=folder, suggestion=hint)
    if not source.exists():
        raise DataError("D001", "no such file or folder", key="SRC", value=source)
    texts = source.is_file()
    for flag in _OF_IMAGES if texts else _OF_TEXT:
        if getattr(args, flag[2:].replace("-", "_")):
            what = f"is for {'images' if texts else 'text'}, and SRC is a {'file' if texts else 'folder'}"
            raise ConfigError("C011", what, key=flag, suggestion="Leave it out")
    if args.jpeg and args.size:
        what, hint = "keeps the files, and so their sizes", "Leave one of the two out"
        raise ConfigError("C011", what, key="--jpeg", suggestion=hint)
    # Imported late, so that errors in the flags do not wait for torch.
    from ptfast.data.packs.pack_reader import MANIFEST, is_manifest
    from ptfast.data.packs.pack_sources import plan_images, plan_text
    from ptfast.data.packs.pack_writer import check_folder, make

    if source.is_dir() and is_manifest(source / MANIFEST):
        raise DataError("D001", "is already a pack", key="SRC", value=source)
    skips = args.on_corrupt == "skip"
    if texts:
        tokenizer, documents = args.tokenizer or "characters", args.documents or "none"
        plan = plan_text(source, tokenizer=tokenizer, documents=documents)
    else:
        plan = plan_images(source, size=args.size or None, jpeg=args.jpeg, skip_corrupt=skips)
    workers = args.workers or spare_cores(most=sys.maxsize)
    whole = check_folder(folder, plan.manifest)
    if whole is not None and whole.made_as(plan.manifest):
        if whole.skipped and not skips:
            first = whole.skipped[0]
            what = f"cannot be packed: {first['reason']}"
            hint = "Fix or remove it and pack again, or give --on-corrupt skip"
            raise DataError("D005", what, key=first["file"], suggestion=hint)
        print(f"{folder} is already a complete pack of {source}: nothing to do")
        return EXIT_OK
    if whole is not None:
        print(f"{folder} contains a pack of other data or other settings: packing again")
    if plan.note:
        print(plan.note)
    start_s = time.perf_counter()
    try:
        with _progress("packing", "MiB" if texts else "images", plan.num_seen) as show:
            manifest = make(plan, folder, workers, show)
    except KeyboardInterrupt:
        print(f"{folder} is unfinished; run the same command to start again")
        raise
    _report(manifest, folder, time.perf_counter() - start_s)
    return EXIT_OK


def _report(manifest: Manifest, folder: Path, took_s: float) -> None:
    """Report packed and skipped files, and the command to train from the pack."""
    from ptfast.data.decoding.text_tokenizer import read_tokenizer, token_type
    from ptfast.data.packs.pack_reader import ROW

    size, everything = manifest.data_bytes, sum(size for size, _ in manifest.files.values())
    samples = (everything - size) // ROW.itemsize
    what, data = f"{grouped(samples)} images", f"imagefolder data.root={folder}"
    if (text := manifest.text) is not None:
        width = token_type(read_tokenizer(text.description)).itemsize
        what, data = f"{grouped(size // width)} tokens", f"text_file data.path={folder}"
        data += f" data.tokenizer={text.tokenizer}" * (text.tokenizer != "characters")
        data += f" data.documents={text.documents}" * (text.documents != "none")
    print(f"packed {what} into {folder}: {num_bytes(size)} in {duration(took_s)}")
    for file in manifest.skipped[:_SHOWN_FILES]:
        print(f"skipped {file['file']}: {file['reason']}")
    if (count := len(manifest.skipped)) > _SHOWN_FILES:
        print(f"skipped {count:,} files in all; manifest.json in {folder} lists them")
    print(f"train from it with: ptfast train data={data}")


def _verify(args: Namespace) -> int:
    given = (*_OF_IMAGES, *_OF_TEXT, "--workers")
    if any(getattr(args, flag[2:].replace("-", "_")) for flag in given) or len(args.words) != 1:
        hint = "Usage: ptfast pack --verify DST"
        raise ConfigError("C011", "takes one pack and no other argument", key="--verify", suggestion=hint)
    from ptfast.data.packs.pack_reader import check_data, check_source, open_pack

    folder = Path(args.words[0]).expanduser()
    manifest = open_pack(folder, "DST")
    if manifest is None:
        raise DataError("D001", "contains no pack", key="DST", value=folder)
    with _progress("checking", "MiB", sum(size for size, _ in manifest.files.values())) as show:
        check_data(folder, manifest, show)
    check_source(folder, manifest, "DST", whole=True)
    there = Path(manifest.source.path).exists()
    source = "its source has not changed" if there else f"its source {manifest.source.path} is missing"
    print(f"{folder} is complete: {num_bytes(manifest.data_bytes)} checked, all unchanged; {source}")
    return EXIT_OK


@contextlib.contextmanager
def _progress(what: str, unit: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows progress: images, or bytes as `MiB`, of `total`."""
    display, scale = build_display(), 2**20 if unit == "MiB" else 1
    begun: list[tuple[int, float]] = []

    def show(count: int) -> None:
        now = time.monotonic()
        if not begun:
            begun.append((count, now))
            display.start(count // scale, total // scale, what=what)
        (first, start_s), *_ = begun
        rate = {f"{unit}_per_s": (count - first) / scale / (now - start_s)} if now > start_s else {}
        display.progress(count // scale, 0, rate)

    try:
        yield show
    finally:
        display.close()
