"""The loader `device`: the data stays on the model's device, where batches are gathered and augmented."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptfast.core.errors import ConfigError, MachineError, summary_of
from ptfast.core.machine import available_memory
from ptfast.core.units import num_bytes
from ptfast.data.loaders.pipeline import CHUNK_BYTES, ChunkedBatches, Prepare
from ptfast.data.map_source import MapSource, TensorSource, as_tensor
from ptfast.data.sampling.sampler import Indices, MicroBatchIndices, Sampler
from ptfast.data.transforms.augment_plan import Augment
from ptfast.data.transforms.row_windows import padded_bytes, planes, reflected


class ResidentImages:
    """Images on a device, padded with the value `fill`, from which batches are gathered and cropped.

    One view of the memory contains the crops that start at each pixel; they overlap. So a batch needs one
    index per image and is gathered in one pass.

    Args:
        images: (samples, height, width, channels), uint8 except for masks.
        reflect: pad by reflection instead.
        flips: some crops are mirrored.
        ready: converts uint8 images as above to floats, channels first. It is applied once to all images
            instead of to each batch, and mirrored copies are then stored, too.
        planes: store crops channel by channel, not pixel by pixel.
    """

    def __init__(
        self,
        images: Tensor,
        padding: int,
        fill: int = 0,
        *,
        reflect: bool = False,
        flips: bool = False,
        ready: Callable[[Tensor], Tensor] | None = None,
        planes: bool = False,
    ) -> None:
        samples, height, width, channels = images.shape
        if reflect:
            for dim, length in ((1, height), (2, width)):
                index = as_tensor(reflected(length, padding)).to(images.device)
                images = images.index_select(dim, index)
        elif padding:
            padded = images.new_full((samples, height + 2 * padding, width + 2 * padding, channels), fill)
            padded[:, padding : padding + height, padding : padding + width] = images
            images = padded
        down, across = images.shape[1:3]
        self._copies = samples if flips and ready is not None else 0
        self._flips, self._planes, self._last_left = flips and ready is None, planes, across - width
        if ready is not None or planes:
            convert = ready or (lambda part: part.permute(0, 3, 1, 2))
            stored = torch.empty(
                (samples + self._copies, channels, down, across),
                dtype=convert(images[:1]).dtype,
                device=images.device,
                memory_format=torch.contiguous_format if planes else torch.channels_last,
            )
            at_once = max(1, CHUNK_BYTES // (4 * images[0].numel()))
            for start in range(0, samples, at_once):
                part = convert(images[start : start + at_once])
                stored[start : start + len(part)] = part
                if self._copies:
                    stored[samples + start : samples + start + len(part)] = part.flip(3)
            images = stored
        else:
            images = images.contiguous()
        # The start of a crop is counted in pixels, or with `planes` in values.
        step = 1 if planes else channels
        self._slot, self._row = images[0].numel() // step, across
        shape = (channels, height, width) if planes else (height, width, channels)
        strides = (down * across, across, 1) if planes else (across * channels, channels, 1)
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        self._crops = images.as_strided(((images.numel() - 1 - reach) // step + 1, *shape), (step, *strides))

    def places(self, index: Tensor, corners: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return the arguments of `gather` for crops of the images `index`; whole images without `corners`.

        `corners` are top and left in the padded images, and 1 for images that are mirrored first.
        """
        if not corners:
            return (index * self._slot,)
        top, left, flipped = corners
        if self._flips:
            left = torch.where(flipped > 0, self._last_left - left, left)
        starts = (index + flipped * self._copies) * self._slot + top * self._row + left
        return (starts, flipped) if self._flips else (starts,)

    @property
    def crops(self) -> Tensor:
        """A view of the crops at all places, (places, height, width, channels); they overlap."""
        return self._crops.permute(0, 2, 3, 1) if self._planes else self._crops

    def gather(self, starts: Tensor, flipped: Tensor | None = None) -> Tensor:
        """Return the crops at some of the `places`, (batch, height, width, channels), by 1 or 4 kernels."""
        images = self._crops[starts]
        if self._planes:
            images = images.permute(0, 2, 3, 1)
        if flipped is None:
            return images
        return torch.where(flipped[:, None, None, None] > 0, images.flip(2), images)


MOST_OF_MEMORY = 0.5
"""Maximum share of the device's free memory for the data."""
TRIED = 64
"""Number of images on which a fused kernel must be bit-identical to the separate operators."""
READY_SHARE = 0.125
"""Maximum share for data normalized up front; larger data is normalized batch by batch."""


