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
from ptfast.data.sources.download import locked_folder
from ptfast.data.streams.shard_index import Shard, index_shard

_AT_ONCE = 8
_TIMEOUT_S = 20
_MOST_FAILURES = 5
"""In a row, none of which has got further than those before it."""
_WAIT_S = 0.5
"""After the first failure; after each further one twice as long."""
_BLOCK_BYTES = 2**16
_REPORT_S = 10.0
_REFUSALS = (401, 403, 404, 410)
"""Answers of HTTP that trying again does not change."""
_UNKNOWN_USER = (401, 403)
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROOM = "Set PTFAST_CACHE to a folder that can be written and has room"


class _Answer(NamedTuple):
    """A remote file that is being read."""

    file: IO[bytes]
    start: int
    """The byte of the whole file that comes first."""
    size_bytes: int | None
    """Of the whole file; None where the end of the answer is marked instead."""
    version: str | None
    """By which a server knows whether the rest is still of the same file; None where it sends no parts."""


def is_url(place: str) -> bool:
    """Return True for what is not a path on this machine."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", place) is not None


def open_shards(places: Sequence[str]) -> list[tuple[Path, Shard]]:
    """The file and the index of each shard, of those at URLs once they are in the cache folder.

    A shard that is there, and whole, is not asked for again. The processes of a machine fetch each once:
    whoever comes later waits. Lost connections are resumed, five in a row given up. An incomplete file is
    never there under its name, and one that `index_shard` refuses is removed.

    Args:
        places: paths, and URLs of HTTP, or of any protocol that fsspec has a package for.
    """
    if not any(map(is_url, places)):
        return [(Path(place), index_shard(Path(place))) for place in places]
    missing = [place for place in places if is_url(place) and not _in_cache(place).is_file()]
    stop, begun_s = Event(), time.monotonic()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # The first that is fetched asks for the room that all take.
        counts = [len(missing) if place in missing[:1] else 1 for place in places]
        shards = [pool.submit(_open, *each, stop) for each in zip(places, counts, strict=True)]
        pending = {*shards}
        try:
            while pending:
                done, pending = wait(pending, _REPORT_S, FIRST_EXCEPTION)
                for shard in done:
                    shard.result()
                if pending and os.environ.get("LOCAL_RANK", "0") == "0":
                    _report(len(shards) - len(pending), len(shards), time.monotonic() - begun_s)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [shard.result() for shard in shards]


def _report(count: int, total: int, elapsed_s: float) -> None:
    eta = f"  eta {clock(elapsed_s / count * (total - count))}" if count else ""
    print(f"fetched {count:,} of {total:,} shards{eta}", file=sys.stderr, flush=True)


def _in_cache(url: str) -> Path:
    """The place of a shard in the cache folder, whoever fetches it."""
    parts = urlsplit(url)
    name = re.sub(r"[^\w.-]", "_", PurePosixPath(parts.path).name).strip(".") or "shard.tar"
    # Of a query nothing is left out: what looks like a signature may name the file.
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
        _download(place, target, num_missing, stop)
        try:
            return target, index_shard(target)
        except DataError as error:
            # One made anew is to be fetched anew.
            target.unlink(missing_ok=True)
            raise DataError(**{**error.parts, "key": hide_credentials(place)}) from None


def _download(url: str, target: Path, num_missing: int, stop: Event) -> None:
    # Where nothing can be locked, containers of several machines may have processes of one id.
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as sink:
            _receive(url, sink, num_missing, stop)
        partial.replace(target)
    except OSError as error:
        raise cannot_write(error, str(target.parent), suggestion=_ROOM) from None
    finally:
        partial.unlink(missing_ok=True)


def _receive(url: str, sink: IO[bytes], num_missing: int, stop: Event) -> None:
    """Write what is at `url` into `sink`, after each failure from where it broke off, if the server can."""
    failures, furthest, version, shown = 0, 0, None, hide_credentials(url)
    while True:
        try:
            answer = _ask(url, sink.tell(), version)
            with contextlib.closing(answer.file) as file:
                version = answer.version
                sink.seek(answer.start)
                sink.truncate()
                _check_room(Path(sink.name).parent, answer, num_missing)
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
        # Of packages that fsspec calls, each raises its own.
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
    """Begin to read `url`, from byte `start` if that is of the `version` read before and can be had apart."""
    parts = urlsplit(url)
    if parts.scheme.lower() not in ("http", "https"):
        return _ask_fsspec(url)
    credentials, _, host = parts.netloc.rpartition("@")
    plain = urlunsplit(parts._replace(netloc=host, path=quote(parts.path, "%/:=&~+!$,;'@()*")))
    request = Request(plain, headers={"User-Agent": "ptfast"})
    if credentials:
        word = base64.b64encode(unquote(credentials).encode()).decode()
        # Another host that this one redirects to is not told.
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
        # Other bytes than asked for, or of another file: some servers take no notice of If-Range.
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


def _check_room(folder: Path, answer: _Answer, num_missing: int) -> None:
    """Refuse shards, all as large as this one, that the disk has no room for, before it is full."""
    size = answer.size_bytes or 0
    needed, free = size * num_missing - answer.start, shutil.disk_usage(folder).free
    if needed > free:
        what = f"{num_missing:,} x {num_bytes(size)} of shards do not fit: {num_bytes(free)} are free"
        raise MachineError("E002", what, key=str(cache_folder()), suggestion=_ROOM)


def _pause(stop: Event, seconds: float = 0.0) -> None:
    """Wait, and raise CancelledError as soon as nobody wants the shards any more."""
    if stop.wait(seconds):
        raise CancelledError
