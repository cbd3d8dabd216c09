"""JPEG files decoded by the GPU that trains, and the boxes cut out of them resized there."""

from __future__ import annotations

import io

import torch
from torch import Tensor
from torch.nn import functional as F

from ptfast.core.errors import DataError, MachineError
from ptfast.data.decoding.image_decoding import (
    AS_RGB,
    MAX_PIXELS,
    decode,
    jpeg_shape,
    load_image_operators,
    read_file,
)
from ptfast.data.sampling.sampler import Indices
from ptfast.data.sources.image_files import ImageFiles
from ptfast.data.transforms.resized_crops import Boxes, pixel_edges

_END = b"\xff\xd9"


class NvJpegFiles(ImageFiles):
    """Images whose random resized crops are made on the GPU, from files that go there as they are.

    Evaluation and statistics read pixels decoded by the host, which differ by a level or two. Files that are
    not whole JPEGs in colour are decoded on the host, and so is every batch with a file that the GPU refuses.
    Broken files are reported or skipped as without a GPU.

    Source: NVIDIA's nvJPEG, by torchvision's `decode_jpeg(..., device="cuda")`.
    """

    storage = "gpu"

    def crops(self, indices: Indices, boxes: Boxes, size: int, mirrored: Indices) -> Tensor:
        device = self.device()
        try:
            images = self._on_device([self.paths[int(i)] for i in indices], device)
        except (RuntimeError, DataError):
            return super().crops(indices, boxes, size, mirrored).to(device)
        crops: list[Tensor] = []
        for image, box, mirror in zip(images, boxes, mirrored.tolist(), strict=True):
            top, bottom = pixel_edges(box[0], box[2], image.shape[1])
            left, right = pixel_edges(box[1], box[3], image.shape[2])
            # As `resized_crops.resized_crop`, but in floats: torch does not antialias bytes on a GPU.
            part = image[None, :, top:bottom, left:right].float()
            resized = F.interpolate(part, (size, size), mode="bilinear", antialias=True, align_corners=False)
            pixels = resized[0].round_().clamp_(0, 255).to(torch.uint8).permute(1, 2, 0)
            crops.append(pixels.flip(1) if mirror else pixels)
        return torch.stack(crops)

    @staticmethod
    def device() -> torch.device:
        """The GPU of this rank."""
        return torch.device("cuda", torch.cuda.current_device())

    def _on_device(self, paths: list[str], device: torch.device) -> list[Tensor]:
        """uint8 (3, height, width) of each file, on the device."""
        contents, plain = {path: read_file(path) for path in paths}, list[str]()
        for path, content in contents.items():
            height, width, components = jpeg_shape(content) or (0, 0, 0)
            # A whole JPEG in color of a plausible size.
            if components == 3 and height * width <= MAX_PIXELS and content.endswith(_END):
                plain.append(path)
        buffers = [torch.frombuffer(bytearray(contents[path]), dtype=torch.uint8) for path in plain]
        images = dict(zip(plain, decode_on_device(buffers, device), strict=True)) if plain else {}
        for path, content in contents.items():
            if path not in images:
                pixels = torch.from_numpy(decode(content, path).pixels)
                images[path] = pixels.permute(2, 0, 1).to(device)
        return [images[path] for path in paths]


def decode_on_device(buffers: list[Tensor], device: torch.device) -> list[Tensor]:
    """JPEG files, uint8 (bytes,) on the host, as uint8 (3, height, width) on a CUDA device."""
    load_image_operators()
    return torch.ops.image.decode_jpegs_cuda(buffers, AS_RGB, device)


def check_decoder() -> None:
    """Raise MachineError E005 unless the GPU decodes a JPEG."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        decode_on_device(
            [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], NvJpegFiles.device()
        )
    except (RuntimeError, AttributeError, ImportError, AssertionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        what, hint = f"the GPU decodes no JPEG here: {reason}", "Use data.decoder=cpu"
        raise MachineError("E005", what, key="data.decoder", value="nvjpeg", suggestion=hint) from None
