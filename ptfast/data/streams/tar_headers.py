"""The members of a tar file, found by its headers alone, with checks for truncated files."""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from ptfast.core.errors import DataError

REMEDY = "Make the shard anew, or leave it out"


class Member(NamedTuple):
    """A file in a tar, whose first byte is at `offset`."""

    name: str
    offset: int
    size: int


def members(path: Path) -> Iterator[Member]:
    """The files of a tar, in their order.

    Raises:
        DataError: D005 for a file that is no tar, is compressed, or is truncated.
    """
    size, what = path.stat().st_size, "is not a tar file, despite its name"
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            what = "is truncated"
            for info in tar:
                if info.size < 0 or (info.isfile() and info.offset_data + info.size > size):
                    raise tarfile.ReadError(f"{info.name} has {info.size:,} bytes, and the file {size:,}")
                if info.isfile():
                    yield Member(info.name, info.offset_data, info.size)
            file.seek(tar.offset)
            if file.read(1) != b"\0":
                raise tarfile.ReadError("the mark at its end is missing")
    except (tarfile.TarError, ArithmeticError, MemoryError, RecursionError, ValueError) as error:
        what, hint = f"{what}: {error}", REMEDY
        with path.open("rb") as file:
            if file.read(6).startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zX")):
                what, hint = "is compressed, so samples in it cannot be located", "Unpack it to a plain .tar"
        raise DataError("D005", what, key=str(path), suggestion=hint) from None


class InTar(str):
    """The name of a file in a tar, by which it can be read; out of `file`, where the tar is open."""

    __slots__ = ("file", "offset", "size", "tar")

    def __new__(cls, tar: str, name: str, offset: int, size: int, file: IO[bytes] | None = None) -> InTar:
        self = super().__new__(cls, f"{tar}/{name}")
        self.tar, self.offset, self.size, self.file = tar, offset, size, file
        return self

    def read(self, most: int = sys.maxsize) -> bytes:
        """Its first bytes, at most `most`; fewer if the file is gone or truncated."""
        if self.file is not None:
            return read_at(self.file, self.offset, min(self.size, most))
        with Path(self.tar).open("rb", buffering=0) as file:
            return read_at(file, self.offset, min(self.size, most))


def read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    """Bytes of a file, whose position stays: several threads may read it at once."""
    return os.pread(file.fileno(), size, offset)
