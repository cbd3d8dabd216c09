"""Mean and deviation of the inputs: computed once from the training samples, applied on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core.machine import cache_folder
from ptfast.data.data_fingerprint import load_arrays, save_arrays
from ptfast.data.map_source import MapSource, TensorSource

Statistics = dict[str, list[float]]
EXACT_BYTES = 2**30
"""Statistics cover all inputs up to this decoded size. It is fixed, to be the same on every machine."""
_SAMPLE_LIMIT = 10_000
"""Number of samples used for statistics if the inputs are larger."""


class Normalizer:
    """Normalizes raw inputs to zero mean and unit deviation: `(x.float() - mean) * (1 / std)`.

    It runs on the device: uint8 crosses the bus at a quarter of the bytes. `mean` and `std` are per
    image channel (raw scale) or per feature. `dtype` and `layout` apply to the result for images.
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        *,
        images: bool,
        dtype: torch.dtype = torch.float32,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        shape = (1, -1, 1, 1) if images else (1, -1)
        self._mean = torch.tensor(mean, dtype=torch.float64).float().reshape(shape).to(device)
        # Divided in float64, so that the factor is the closest float32.
        self._factor = (1 / torch.tensor(std, dtype=torch.float64)).float().reshape(shape).to(device)
        self._dtype, self._layout, self._images = dtype, layout, images
        self._expanded: tuple[Any, Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return a normalized copy, in the memory format of `inputs`, or in `layout` if it `fuses`."""
        if self.fuses(inputs):
            return self.fused(inputs)
        mean, factor = self._mean, self._factor
        if self._images:
            # Expand mean and factor to a whole image: broadcasting three channels along the fastest dimension
            # would run inner loops of three.
            layout = (inputs.shape[1:], inputs.stride()[1:])
            if self._expanded is None or self._expanded[0] != layout:
                full = torch.empty_like(inputs[:1], dtype=torch.float32)
                self._expanded = (layout, full.copy_(mean).clone(), full.copy_(factor).clone())
            _, mean, factor = self._expanded
        return inputs.to(torch.float32, copy=True).sub_(mean).mul_(factor).to(self._dtype)

    @property
    def mean_and_factor(self) -> tuple[Tensor, Tensor]:
        """Mean and factor of each channel or feature."""
        return self._mean, self._factor

    def fuses(self, inputs: Tensor) -> bool:
        """Return True for uint8 images on a GPU, whose kernels convert types as they read and write."""
        return self._images and inputs.is_cuda and inputs.dtype == torch.uint8

    def fused(self, inputs: Tensor) -> Tensor:
        """Normalize in two kernels, with the same bits as a call: one reads bytes, one writes the result."""
        out = torch.empty(inputs.shape, dtype=self._dtype, device=inputs.device, memory_format=self._layout)
        centered = torch.sub(inputs, self._mean, out=out if self._dtype == torch.float32 else None)
        return torch.mul(centered, self._factor, out=out)


def statistics(
    source: MapSource, cache_key: Callable[[], str] | None = None, decoded: MapSource | None = None
) -> Statistics:
    """Return `mean` and `std` of the inputs of `source`, per channel or feature; a std of 0 becomes 1.

    They are exact if the samples are in memory or take at most 1 GiB decoded, else from 10,000 evenly spaced
    ones. This depends only on the data, so that every loader normalizes by the same bits. Statistics that
    needed decoding are cached on disk by `cache_key`. `decoded` are the same samples, already decoded.
    """
    if isinstance(source, TensorSource):
        return finish_statistics(*_sums(source.inputs))
    everything = np.arange(len(source))
    spaced = source.spread(_SAMPLE_LIMIT)
    # A pack stores the pixel sums of each image.
    if (sums := source.pixel_sums(everything)) is not None:
        if 3 * sums[0] > EXACT_BYTES and (of_some := source.pixel_sums(spaced)) is not None:
            sums = of_some
        return finish_statistics(*sums)
    whole = (source.decoded_bytes or EXACT_BYTES + 1) <= EXACT_BYTES
    if isinstance(decoded, TensorSource) and whole:
        return finish_statistics(*_sums(decoded.inputs))
    indices = everything if whole else spaced
    entry = None
    if cache_key is not None:
        key = hashlib.sha256(f"{cache_key()} {len(indices)}".encode()).hexdigest()[:24]
        entry = cache_folder() / f"statistics-{key}.npz"
        if {"mean", "std"} <= (known := load_arrays(entry)).keys():
            return {name: known[name].tolist() for name in ("mean", "std")}
    chunks = np.array_split(indices, -(-len(indices) // 256))
    parts = [_sums((decoded or source).fetch(chunk)[0]) for chunk in chunks]
    result = finish_statistics(*(sum(column) for column in zip(*parts, strict=True)))
    if entry is not None:
        save_arrays(entry, **{name: np.array(values) for name, values in result.items()})
    return result


def _sums(inputs: Tensor) -> tuple[int, Any, Any]:
    """Return count, sums and sums of squares over all but the last dimension; exact for uint8."""
    rows = inputs.reshape(len(inputs), -1)
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    squares = total.clone()
    # 256 squares of bytes sum to less than 2**24, so float32 is exact, with less memory traffic than float64.
    dtype = torch.float32 if inputs.dtype == torch.uint8 else torch.float64
    for chunk in rows.split(min(256, max(1, 2**22 // rows.shape[1]))):
        values = chunk.to(dtype, copy=True)
        total += values.sum(0)
        squares += values.square_().sum(0)
    columns = inputs.shape[-1]
    return inputs.numel() // columns, total.view(-1, columns).sum(0), squares.view(-1, columns).sum(0)


def finish_statistics(count: int, total: Any, squares: Any) -> Statistics:
    """Return mean and deviation from a count, sums and sums of squares; a std of 0 becomes 1."""
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    # Rounding leaves a tiny deviation in constant columns; dividing by it would amplify noise.
    std = torch.where(std > 1e-7 * mean.abs().clamp(min=1e-30), std, 1.0)
    return {"mean": mean.tolist(), "std": std.tolist()}
