"""Fetching an archive once, whole and checked, and unpacking it without trusting its paths."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from ptfast.core.errors import DataError, cannot_write

_TIMEOUT_S = 20


def fetch_archive(url: str, md5: str, folder: Path, hint: str, download: bool = True) -> Path:
    """The archive of `url` in `folder`; it is downloaded, if `download`, unless an intact one is there.

    An archive gets its name only after its checksum is verified; partial downloads are replaced. Processes
    that ask at the same time wait for the first. `hint` says what to do without a network.
    """
    target = folder / url.rsplit("/", 1)[1]
    with locked_folder(folder, hint):
        damaged = target.is_file() and file_md5(target) != md5
        if target.is_file() and not damaged:
            return target
        if not download:
            raise DataError("D007", "is damaged (wrong checksum)", key=str(target), suggestion=hint)
        partial = target.with_suffix(".partial")
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
        except OSError as error:
            partial.unlink(missing_ok=True)
            state = "is damaged (wrong checksum) and " if damaged else ""
            what = f"{state}cannot be downloaded: {getattr(error, 'reason', None) or error}"
            raise DataError("D007", what, key=str(target if damaged else url), suggestion=hint) from None
        if file_md5(partial) != md5:
            partial.unlink(missing_ok=True)
            what = "the download has the wrong checksum"
            raise DataError("D007", what, key=url, suggestion=f"Try again. {hint}")
        partial.replace(target)
    return target


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a tar archive into `folder`.

    Raises:
        DataError: D007 for a damaged archive; links, absolute paths and `..` are refused before unpacking.
    """
    try:
        with tarfile.open(archive) as tar:
            members = tar.getmembers()
            for member in members:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise DataError("D007", f"holds an unsafe member: {member.name}", key=str(archive))
            for member in members:
                target = folder / member.name
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                # Another rank may be unpacking the same: a file appears whole.
                partial = target.with_name(f".{target.name}.{os.getpid()}")
                with content, partial.open("wb") as sink:
                    shutil.copyfileobj(content, sink, 1 << 20)
                partial.replace(target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError("D007", f"cannot be unpacked: {error}", key=str(archive)) from None


def file_md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def locked_folder(
    folder: Path, hint: str, pause: Callable[[], None] = lambda: time.sleep(0.1)
) -> Iterator[bool]:
    """Hold a lock on `folder` among the processes of this machine; remove the folder if it stays empty.

    Gives False on a file system that cannot lock. `hint` says what to do about a folder that cannot be made;
    `pause` is called between attempts while another process holds the lock.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise cannot_write(error, str(folder), suggestion=hint) from None
    try:
        locked = False
        with contextlib.suppress(OSError):
            while not locked:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                except BlockingIOError:
                    pause()
        if folder.exists() and os.path.samestat(folder.stat(), os.fstat(lock)):
            yield locked
        else:
            # The process that held the lock has removed the empty folder.
            with locked_folder(folder, hint, pause) as locked:
                yield locked
    finally:
        os.close(lock)
        for path in made:
            with contextlib.suppress(OSError):  # it is not empty
                path.rmdir()