class DeviceBatches(ChunkedBatches):
    """Batches of data that is kept on the training device.

    At the start of an epoch, its order and all random draws are copied to the device: 10 to 100 bytes per
    sample. After that the host only launches kernels: it neither copies nor augments pixels. The random
    draws are the same as in the other loaders, and so are the pixels, except for rounding in rotated and
    scaled images.

    If images are only cropped, mirrored or masked by a box, and memory allows, they are normalized and cast
    before the first step, because these changes only move pixels. A batch is then one gather.

    Cost: memory for the stored samples (images with their padding) and for some batches; images that are
    normalized up front take at most an eighth of the free memory.
    Source: Keller Jordan's airbench, which keeps CIFAR-10 on the device.
    """

    def __init__(self, sampler: Sampler, prepare: Prepare, source: MapSource, augment: Augment) -> None:
        hint = "Use dataloader=memory, which copies batches step by step"
        self._augment = augment
        if not isinstance(source, TensorSource):
            what = "only samples of one shape can be kept on the device; these are collated batch by batch"
            hint = "Use dataloader=auto"
            raise ConfigError("C011", what, key="dataloader.kind", value="device", suggestion=hint)
        pixel_bytes = padded_bytes(augment, source) if source.images else 0
        needed = pixel_bytes or source.inputs.nbytes
        needed += source.targets.nbytes if augment.mask_fill is None else 0
        free = free_bytes(prepare.device)
        if needed > MOST_OF_MEMORY * free:
            where = f"{prepare.device.type}, which has {num_bytes(free)} free"
            what = f"the data takes {num_bytes(needed)} on {where}"
            raise MachineError("E005", what, key="dataloader.kind", value="device", suggestion=hint)
        # Pinning rounds sizes up to a power of two and keeps that memory; the driver copies in pieces.
        inputs, targets = source.inputs.to(prepare.device), source.targets.to(prepare.device)
        width = prepare.input_type.itemsize if source.images else inputs.element_size()
        super().__init__(sampler, prepare, inputs[0].numel() * width)
        self._shape = (inputs.shape[1], inputs.shape[2]) if source.images else (0, 0)
        self._target_shape = targets.shape[1:]
        self._inputs: ResidentImages | Tensor = inputs
        self._targets: ResidentImages | Tensor = targets
        padded = partial(
            ResidentImages, padding=augment.crop_padding, reflect=augment.reflects, flips=bool(augment.flip)
        )
        filters = augment.changes - {"color", "erased"}
        ready_bytes = pixel_bytes * width * (2 if augment.flip else 1)
        moved_alone = source.images and not filters and "color" not in augment.changes
        self._ready = moved_alone and ready_bytes <= READY_SHARE * free
        if self._ready and "erased" in augment.changes:
            color = torch.tensor(augment.fill or [0] * inputs.shape[3], dtype=torch.uint8)
            fill = prepare.inputs(color.view(1, 1, 1, -1)).flatten().tolist()
            self._augment = augment.model_copy(update={"fill": tuple(fill)})
        if source.images:
            ready = prepare.laid_out if self._ready else None
            self._inputs = padded(inputs, ready=ready, planes=not prepare.channels_last)
        if augment.mask_fill is not None:
            masks, fill = planes(augment, targets)[..., None], augment.mask_fill if augment.hides else 0
            self._targets = padded(masks, fill=fill)
        self._kernel: Callable[..., Tensor] | None = None
        self.unfused = ""
        """Why there is no kernel, if there should be one."""
        # Resized, moved or filtered images need tens of operators before any that the kernel could fuse.
        if prepare.fuses and not filters and ("erased" in augment.changes or not self._ready):
            self._kernel = self._build_kernel(inputs.shape[3], min(len(inputs), TRIED))
        self._places = self._mask_places = tuple[Tensor, ...]()
        self._epoch = -1

    @property
    def fused(self) -> bool:
        """Whether one fused kernel makes a batch of images."""
        return self._kernel is not None

    def _planned(self, start: int, stop: int) -> list[tuple[list[MicroBatchIndices], int]]:
        epoch, first, end = self.sampler.plan.epoch_of(start)
        if epoch != self._epoch:
            self._begin_epoch(epoch, super()._planned(first, end))
            self._epoch, self._first_step = epoch, first
        return self._epoch_steps[start - first : stop - first]

    def _begin_epoch(self, epoch: int, steps: list[tuple[list[MicroBatchIndices], int]]) -> None:
        """Copy an epoch's sample order and random draws to the device."""
        move = self._prepare.move
        indices = np.concatenate([each.indices for micro_batches, _ in steps for each in micro_batches])
        sizes = [sum(len(each.indices) for each in micro_batches) for micro_batches, _ in steps]
        self._epoch_steps, self._first_samples = steps, np.cumsum([0, *sizes]).tolist()
        corners, drawn = self._draws(epoch, indices)
        self._index, corners = move(as_tensor(indices)), [move(as_tensor(each)) for each in corners]
        # Policy draws stay on the host, which groups images by operation.
        self._drawn = {
            name: as_tensor(each) if name == "policy" else move(as_tensor(each))
            for name, each in drawn.items()
        }
        if isinstance(self._inputs, ResidentImages):
            self._places = self._inputs.places(self._index, corners)
        if isinstance(self._targets, ResidentImages):
            self._mask_places = self._targets.places(self._index, corners)

    def _draws(self, epoch: int, index: Indices) -> tuple[list[Indices], dict[str, NDArray[Any]]]:
        """Return the crop corners of the samples `index` in an epoch, and the draws for their changes."""
        augment, whole = self._augment, MicroBatchIndices(epoch, index, len(index))
        corners = [*augment.draw(whole)] if augment.moves else []
        return corners, augment.draw_changes(whole, self._shape)

    def _gather(
        self, micro_batches: list[MicroBatchIndices], first_step: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        sizes, augment = [len(micro_batch.indices) for micro_batch in micro_batches], self._augment
        begin = self._first_samples[first_step - self._first_step]
        part = slice(begin, begin + sum(sizes))
        index, places = self._index[part], [each[part] for each in self._places]
        drawn = {name: each[part] for name, each in self._drawn.items()}
        if isinstance(self._inputs, Tensor):
            inputs = self._prepare.laid_out(augment.change(self._inputs.index_select(0, index), drawn))
        else:
            inputs = self._changed(self._inputs, places, drawn, self._kernel)
        if isinstance(self._targets, Tensor):
            targets = self._targets.index_select(0, index)
        else:
            masks = self._targets.gather(*(each[part] for each in self._mask_places))[..., 0]
            masks = augment.change_masks(masks, drawn)
            targets = masks.reshape(len(index), *self._target_shape[:-2], *masks.shape[1:])
        return zip(inputs.split(sizes), targets.split(sizes), strict=True)

    def _changed(
        self,
        stored: ResidentImages,
        places: Sequence[Tensor],
        drawn: dict[str, Tensor],
        kernel: Callable[..., Tensor] | None,
    ) -> Tensor:
        """Return a batch of images ready for the model, by `kernel` or by separate operators."""
        if kernel is not None:
            return kernel(stored.crops, *places, drawn=drawn)
        images = self._augment.change(stored.gather(*places), drawn)
        return images.permute(0, 3, 1, 2) if self._ready else self._prepare.laid_out(images)

    def _build_kernel(self, channels: int, num_samples: int) -> Callable[..., Tensor] | None:
        """Compile one kernel for `_changed`; None if that fails or its output is not bit-identical."""
        stored, prepare = self._inputs, self._prepare
        assert isinstance(stored, ResidentImages)
        numbers = np.arange(num_samples)
        index, (corners, changes) = prepare.move(as_tensor(numbers)), self._draws(0, numbers)
        places = stored.places(index, [prepare.move(as_tensor(corner)) for corner in corners])
        drawn = {name: prepare.move(as_tensor(values)) for name, values in changes.items()}
        try:
            from ptfast.data.transforms.image_kernel import build_kernel

            mean_and_factor = None if self._ready else prepare.mean_and_factor
            how = {"dtype": prepare.input_type, "layout": prepare.layout}
            kernel = build_kernel(self._augment, mean_and_factor, channels, prepare.device, **how)
            changed = (self._changed(stored, places, drawn, each) for each in (kernel, None))
            if torch.equal(*changed):
                return kernel
            self.unfused = "it gives other bits here"
        except ImportError:
            pass  # there is no triton
        except Exception as error:
            self.unfused = summary_of(error)
        return None


def free_bytes(device: torch.device) -> int:
    """Return the free memory of `device`; for a CPU or an Apple GPU, the machine's available memory."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
