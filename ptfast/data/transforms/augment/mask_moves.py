"""Targets that say something of each pixel, moved with their images: the nearest pixel, never a mixture."""

from __future__ import annotations

import torch
from torch import Tensor

from ptfast.data.label_checks import holds
from ptfast.data.loaders.shared_memory import Holder
from ptfast.data.sampling.sampler import Share
from ptfast.data.transforms.augment.augment_plan import Augment
from ptfast.data.transforms.augment.row_windows import AugmentedImages, Bytes, crop_and_flip
from ptfast.data.transforms.resized_crops import Sizes, box_edges


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
