"""Random crops and flips on the host, as gathers of rows of bytes, and the same moves for masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.data.label_checks import can_hold
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sampling.sampler import Indices, MicroBatchIndices
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.resized_crops import box_edges, draw_boxes

Bytes = NDArray[np.uint8]


def augmented(augment: Augment, raw: Any, micro_batch: MicroBatchIndices) -> Any:
    """Augment a raw batch `(images, targets, ...)` as drawn for `micro_batch`, with targets that are masks.

    Images are uint8 (batch, height, width, channels); masks are (batch, height, width), or with a channel.
    """
    images, targets, *others = raw
    masks = None if augment.mask_fill is None else planes(augment, targets)
    if augment.moves:
        drawn = augment.draw(micro_batch)
        images = _crop_and_flip(augment, images, drawn)
        if masks is not None:
            masks = _crop_and_flip(augment, masks[..., None], drawn, augment.mask_fill or 0)[..., 0]
    images, masks = augment.change_batch(images, masks, micro_batch)
    return images, targets if masks is None else masks.reshape(targets.shape), *others


def cropped(
    augment: Augment, source: MapSource, micro_batch: MicroBatchIndices, places: Indices
) -> tuple[Tensor, Tensor]:
    """Return the raw batch of `micro_batch`, cropped and resized; its samples are `places` of `source`.

    Images are uint8 (batch, side, side, channels).
    """
    size = augment.size
    assert augment.resized_crop is not None
    ranges = augment.resized_crop, augment.resized_ratio
    boxes = draw_boxes(augment.seed, micro_batch.epoch, micro_batch.indices, *source.sizes(places), *ranges)
    flipped = augment.draw(micro_batch)[2]
    images, targets = source.crops(places, boxes, size, flipped), source.labels(places)
    masks = None
    if augment.mask_fill is not None:
        masks = planes(augment, targets)
        height, width = masks.shape[1:]
        top, bottom, left, right = torch.from_numpy(box_edges(boxes, height, width))
        masks = cut_masks(masks, top, bottom, left, right, torch.from_numpy(flipped), size)
    images, masks = augment.change_batch(images, masks, micro_batch)
    return images, targets if masks is None else masks.reshape(*targets.shape[:-2], size, size)


class MemoryBatches:
    """Gathers augmented batches, with their masks, directly from padded images in memory.

    Padded images and their mirrored copies are channels last, so each row of a crop is one run of bytes, and
    a batch is one gather of rows.

    Cost: memory for the padded images, twice if they are flipped; 1 to 2 us per 32x32 image.
    """

    def __init__(self, source: TensorSource, augment: Augment, arrays: SharedArrays | None = None) -> None:
        self._augment, self._targets = augment, source.targets
        padding, more = augment.crop_padding, {"mirrored": bool(augment.flip), "reflect": augment.reflects}
        self._windows = [RowWindows(source.inputs, padding, **more, arrays=arrays)]
        if augment.mask_fill is not None:
            masks, fill = planes(augment, source.targets)[..., None], augment.mask_fill
            self._windows.append(RowWindows(masks, padding, **more, fill=fill, arrays=arrays))
        self._epoch, self._corners = -1, list[Indices]()

    def __call__(self, micro_batch: MicroBatchIndices) -> Any:
        if micro_batch.epoch != self._epoch:
            everything = np.arange(len(self._targets))
            top, left, flipped = self._augment.draw(
                MicroBatchIndices(micro_batch.epoch, everything, len(everything))
            )
            slots = everything + flipped * len(everything)
            self._corners = [windows.corners(slots, top, left) for windows in self._windows]
            self._epoch = micro_batch.epoch
        images, *masks = [
            windows.gather(corners[micro_batch.indices])
            for windows, corners in zip(self._windows, self._corners, strict=True)
        ]
        if not masks:
            targets = self._targets.index_select(0, as_tensor(micro_batch.indices))
            return self._augment.change_batch(images, None, micro_batch)[0], targets
        images, changed = self._augment.change_batch(images, masks[0][..., 0], micro_batch)
        assert changed is not None
        return images, changed.reshape(-1, *self._targets.shape[1:])


def _crop_and_flip(
    augment: Augment, images: Tensor, drawn: tuple[Indices, Indices, Indices], fill: int = 0
) -> Tensor:
    """Flip, then crop images as `drawn` by `Augment.draw`, with `fill` outside."""
    top, left, flipped = drawn
    if augment.flip:
        pixels, mirror = images.numpy().copy(), flipped.astype(bool)
        pixels[mirror] = pixels[mirror, :, ::-1]
        images = torch.from_numpy(pixels)
    if not augment.crop_padding:
        return images
    windows = RowWindows(images, augment.crop_padding, fill=fill, reflect=augment.reflects)
    return windows.gather(windows.corners(np.arange(len(images)), top, left))


class RowWindows:
    """Crops of padded images, row by row: integers of any type, (samples, height, width, channels).

    Args:
        mirrored: keep mirrored copies behind the images, as slots `samples` to `2 * samples`.
        fill: the value of the padding.
        reflect: pad with the pixels inside, mirrored at the edges.
    """

    def __init__(
        self,
        images: Tensor,
        padding: int,
        *,
        mirrored: bool = False,
        fill: int = 0,
        reflect: bool = False,
        arrays: SharedArrays | None = None,
    ) -> None:
        self._shape, self._dtype = images.shape[1:], images.numpy().dtype
        padded = pixels = images.contiguous().view(torch.uint8).numpy()
        samples, height, width, channels = pixels.shape
        if padding or mirrored:
            inside = (slice(None), slice(padding, padding + height), slice(padding, padding + width))

            def write(padded: Bytes) -> None:
                if reflect:
                    rows, columns = reflected(height, padding), reflected(width, padding)
                    for copy, order in zip(padded, (columns, columns[::-1]), strict=False):
                        np.take(np.take(pixels, rows, 1), order, 2, out=copy)
                    return
                if fill and padding:
                    padded[:] = images.new_full((images.shape[3],), fill).view(torch.uint8).numpy()
                padded[0][inside] = pixels
                if mirrored:
                    padded[1][inside] = pixels[:, :, ::-1]

            copies = (2 if mirrored else 1, samples, height + 2 * padding, width + 2 * padding, channels)
            padded = (arrays or SharedArrays()).fill(copies, write)[0].reshape(-1, *copies[2:])
        padded_height, padded_width = padded.shape[1:3]
        self._pixel_bytes, self._row_bytes = channels, padded_width * channels
        self._slot_bytes = padded_height * self._row_bytes
        # Without padding at the sides, the rows of a crop are contiguous: one run contains them all.
        rows_per_run = height if width == padded_width else 1
        run_bytes = rows_per_run * width * channels
        self._run_offsets = np.arange(0, height, rows_per_run) * self._row_bytes
        # One opaque item per run, at every byte: numpy copies items twice as fast as rows of bytes.
        self._runs = np.ndarray(
            (padded.size - run_bytes + 1,), np.dtype(f"V{run_bytes}"), padded.reshape(-1), strides=(1,)
        )

    def corners(self, slots: Indices, top: Indices, left: Indices) -> Indices:
        """Return the byte offsets of the crops of `slots` at (`top`, `left`)."""
        return slots * self._slot_bytes + top * self._row_bytes + left * self._pixel_bytes

    def gather(self, corners: Indices) -> Tensor:
        runs = self._runs[corners[:, None] + self._run_offsets]
        return torch.from_numpy(runs.view(self._dtype).reshape(len(corners), *self._shape))


def reflected(length: int, padding: int) -> Indices:
    """Return the source of each pixel of a padded line that is mirrored at its ends."""
    return np.pad(np.arange(length), padding, "reflect")


def padded_bytes(augment: Augment, source: TensorSource) -> int:
    """Return the bytes of the padded images, and of their masks if those are changed."""
    stored, pad = [source.inputs], 2 * augment.crop_padding
    if augment.mask_fill is not None:
        stored.append(planes(augment, source.targets)[..., None])
    return sum(
        len(images) * (images.shape[1] + pad) * (images.shape[2] + pad) * images[0, 0, 0].nbytes
        for images in stored
    )


def planes(augment: Augment, targets: Tensor) -> Tensor:
    """Return masks as (samples, height, width), in a type that can represent `mask_fill` if needed."""
    assert augment.mask_fill is not None
    masks = targets.reshape(len(targets), *targets.shape[-2:])
    if not augment.hides or can_hold(masks.dtype, augment.mask_fill):
        return masks
    return masks.to(torch.int16 if can_hold(torch.int16, augment.mask_fill) else torch.int64)


def cut_masks(
    masks: Tensor, top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, flipped: Tensor, size: int
) -> Tensor:
    """Crop boxes of masks, scale them to squares by the nearest pixel, then mirror them."""
    # Take the pixel at the center of each of `size` equal parts of a line from start to end.
    places = 2 * torch.arange(size, device=masks.device) + 1
    rows, columns = (
        start[:, None] + torch.div(places * (end - start)[:, None], 2 * size, rounding_mode="floor")
        for start, end in ((top, bottom), (left, right))
    )
    columns = torch.where(flipped[:, None] > 0, columns.flip(1), columns)
    samples = torch.arange(len(masks), device=masks.device)
    return masks[samples[:, None, None], rows[:, :, None], columns[:, None, :]]
