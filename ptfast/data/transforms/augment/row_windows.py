"""Random crops and flips on the host, as gathers of rows of bytes, and the same moves for masks."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.data.label_checks import holds
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.sampler import Indices, Share
from ptfast.data.transforms.augment.augment_plan import Augment
from ptfast.data.transforms.resized_crops import Sizes, box_edges

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


def moved(augment: Augment, targets: Tensor, seed: int, share: Share) -> Tensor:
    """Targets of one micro-batch, moved as `augmented` moves their images; others than masks as they are.

    Args:
        targets: (batch, height, width) or (batch, 1, height, width) where they are masks.
    """
    if augment.mask_fill is None:
        return targets
    masks = planes(augment, targets)
    if augment.moves:
        outside = _bytes_of(augment, masks)
        masks = _as_masks(crop_and_flip(augment, _as_bytes(masks), seed, share, outside), masks.dtype)
    return _changed(augment, masks, seed, share).reshape(targets.shape)


def moved_by_crops(
    augment: Augment, targets: Tensor, sizes: tuple[Sizes, Sizes], seed: int, share: Share
) -> Tensor:
    """Targets of one micro-batch, of the boxes that `cropped` cuts out of their images; as `moved`.

    Args:
        sizes: heights and widths of the images as they were before they were stored.
    """
    if augment.mask_fill is None:
        return targets
    masks, size = planes(augment, targets), augment.size
    boxes = augment.draw_boxes(seed, share.epoch, share.indices, sizes)
    flipped = augment.draw(seed, share.epoch, share.indices)[2]
    height, width = masks.shape[1:]
    top, bottom, left, right = torch.from_numpy(box_edges(boxes, height, width))
    masks = cut_masks(masks, top, bottom, left, right, torch.from_numpy(flipped), size)
    return _changed(augment, masks, seed, share).reshape(*targets.shape[:-2], size, size)


class AugmentedMasks:
    """Masks in memory, gathered as `AugmentedImages` gathers their images.

    Args:
        targets: (samples, height, width) or (samples, 1, height, width).
        holder: of the padded copies; None for this process.
    """

    def __init__(self, targets: Tensor, augment: Augment, seed: int, holder: Holder | None = None) -> None:
        masks = planes(augment, targets)
        self._augment, self._seed = augment, seed
        self._shape, self._dtype = targets.shape[1:], masks.dtype
        outside = _bytes_of(augment, masks)
        self._copies = AugmentedImages(_as_bytes(masks), augment, seed, holder, outside)

    @staticmethod
    def nbytes(targets: Tensor, augment: Augment) -> int:
        """Bytes that the padded copies of `targets` take."""
        return AugmentedImages.nbytes(_as_bytes(planes(augment, targets)), augment)

    def gather(self, share: Share) -> Tensor:
        """The masks of a micro-batch, moved as their images are."""
        masks = _as_masks(self._copies.crops(share), self._dtype)
        return _changed(self._augment, masks, self._seed, share).reshape(-1, *self._shape)


def planes(augment: Augment, targets: Tensor) -> Tensor:
    """Masks as (samples, height, width), of a type that holds `augment.mask_fill` where that is needed."""
    assert augment.mask_fill is not None
    masks = targets.reshape(len(targets), *targets.shape[-2:])
    if not augment.hides or holds(masks.dtype, augment.mask_fill):
        return masks
    return masks.to(torch.int16 if holds(torch.int16, augment.mask_fill) else torch.int64)


def cut_masks(
    masks: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, flipped: Tensor, size: int
) -> Tensor:
    """Boxes of masks, scaled to squares and mirrored then where `flipped` is 1.

    Args:
        masks: (batch, height, width).
        top, bottom, left, right: int64 (batch,): first row of a box and the row behind it, columns likewise.
        size: side of a square.
    """
    rows, columns = _nearest(top, bottom, size), _nearest(left, right, size)
    columns = torch.where(flipped[:, None] > 0, columns.flip(1), columns)
    samples = torch.arange(len(masks), device=masks.device)
    return masks[samples[:, None, None], rows[:, :, None], columns[:, None, :]]


def _nearest(start: Tensor, end: Tensor, size: int) -> Tensor:
    """The pixels of lines from `start` to `end` under the centres of `size` that stand for them."""
    places = 2 * torch.arange(size, device=start.device) + 1
    return start[:, None] + torch.div(places * (end - start)[:, None], 2 * size, rounding_mode="floor")


def _changed(augment: Augment, masks: Tensor, seed: int, share: Share) -> Tensor:
    if not augment.bends and not augment.cutout:
        return masks
    height, width = masks.shape[1:]
    drawn = augment.draw_changes(seed, share.epoch, share.indices, (height, width))
    return augment.change_masks(masks, {name: torch.from_numpy(values) for name, values in drawn.items()})


def _as_bytes(masks: Tensor) -> Tensor:
    """Masks as images, of as many channels as a label has bytes."""
    return masks.contiguous()[..., None].view(torch.uint8)


def _as_masks(images: Tensor, dtype: torch.dtype) -> Tensor:
    return images.view(dtype)[..., 0]


def _bytes_of(augment: Augment, masks: Tensor) -> Bytes:
    """The label of what comes from outside, in bytes; of a type that cannot hold it nothing does."""
    fill = augment.mask_fill if augment.hides else 0
    return _as_bytes(masks.new_full((1, 1, 1), fill or 0)).flatten().numpy()
