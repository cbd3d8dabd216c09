"""Decoding image files to uint8 RGB, with checks that decoders lack."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import DataError
from ptfast.data.decoding.pictures import UnknownScaleError, in_square, rgb_pixels
from ptfast.data.transforms.resized_crops import resize

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_SYSTEM = {
    "__macosx",
    "thumbs.db",
    "desktop.ini",
    "@eadir",
    "@recycle",
    "#recycle",
    "$recycle.bin",
    "lost+found",
}
MAX_PIXELS = 100_000_000
"""An image whose header promises more is rejected as a decompression bomb."""
_HEADER_BYTES = 2**16
"""Enough to read the size of nearly every JPEG, even after a thumbnail; PIL reads more if needed."""
SHORT_S = 80e-6
"""Threads do not speed up work that is shorter than this."""
REMEDY = "Replace the file, or remove it"

Pixels = NDArray[np.uint8]


class Decoded(NamedTuple):
    """One image, and whether it had to be converted to 8-bit RGB."""

    pixels: Pixels
    converted: bool


class InTar(str):
    """The name of a file in a tar, with which it can be read; from `file` if the tar is open."""

    __slots__ = ("file", "offset", "size", "tar")

    def __new__(cls, tar: str, name: str, offset: int, size: int, file: IO[bytes] | None = None) -> InTar:
        self = super().__new__(cls, f"{tar}/{name}")
        self.tar, self.offset, self.size, self.file = tar, offset, size, file
        return self

    def read(self, most: int = sys.maxsize) -> bytes:
        """Read its first bytes, at most `most`; fewer if the tar is truncated."""
        if self.file is not None:
            return read_at(self.file, self.offset, min(self.size, most))
        with Path(self.tar).open("rb", buffering=0) as file:
            return read_at(file, self.offset, min(self.size, most))


def read_at(file: IO[bytes], offset: int, size: int) -> bytes:
    """Read bytes without moving the file's position, so that several threads may read at once."""
    return os.pread(file.fileno(), size, offset)


def is_hidden(path: str) -> bool:
    """Return True if part of the path is hidden or a system file, such as `.ipynb_checkpoints`."""
    parts = path.split("/")
    return any((part[:1] == "." and part not in (".", "..")) or part.lower() in _SYSTEM for part in parts)


def without_hidden(count: int, first: str = "") -> str:
    """Return a note on hidden files and folders that are left out; empty if there are none."""
    such = f", such as {first}" if first else ""
    return f"left out {count:,} hidden or system file{'s' * (count > 1)}{such}" if count else ""


def decode_file(path: str) -> Decoded:
    """Decode an image file; see `decode`."""
    return decode(read_file(path), path)


def decode(content: bytes, name: str) -> Decoded:
    """Decode the bytes of an image file called `name` to uint8 (height, width, 3).

    JPEG is decoded by torchvision's libjpeg-turbo, which is 2 to 3 times as fast as PIL and gives the same
    pixels; everything else, and JPEG in CMYK, by PIL.

    Raises:
        DataError: D005, naming the file and the fault.
    """
    if not content:
        raise DataError("D005", "is empty (0 bytes)", key=name, suggestion=REMEDY)
    shape = jpeg_shape(content)
    try:
        if shape is not None and shape[0] * shape[1] > MAX_PIXELS:
            raise _too_large(shape[0] * shape[1], name)
        if shape is None or shape[2] not in (1, 3):
            return _by_pil(content, name)
        converted = shape[2] == 1
        if (decode_jpeg := _jpeg_decoder()) is None:
            return Decoded(_by_pil(content, name).pixels, converted)
        # A bytearray is writable, which avoids torch's warning at the cost of copying a few kilobytes.
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pixels = decode_jpeg(buffer, 3, False)  # 3 is torchvision's ImageReadMode.RGB
        return Decoded(pixels.permute(1, 2, 0).numpy(), converted)
    except DataError:
        raise
    except Exception as error:
        raise _unreadable(error, name) from None


@functools.cache
def _jpeg_decoder() -> Callable[..., Tensor] | None:
    """Return torchvision's decoder, from its library alone if found; None if it was built without."""
    # Its Python modules import torch's compiler, which takes as long as torch itself, and its own function
    # warns of its deprecation at each call, which blocks other threads for 30 us.
    found = importlib.util.find_spec("torchvision")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    for library in (each for folder in folders for each in Path(folder).glob("image*.so")):
        with contextlib.suppress(OSError, AttributeError):
            torch.ops.load_library(library)
            return torch.ops.image.decode_jpeg
    with contextlib.suppress(ImportError, AttributeError):
        import torchvision.io  # noqa: F401 - registers it

        return torch.ops.image.decode_jpeg
    return None


def size_of(path: str) -> tuple[int, int]:
    """Return the height and width of an image, read from the start of its file."""
    if (shape := jpeg_shape(read_file(path, _HEADER_BYTES))) is not None:
        return shape[:2]
    with opened(io.BytesIO(read_file(path)) if isinstance(path, InTar) else path, path) as image:
        return image.height, image.width


