"""The loader `device`: the data lies where the model is, and batches are gathered and augmented there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, MachineError
from ptfast.core.machine import available_memory
from ptfast.core.units import num_bytes
from ptfast.data.loaders.loading import Prepare
from ptfast.data.loaders.step_batches import ChunkedBatches
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sampling.sampler import Sampler, Share
from ptfast.data.sources.image_files import HeldImages
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.resized_crops import box_edges, draw_boxes
from ptfast.data.transforms.row_windows import cut_masks, padded_bytes, planes, reflected


class ResidentImages:
    """Images on a device, with `padding` of the value `fill`, out of which batches are gathered and cropped.

    With `reflect`, images continue mirrored beyond their edges instead. They are (samples, height, width,
    channels), and uint8 except for masks. Mirroring takes no memory.
    """

    def __init__(self, images: Tensor, padding: int, fill: int = 0, *, reflect: bool = False) -> None:
        samples, height, width, channels = images.shape
        if reflect:
            for dim, length in ((1, height), (2, width)):
                index = as_tensor(reflected(length, padding)).to(images.device)
                images = images.index_select(dim, index)
        elif padding:
            padded = images.new_full((samples, height + 2 * padding, width + 2 * padding, channels), fill)
            padded[:, padding : padding + height, padding : padding + width] = images
            images = padded
        self._samples, self._last_column = images, images.shape[2] - 1
        self._padded_height = images.shape[1]
        # Rows of all images one below the other: an image's number and a row in it are one index.
        self._rows = images.reshape(-1, *images.shape[2:])
        self._down = torch.arange(height, device=images.device)
        self._across = torch.arange(width, device=images.device)

    def gather(self, index: Tensor, corners: Sequence[Tensor] = ()) -> Tensor:
        """The images `index`, (batch, height, width, channels): crops of them, or without `corners` whole.

        `corners` are top and left in the padded images, and 1 where they are mirrored first.
        """
        if not corners:
            return self._samples.index_select(0, index)
        top, left, flipped = corners
        rows = (index * self._padded_height + top)[:, None] + self._down
        columns = left[:, None] + self._across
        # Column x of the mirror image is the one as far from the other end.
        columns = torch.where(flipped[:, None] > 0, self._last_column - columns, columns)
        return self._rows[rows[:, :, None], columns[:, None, :]]

    def cut(
        self,
        index: Tensor,
        top: Tensor,
        bottom: Tensor,
        left: Tensor,
        right: Tensor,
        flipped: Tensor,
        size: int,
    ) -> Tensor:
        """Boxes of the images `index`, scaled to squares and then mirrored where `flipped` is 1.

        A box ends before `bottom` and `right`. Its pixels are summed by weights, across and then down, as
        products of matrices, one for each image: boxes of any sizes are one operation. Pixels are those of
        `resized_crops.resized_crop`, except for a rare step of 1, or of 2 where products are of tf32.
        """
        images = self.gather(index)
        batch, height, width, channels = images.shape
        across, down = _weights(left, right, width, size), _weights(top, bottom, height, size)
        across = torch.where(flipped[:, None, None] > 0, across.flip(1), across)
        columns = images.transpose(1, 2).reshape(batch, width, height * channels).float()
        # Bytes in between, as there.
        narrow = (across @ columns).add_(0.5).floor_().clamp_(max=255).view(batch, size, height, channels)
        rows = narrow.transpose(1, 2).reshape(batch, height, size * channels)
        return (down @ rows).add_(0.5).clamp_(max=255).to(torch.uint8).view(batch, size, size, channels)


def _weights(start: Tensor, end: Tensor, length: int, size: int) -> Tensor:
    """Weights of each pixel of a line in each of `size` that stand for its part from `start` to `end`.

    Bilinear and antialiased: a triangle around the centre, as wide as two of the coarser pixels. As where
    torch resizes bytes on a CPU, weights are multiples of a power of 2 in 15 bits: sums of float32 are exact.
    """
    start, end = start[:, None, None], end[:, None, None]
    scale = (end - start).double() / size
    centres = start + scale * (torch.arange(size, device=start.device)[:, None] + 0.5)
    pixels = torch.arange(length, device=start.device)
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = weights * ((start <= pixels) & (pixels < end))
    weights /= weights.sum(2, keepdim=True)
    step = torch.exp2(1 - torch.ceil(torch.log2((2**15 - 0.5) / weights.amax((1, 2), keepdim=True))))
    return (weights / step).add_(0.5).floor_().mul_(step).float()


MOST_OF_MEMORY = 0.5
"""Share of the device's free memory that the data may take."""


