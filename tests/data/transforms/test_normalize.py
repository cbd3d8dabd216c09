"""Normalized images: those of one kernel that reads bytes and writes the type of the step."""

from __future__ import annotations

import pytest
import torch

from ptfast.data.transforms.normalize import Normalizer

MEAN, STD = [125.3, 122.9, 113.8], [63.0, 62.1, 66.7]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_passes_give_the_bits_of_separate_ones(dtype: torch.dtype, layout: torch.memory_format) -> None:
    """All bytes in all channels; the GPU's way, on the CPU."""
    pixels = torch.arange(256, dtype=torch.uint8).view(2, 8, 16, 1).expand(-1, -1, -1, 3)
    images = pixels.contiguous().permute(0, 3, 1, 2)
    for shift in (0.0, 0.01, 20.0):
        mean = [value + shift for value in MEAN]
        normalizer = Normalizer(mean, STD, torch.device("cpu"), images=True, dtype=dtype, layout=layout)
        plain = Normalizer(mean, STD, torch.device("cpu"), images=True)(images)
        fused = normalizer.fused(images)
        assert torch.equal(fused, plain.to(dtype))
        assert torch.equal(normalizer(images), plain.to(dtype))
        assert fused.is_contiguous(memory_format=layout)