def read_file(path: str, most: int = -1) -> bytes:
    """Return the bytes of an image file, or its first `most`."""
    try:
        if isinstance(path, InTar):
            return path.read(most if most >= 0 else path.size)
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - half the time of Path.read_bytes
            return file.read(most)
    except OSError as error:
        raise _unreadable(error, path) from None


def mixed_sizes(path: str, shape: Iterable[int], expected: Iterable[int]) -> DataError:
    """Return the error for an image whose size differs from the first."""
    (height, width, *_), (first_height, first_width, *_) = shape, expected
    what = f"is {width}x{height} where the first image is {first_width}x{first_height}"
    hint = f"Bring all to one size with data.image_size={min(first_height, first_width)}"
    return DataError("D005", what, key=path, suggestion=hint)


def fit(pixels: Pixels, size: int, resize: Callable[..., Tensor] = resize) -> Pixels:
    """Resize the shorter side to `size` and crop the center, as `in_square` does."""
    if pixels.shape[:2] == (size, size):
        return pixels
    return in_square(torch.from_numpy(np.ascontiguousarray(pixels)), size, resize).numpy()


def jpeg_shape(content: bytes) -> tuple[int, int, int] | None:
    """Return (height, width, components) from the frame header of a JPEG; None for anything else."""
    if content[:3] != b"\xff\xd8\xff":
        return None
    at, end = 2, len(content) - 9
    while at < end and content[at] == 0xFF:
        marker = content[at + 1]
        if marker == 0xFF:  # padding between segments
            at += 1
            continue
        # Start of frame, baseline or progressive; C4, C8 and CC in the same range are other segments.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height = content[at + 5] << 8 | content[at + 6]
            return height, content[at + 7] << 8 | content[at + 8], content[at + 9]
        at += 2 + (content[at + 2] << 8 | content[at + 3])
    return None


def _by_pil(content: bytes, path: str) -> Decoded:
    with opened(io.BytesIO(content), path) as image:
        return Decoded(rgb_pixels(image).numpy(), image.mode != "RGB")


@contextlib.contextmanager
def opened(file: str | io.BytesIO, path: str) -> Iterator[Any]:
    """Open a PIL image, its pixels not read yet; raise errors inside as a D005 that names `path`."""
    from PIL import Image, UnidentifiedImageError

    # Raise PIL's limit, which would warn of sizes accepted here. Never lower it, so that threads agree.
    if Image.MAX_IMAGE_PIXELS is not None:
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, MAX_PIXELS)
    try:
        with Image.open(file) as image:
            if (pixels := image.width * image.height) > MAX_PIXELS:
                raise _too_large(pixels, path)
            yield image
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(int(re.findall(r"\d+", str(error))[0]), path) from None
    except UnidentifiedImageError:
        what = "is not an image that can be decoded, despite its name"
        raise DataError("D005", what, key=path, suggestion=REMEDY) from None
    except UnknownScaleError as error:
        hint = "Save it with 8 bits, or with values from black to white"
        raise DataError("D005", str(error), key=path, suggestion=hint) from None
    except Exception as error:
        raise _unreadable(error, path) from None


def _unreadable(error: Exception, name: str) -> DataError:
    """Return the error for a file that the system or a decoder cannot read."""
    if isinstance(error, OSError) and error.strerror:
        return DataError("D005", f"cannot be read: {error.strerror}", key=name)
    lines = str(error).strip().splitlines()
    # Drop the location in torchvision's source before the reason.
    reason = re.sub(r"^.*\.cpp:\d+, ", "", lines[0]) if lines else type(error).__name__
    return DataError("D005", f"is damaged or truncated: {reason.rstrip('.')}", key=name, suggestion=REMEDY)


def _too_large(pixels: int, path: str) -> DataError:
    what = f"claims {pixels:,} pixels, more than {MAX_PIXELS:,}: not decoded"
    return DataError("D005", what, key=path, suggestion="Remove it, or scale it down")


Result = TypeVar("Result")


def in_threads(count: int, work: Callable[[int], Result]) -> list[Result]:
    """Return `work(0)` to `work(count - 1)`, in as many threads as torch uses; decoding releases the GIL.

    Short work, such as images smaller than 100 x 100 pixels, runs in one thread: several would wait for the
    GIL longer than they work.
    """
    if not count:
        return []
    start_s = time.perf_counter()
    first, places, threads = work(0), range(1, count), min(torch.get_num_threads(), count - 1)
    if threads <= 1 or time.perf_counter() - start_s < SHORT_S:
        return [first, *map(work, places)]
    size = -(-len(places) // threads)
    parts = [places[start : start + size] for start in range(0, len(places), size)]
    # Threads that outlived this call would not survive the fork of a worker process.
    with ThreadPoolExecutor(threads) as pool:
        return [first, *chain.from_iterable(pool.map(lambda part: [*map(work, part)], parts))]