class DeviceBatches(ChunkedBatches):
    """Batches of data that lives on the training device.

    At the start of an epoch its order and all random draws go to the device, ten to a hundred bytes a sample.
    From then on the host only launches kernels: no pixel crosses the bus, and the host's cores do not
    augment. Draws are those of the other loaders, and pixels the same up to the rounding of turned and scaled
    images.

    Cost: the memory of the samples as they are stored (images with their padding), and that of some batches.
    Source: as in Keller Jordan's airbench, which has CIFAR-10 on the device.
    """

    def __init__(self, sampler: Sampler, prepare: Prepare, source: MapSource, augment: Augment) -> None:
        hint = "Use dataloader=memory, which copies batches step by step"
        self._augment, self._sizes = augment, source.sizes
        if isinstance(source, HeldImages):
            source = source.in_one_size()
        if not isinstance(source, TensorSource):
            what = "only samples of one shape can be kept on the device; these are collated batch by batch"
            hint = "Use dataloader=auto"
            raise ConfigError("C011", what, key="dataloader.kind", value="device", suggestion=hint)
        needed = padded_bytes(augment, source) if source.images else source.inputs.nbytes
        needed += source.targets.nbytes if augment.mask_fill is None else 0
        free = free_bytes(prepare.device)
        if needed > MOST_OF_MEMORY * free:
            where = f"{prepare.device.type}, which has {num_bytes(free)} free"
            what = f"the data takes {num_bytes(needed)} on {where}"
            raise MachineError("E005", what, key="dataloader.kind", value="device", suggestion=hint)
        # Pinning would round sizes up to a power of two and keep that memory: the driver copies in pieces.
        inputs, targets = source.inputs.to(prepare.device), source.targets.to(prepare.device)
        width = 4 if source.images else inputs.element_size()
        super().__init__(sampler, prepare, inputs[0].numel() * width)
        padded = partial(ResidentImages, padding=augment.crop_padding, reflect=augment.reflects)
        self._inputs = padded(inputs) if source.images else inputs
        self._shape = (inputs.shape[1], inputs.shape[2]) if source.images else (0, 0)
        self._target_shape = targets.shape[1:]
        self._targets: ResidentImages | Tensor = targets
        if augment.mask_fill is not None:
            masks, fill = planes(augment, targets)[..., None], augment.mask_fill if augment.hides else 0
            self._targets = padded(masks, fill=fill)
        self._epoch = -1

    def _planned(self, start: int, stop: int) -> list[tuple[list[Share], int]]:
        epoch, first, end = self.sampler.plan.epoch_of(start)
        if epoch != self._epoch:
            # The order of the epoch and its draws go to the device.
            self._plan, self._first, self._epoch = super()._planned(first, end), first, epoch
            index = np.concatenate([share.indices for shares, _ in self._plan for share in shares])
            lengths = [sum(len(share.indices) for share in shares) for shares, _ in self._plan]
            self._begins = np.cumsum([0, *lengths]).tolist()
            augment, whole, shape = self._augment, Share(epoch, index, len(index)), self._shape
            corners = [*augment.draw(whole)] if augment.moves else []
            if augment.resized_crop is not None:
                ranges = augment.resized_crop, augment.resized_ratio
                boxes = draw_boxes(augment.seed, epoch, index, *self._sizes(index), *ranges)
                edges = box_edges(boxes, *shape)
                shape, corners = (augment.size, augment.size), [*edges, corners[2]]
            self._index = self._prepare.move(as_tensor(index))
            self._corners = [self._prepare.move(as_tensor(each)) for each in corners]
            drawn = augment.draw_changes(whole, shape)
            self._drawn = {name: self._prepare.move(as_tensor(value)) for name, value in drawn.items()}
        return self._plan[start - first : stop - first]

    def _gather(self, shares: list[Share], first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        sizes, augment = [len(share.indices) for share in shares], self._augment
        begin = self._begins[first_step - self._first]
        part = slice(begin, begin + sum(sizes))
        index, corners = self._index[part], [each[part] for each in self._corners]
        drawn = {name: each[part] for name, each in self._drawn.items()}
        if isinstance(self._inputs, Tensor):
            inputs = self._inputs.index_select(0, index)
        elif augment.resized_crop is not None:
            inputs = self._inputs.cut(index, *corners, size=augment.size)
        else:
            inputs = self._inputs.gather(index, corners)
        inputs = self._prepare.laid_out(augment.change(inputs, drawn))
        if isinstance(self._targets, Tensor):
            targets = self._targets.index_select(0, index)
        else:
            if augment.resized_crop is not None:
                masks = cut_masks(self._targets.gather(index)[..., 0], *corners, size=augment.size)
            else:
                masks = self._targets.gather(index, corners)[..., 0]
            masks = augment.change_masks(masks, drawn)
            targets = masks.reshape(len(index), *self._target_shape[:-2], *masks.shape[1:])
        return zip(inputs.split(sizes), targets.split(sizes), strict=True)


def free_bytes(device: torch.device) -> int:
    """Free memory of `device`; that of the machine for a CPU or an Apple GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
