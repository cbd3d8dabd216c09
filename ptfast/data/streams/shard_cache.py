"""A disk cache of bounded size for shards at URLs, shared by all processes of the machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import IO, Any
from urllib.parse import urlsplit

from fsspec import Callback
from fsspec.core import url_to_fs

from ptfast.core.errors import ConfigError, DataError, PtfastError, cannot_write, import_extra, summary_of
from ptfast.core.machine import cache_folder
from ptfast.core.sections.secret_values import hide_credentials
from ptfast.core.units import num_bytes
from ptfast.data.streams.shard_index import Shard, index_shard, kept_index

_ATTEMPTS, _TIMEOUT_S = 5, 20
_WAIT_S = 1.0
"""Delay after the first attempt; it doubles after each further one."""
_ABANDONED_S, _CLAIM_S = 600, 0.05
_ROOM = "Set PTFAST_CACHE to a folder that can be written and has room, or data.cache to less"
_PACKAGES = {
    **dict.fromkeys(("http", "https"), ("aiohttp", "http")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gs")),
    "s3": ("s3fs", "s3"),
    "hf": ("huggingface_hub", "hf"),
}
"""The package that a protocol needs besides fsspec, and the extra that installs it."""
_prefetching: dict[Path, Thread] = {}


def is_url(place: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", place) is not None


@dataclass(frozen=True)
class ShardCache:
    """Complete, checked local copies of shards; the least recently used are evicted at `bound` bytes.

    fsspec downloads them. Its own caches are not used: they have no bound, and take the partial file of a
    killed process for a complete one.
    """

    bound: int

    def path(self, url: str) -> Path:
        """Return the path of a shard's copy, the same for every user name in the URL."""
        # The whole query counts: a part that looks like a signature may name the file.
        without_user = re.sub(r"(?<=://)[^/@]*@", "", url)
        name = PurePosixPath(urlsplit(url).path).name or "shard.tar"
        return cache_folder() / "urls" / hashlib.sha256(without_user.encode()).hexdigest()[:32] / name

    def open(self, url: str) -> IO[bytes]:
        """Open the copy of a shard, downloading it if needed; an open file survives its eviction."""
        path = self.path(url)
        while True:
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError:
                self.fetch(url)
                continue
            os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
            return file

    def index(self, url: str) -> Shard:
        """Return the index of a shard, which is downloaded if it was never indexed."""
        return kept_index(self.path(url)) or self.fetch(url)

    def prefetch(self, urls: Iterable[str]) -> None:
        """Start downloading the shards to read next; download errors are raised when a shard is read."""
        for url in urls:
            path = self.path(url)
            if not path.exists() and not ((thread := _prefetching.get(path)) and thread.is_alive()):
                _prefetching[path] = Thread(target=self._prefetch, args=(url,), daemon=True)
                _prefetching[path].start()

    def _prefetch(self, url: str) -> None:
        with contextlib.suppress(PtfastError):
            self.fetch(url)

    def fetch(self, url: str) -> Shard:
        """Download the shard at `url` unless it is cached, one process at a time; return its index.

        Raises:
            PtfastError: D001, D005 or D007 if the download fails or is incomplete, C011 if it is larger than
                the cache, E001 or E002 if it cannot be written, E004 for a missing package.
        """
        target = self.path(url)
        unfinished = target.with_name(f"{target.name}.partial")
        try:
            with locked(target.parent):
                if not target.is_file():
                    try:
                        self._receive(url, unfinished)
                        unfinished.replace(target)
                    finally:
                        _claim(unfinished).unlink(missing_ok=True)
                return index_shard(target)
        except OSError as error:
            raise cannot_write(error, str(target.parent), suggestion=_ROOM) from None
        except DataError as error:
            if error.key == str(target):
                # Remove the copy, so that a repaired shard is downloaded again.
                target.unlink(missing_ok=True)
                error = error.changed(key=hide_credentials(url))
            raise error from None

    def _receive(self, url: str, target: Path) -> None:
        shown, why, attempt = hide_credentials(url), "", 0
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_WAIT_S * 2 ** (attempt - 1))
            # Called when the size is known, and after each block.
            callback = Callback(hooks={"room": partial(self._make_room, target, shown)})
            try:
                system, path = _file_system(url, shown)
                system.get_file(path, str(target), callback=callback)
                if callback.size in (None, size := target.stat().st_size):
                    return
                why = f"the connection broke off after {size:,} of {callback.size:,} bytes"
            except PtfastError:
                raise
            except (FileNotFoundError, PermissionError, ImportError, ValueError) as error:
                raise DataError("D001", f"cannot be fetched: {summary_of(error)}", key=shown) from None
            # Each package that fsspec calls raises exceptions of its own.
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                status = getattr(error, "status", None)
                why = f"the server answers {status}" if status else summary_of(error)
                if isinstance(error, TimeoutError):
                    why = f"the server sends nothing for {_TIMEOUT_S} s"
                if status in (401, 403, 410):
                    break
        what = f"cannot be downloaded in {attempt + 1} attempts: {why}"
        raise DataError(
            "D007", what, key=shown, suggestion="Go on with run.resume=auto when it can be reached"
        )

    def _make_room(self, target: Path, shown: str, size: int | None, value: int, **_: Any) -> None:
        """Claim disk space for `target`, and wait for it while other downloads occupy all of it."""
        if (needed := size or value) > self.bound:
            what = f"is smaller than the shard {shown}, which has {num_bytes(needed)}"
            raise ConfigError("C011", what, key="data.cache", value=num_bytes(self.bound))
        # Without a size, do not wait: two such downloads could wait for each other.
        while not self._claimed(_claim(target), needed) and size is not None:
            time.sleep(_CLAIM_S)

    def _claimed(self, claim: Path, needed: int) -> bool:
        """Claim `needed` bytes by a sparse file of that size; evict the least recently read copies."""
        with contextlib.suppress(FileNotFoundError):
            if claim.stat().st_size >= needed:
                os.utime(claim)
                return True
        with locked(claim.parents[1]):
            used, removable = needed, list[tuple[int, int, Path]]()
            for path in claim.parents[1].glob("*/*"):
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    is_abandoned = time.time() - found.st_mtime > _ABANDONED_S
                    # An unfinished copy is counted by its claim.
                    is_claimed = path == claim or (path.suffix == ".partial" and _claim(path).exists())
                    size = 0 if is_claimed else found.st_size
                    used += size
                    if is_abandoned or path.suffix not in (".partial", ".claim"):
                        removable.append((found.st_atime_ns, size, path))
            if used - sum(size for _, size, _ in removable) > self.bound:
                return False
            for _time, freed, path in sorted(removable):
                if used <= self.bound:
                    break
                path.unlink(missing_ok=True)
                used -= freed
            claim.touch()
            os.truncate(claim, needed)
            return True


def _claim(target: Path) -> Path:
    return target.with_suffix(".claim")


def _file_system(url: str, shown: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path of the file in it."""
    protocol, options = url.partition("://")[0].lower(), dict[str, Any]()
    if protocol in _PACKAGES:
        package = import_extra(*_PACKAGES[protocol], key=shown)
        if package.__name__ == "aiohttp":
            timeout = package.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
            # The length of a compressed response differs from the file's.
            options = {"client_kwargs": {"timeout": timeout}, "headers": {"Accept-Encoding": "identity"}}
    system, path = url_to_fs(url, **options)
    return system, str(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, created if needed, against all processes and threads of the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
