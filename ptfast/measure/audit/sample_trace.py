"""How single samples are fetched: the calls they take, and the time in decoders."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from ptfast.data.map_source import MapSource, SubsetSource
from ptfast.data.sources.image_files import ImageFiles
from ptfast.measure.audit.call_trace import CallTrace

NUM_SAMPLES = 32


@dataclass(frozen=True)
class SampleTrace:
    """What fetching some samples one after another shows."""

    num_samples: int
    seconds: float
    decoding_s: float
    """Of that, in decoders of images."""
    calls: CallTrace


def trace_samples(source: MapSource) -> SampleTrace:
    """Fetch some samples from all over the data as a loader does, and watch what it takes."""
    indices = np.linspace(0, len(source) - 1, min(len(source), NUM_SAMPLES)).astype(np.int64)
    source.fetch(indices[:1])
    calls = CallTrace("cpu")
    with _timing_decoders() as decoding, calls:
        start = time.perf_counter()
        source.fetch(indices)
        seconds = time.perf_counter() - start
    return SampleTrace(len(indices), seconds, seconds if _is_of_files(source) else decoding[0], calls)


@contextmanager
def _timing_decoders() -> Iterator[list[float]]:
    """Add up the seconds inside PIL's and torchvision's decoders, where they are in use."""
    spent = [0.0]
    image_file, io = sys.modules.get("PIL.ImageFile"), sys.modules.get("torchvision.io")
    places: list[tuple[Any, str]] = [(image_file.ImageFile, "load")] if image_file else []
    places += [(io, name) for name in ("decode_image", "decode_jpeg", "decode_png", "read_image") if io]

    def timing(decode: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return decode(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return timed

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, timing(getattr(owner, name))))
        yield spent


def _is_of_files(source: MapSource) -> bool:
    """Return True for images of ours, of which fetching is decoding."""
    while isinstance(source, SubsetSource):
        source = source.source
    return isinstance(source, ImageFiles)
