"""Tar shards at URLs: each is fetched once, whole, into the cache folder, and then read like a local one."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from http import HTTPStatus
from http.client import InvalidURL
from pathlib import Path, PurePosixPath
from threading import Event
from typing import IO, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from ptfast.core.errors import (
    DataError,
    MachineError,
    PtfastError,
    cannot_write,
    hide_credentials,
    import_extra,
    summary_of,
)
from ptfast.core.machine import cache_folder
from ptfast.core.units import clock, num_bytes
from ptfast.data.streams.download import locked_folder
from ptfast.data.streams.shard_index import Shard, index_shard

_AT_ONCE = 8
_TIMEOUT_S = 20
_MOST_FAILURES = 5
"""In a row without any progress."""
_WAIT_S = 0.5
"""After the first failure; after each further one twice as long."""
_BLOCK_BYTES = 2**16
_REPORT_S = 10.0
_REFUSALS = (401, 403, 404, 410)
"""HTTP answers that retrying does not change."""
_UNKNOWN_USER = (401, 403)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROOM = "Set PTFAST_CACHE to a folder that can be written and has room"


class _Answer(NamedTuple):
    """A remote file that is being read."""

    file: IO[bytes]
    start: int
    """The byte of the whole file that comes first."""
    size_bytes: int | None
    """Of the whole file; None if unknown, as in chunked answers."""
    version: str | None
    """Tells whether the rest is still of the same file; None if the server sends no parts."""


def is_url(place: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", place) is not None


def open_shards(places: Sequence[str]) -> list[tuple[Path, Shard]]:
    """The file and the index of each shard; those at URLs, of HTTP or fsspec, are fetched into the cache.

    The processes of a machine fetch each shard once. Lost connections are resumed, up to five failures in a
    row. An incomplete file never has the name of its shard, and a damaged one is removed.
    """
    if not any(map(is_url, places)):
        return [(Path(place), index_shard(Path(place))) for place in places]
    missing = [place for place in places if is_url(place) and not _in_cache(place).is_file()]
    stop, begun_s = Event(), time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # The first download checks that there is room for all.
        counts = [len(missing) if place in missing[:1] else 1 for place in places]
        shards = [pool.submit(_open, *each, stop) for each in zip(places, counts, strict=True)]
        pending = {*shards}
        try:
            while pending:
                done, pending = wait(pending, _REPORT_S, FIRST_EXCEPTION)
                for shard in done:
                    shard.result()
                if pending and os.environ.get("LOCAL_RANK", "0") == "0":
                    count, elapsed_s = len(shards) - len(pending), time.monotonic() - begun_s
                    eta = f"  eta {clock(elapsed_s / count * len(pending))}" if count else ""
                    text = f"fetched {count:,} of {len(shards):,} shards{eta}"
                    print(text, file=sys.stderr, flush=True)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [shard.result() for shard in shards]


def _in_cache(url: str) -> Path:
    """The place of a shard in the cache folder, the same for every user of the URL."""
    parts = urlsplit(url)
    name = re.sub(r"[^\w.-]", "_", PurePosixPath(parts.path).name).strip(".") or "shard.tar"
    # The whole query counts: a part that looks like a signature may name the file.
    whole = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return cache_folder() / "urls" / hashlib.sha256(whole.encode()).hexdigest()[:32] / name


def _open(place: str, num_missing: int, stop: Event) -> tuple[Path, Shard]:
    if not is_url(place):
        return Path(place), index_shard(Path(place))
    target = _in_cache(place)
    with locked_folder(target.parent, _ROOM, lambda: _pause(stop, 0.1)) as locked:
        if target.is_file():
            with contextlib.suppress(DataError):  # of one that has been damaged since
                return target, index_shard(target)
        if locked:
            for abandoned in target.parent.glob("*.partial"):
                abandoned.unlink()
        # Without locks, processes on several machines may have the same id.
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
        try:
            with partial.open("wb") as sink:
                _receive(place, sink, num_missing, stop)
            partial.replace(target)
        except OSError as error:
            raise cannot_write(error, str(target.parent), suggestion=_ROOM) from None
        finally:
            partial.unlink(missing_ok=True)
        try:
            return target, index_shard(target)
        except DataError as error:
            # A repaired shard is then fetched again.
            target.unlink(missing_ok=True)
            raise DataError(**{**error.parts, "key": hide_credentials(place)}) from None


def _receive(url: str, sink: IO[bytes], num_missing: int, stop: Event) -> None:
    """Write the file at `url` into `sink`; after a failure go on from there, if the server allows it."""
    failures, furthest, version, shown = 0, 0, None, hide_credentials(url)
    while True:
        try:
            answer = _ask(url, sink.tell(), version)
            with contextlib.closing(answer.file) as file:
                version = answer.version
                sink.seek(answer.start)
                sink.truncate()
                # If all shards are as large as this one, too many are refused before the disk is full.
                size_bytes, free = answer.size_bytes or 0, shutil.disk_usage(Path(sink.name).parent).free
                if size_bytes * num_missing - answer.start > free:
                    sizes = f"{num_missing:,} x {num_bytes(size_bytes)} of shards"
                    what = f"{sizes} do not fit: {num_bytes(free)} are free"
                    raise MachineError("E002", what, key=str(cache_folder()), suggestion=_ROOM)
                while block := file.read(_BLOCK_BYTES):
                    _pause(stop)
                    sink.write(block)
            if answer.size_bytes in (None, sink.tell()):
                return
            why = f"the connection broke off after {sink.tell():,} of {answer.size_bytes:,} bytes"
        except (PtfastError, CancelledError):
            raise
        except (FileNotFoundError, PermissionError, InvalidURL) as error:
            raise DataError("D001", f"cannot be fetched: {summary_of(error)}", key=shown) from None
        # Each package that fsspec calls raises exceptions of its own.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            cause = getattr(error, "reason", None)
            why = summary_of(cause if isinstance(cause, Exception) else error)
        failures = 1 if sink.tell() > furthest else failures + 1
        furthest = max(furthest, sink.tell())
        if failures == _MOST_FAILURES:
            what = f"cannot be downloaded after {failures} attempts: {why}"
            raise DataError("D007", what, key=shown, suggestion="Run it again: finished shards are kept")
        _pause(stop, _WAIT_S * 2 ** (failures - 1))


def _ask(url: str, start: int, version: str | None) -> _Answer:
    """Begin to read `url`, from byte `start` if the server has the same `version` and can send a part."""
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https"):
        return _ask_fsspec(url)
    credentials, _, host = parts.netloc.rpartition("@")
    plain = urlunsplit(parts._replace(netloc=host, path=quote(parts.path, "%/:=&~+!$,;'@()*")))
    request = Request(plain, headers={"User-Agent": "ptfast"})
    if credentials:
        word = base64.b64encode(unquote(credentials).encode()).decode()
        # The credentials are not sent to a host that this one redirects to.
        request.add_unredirected_header("Authorization", f"Basic {word}")
    if start and version:
        request.add_header("Range", f"bytes={start}-")
        request.add_header("If-Range", version)
    try:
        response = urlopen(request, timeout=_TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code in _REFUSALS:
            what = f"cannot be fetched: the server answers {error.code} {error.reason}"
            hint = "Correct the URL, or the range in its braces"
            if error.code in _UNKNOWN_USER:
                hint = "Give a user: https://USER:${oc.env:PASSWORD}@HOST/..."
            raise DataError("D001", what, key=hide_credentials(url), suggestion=hint) from None
        raise
    headers, length = response.headers, response.length
    if length is None:
        return _Answer(response, 0, None, None)
    found = headers.get("ETag") or headers.get("Last-Modified")
    part = re.match(r"bytes (\d+)-\d+/(\d+)$", headers.get("Content-Range", ""))
    if start and response.status == HTTPStatus.PARTIAL_CONTENT:
        if part and int(part[1]) == start and found in (None, version):
            return _Answer(response, start, int(part[2]), version)
        # Other bytes than asked for, or of another file: some servers ignore If-Range.
        response.close()
        return _ask(url, 0, None)
    return _Answer(response, 0, length, found)


def _ask_fsspec(url: str) -> _Answer:
    import fsspec

    shown = hide_credentials(url)
    if url.lower().startswith("s3"):
        import_extra("s3fs", "s3", shown)
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MachineError("E004", summary_of(error), key=shown) from None
    except ValueError as error:
        raise DataError("D001", f"cannot be fetched: {summary_of(error)}", key=shown) from None
    size_bytes = system.size(path)
    return _Answer(system.open(path, "rb"), 0, size_bytes, None)


def _pause(stop: Event, seconds: float = 0.0) -> None:
    """Wait, and raise CancelledError as soon as the shards are no longer wanted."""
    if stop.wait(seconds):
        raise CancelledError
