"""Random crops and flips on the host, as gathers of rows of bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.order import Indices
from ptfast.data.sampling.sampler import Share
from ptfast.data.transforms.augment.augment_plan import Augment

Bytes = NDArray[np.uint8]


def augmented(augment: Augment, images: Tensor, seed: int, share: Share) -> Tensor:
    """Augmented copy of the images of one micro-batch, uint8 (batch, height, width, channels)."""
    if augment.moves:
        images = crop_and_flip(augment, images, seed, share)
    return augment.change_on_host(images, seed, share.epoch, share.indices) if augment.changes else images


def cropped(
    augment: Augment, source: MapSource, seed: int, share: Share, places: Indices | None = None
) -> Tensor:
    """The images of one micro-batch by `augment.resized_crop`: uint8 (batch, side, side, channels).

    Args:
        places: of the images in `source`, where these are not their numbers.
    """
    places = share.indices if places is None else places
    boxes = augment.draw_boxes(seed, share.epoch, share.indices, source.sizes(places))
    flipped = augment.draw(seed, share.epoch, share.indices)[2]
    images = source.crops(places, boxes, augment.size, flipped)
    if augment.changes and images.device.type != "cpu":
        shape = (augment.size, augment.size)
        drawn = augment.draw_changes(seed, share.epoch, share.indices, shape)
        on_device = {name: torch.from_numpy(values).to(images.device) for name, values in drawn.items()}
        return augment.change(images, on_device)
    return augment.change_on_host(images, seed, share.epoch, share.indices) if augment.changes else images


def crop_and_flip(
    augment: Augment, images: Tensor, seed: int, share: Share, outside: Bytes | None = None
) -> Tensor:
    """Crops of images (batch, height, width, channels), mirrored first, as they are drawn for `share`.

    Args:
        outside: what comes from outside, (channels,); black if not given.
    """
    top, left, flipped = augment.draw(seed, share.epoch, share.indices)
    pixels = images.numpy()
    if augment.flip:
        mirror = flipped.astype(bool)
        pixels = pixels.copy()
        pixels[mirror] = pixels[mirror, :, ::-1]
    if not augment.crop_padding:
        return torch.from_numpy(pixels)
    windows = RowWindows(_pad(pixels, augment.crop_padding, outside=outside), pixels.shape[1:])
    return torch.from_numpy(windows.gather(windows.corners(np.arange(len(pixels)), top, left)))


class AugmentedImages:
    """Images in memory from which augmented batches are gathered.

    Padded images and their mirrored copies lie in memory channels last, so that each row of a crop is one run
    of bytes and a batch is one gather of rows: no image is touched in Python.

    Args:
        images: uint8 (samples, height, width, channels).
        holder: of the padded copies; None for this process.
        outside: what they are padded with, (channels,); black if not given.

    Cost: the memory of the padded images, twice if they are flipped; 1 to 2 us for an image of 32x32.
    """

    def __init__(
        self,
        images: Tensor,
        augment: Augment,
        seed: int,
        holder: Holder | None = None,
        outside: Bytes | None = None,
    ) -> None:
        pixels = images.contiguous().numpy()
        self._augment, self._seed, self._size = augment, seed, len(pixels)
        copies = pixels
        if augment.moves:
            mirrored = bool(augment.flip)
            copies = _pad(pixels, augment.crop_padding, holder, mirrored=mirrored, outside=outside)
        self._windows = RowWindows(copies, pixels.shape[1:])
        self._epoch, self._corners = -1, np.empty(0, np.int64)

    @staticmethod
    def nbytes(images: Tensor, augment: Augment) -> int:
        """Bytes that the padded copies of `images` take."""
        if not augment.moves:
            return 0
        samples, height, width, channels = images.shape
        pad = 2 * augment.crop_padding
        return samples * (height + pad) * (width + pad) * channels * (2 if augment.flip else 1)

    def gather(self, share: Share) -> Tensor:
        """The augmented images of a micro-batch: uint8 (batch, height, width, channels)."""
        images = self.crops(share)
        if not self._augment.changes:
            return images
        return self._augment.change_on_host(images, self._seed, share.epoch, share.indices)

    def crops(self, share: Share) -> Tensor:
        """Those images cropped and mirrored, and not changed otherwise."""
        if share.epoch != self._epoch:
            everything = np.arange(self._size)
            top, left, flipped = self._augment.draw(self._seed, share.epoch, everything)
            self._corners = self._windows.corners(everything + flipped * self._size, top, left)
            self._epoch = share.epoch
        return torch.from_numpy(self._windows.gather(self._corners[share.indices]))


class RowWindows:
    """Crops out of padded images, row by row.

    Args:
        padded: uint8 (slots, padded height, padded width, channels), contiguous.
        shape: of a crop: (height, width, channels).
    """

    def __init__(self, padded: Bytes, shape: tuple[int, ...]) -> None:
        _, padded_height, padded_width, channels = padded.shape
        height, width, _ = shape
        self._shape = shape
        self._row_bytes, self._channels = padded_width * channels, channels
        self._slot_bytes = padded_height * self._row_bytes
        # Without padding to the sides the rows of a crop follow one another: one run holds them all.
        self._rows_per_run = height if width == padded_width else 1
        run_bytes = self._rows_per_run * width * channels
        self._run_offsets = np.arange(0, height, self._rows_per_run) * self._row_bytes
        # One opaque item per run, at every byte: numpy copies items twice as fast as rows of bytes.
        self._runs = np.ndarray(
            (padded.size - run_bytes + 1,), np.dtype(f"V{run_bytes}"), padded.reshape(-1), strides=(1,)
        )

    def corners(self, slots: Indices, top: Indices, left: Indices) -> Indices:
        """Where the crops of `slots` at (`top`, `left`) begin in memory."""
        return slots * self._slot_bytes + top * self._row_bytes + left * self._channels

    def gather(self, corners: Indices) -> Bytes:
        """The crops that begin at `corners`."""
        runs = self._runs[corners[:, None] + self._run_offsets]
        return runs.view(np.uint8).reshape(len(corners), *self._shape)


def _pad(
    pixels: Bytes,
    padding: int,
    holder: Holder | None = None,
    *,
    mirrored: bool = False,
    outside: Bytes | None = None,
) -> Bytes:
    samples, height, width, channels = pixels.shape
    copies = 2 if mirrored else 1
    inside = (slice(None), slice(padding, padding + height), slice(padding, padding + width))

    def fill(padded: Bytes) -> None:
        if outside is not None and padding:
            padded[:] = outside
        padded[0][inside] = pixels
        if mirrored:
            padded[1][inside] = pixels[:, :, ::-1]

    shape = (copies, samples, height + 2 * padding, width + 2 * padding, channels)
    padded, _ = (holder or Holder()).fill(shape, fill)
    return padded.reshape(copies * samples, *padded.shape[2:])
