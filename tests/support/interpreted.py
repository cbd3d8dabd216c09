"""The kernel for batches of images in Triton's interpreter: run with TRITON_INTERPRET=1 and CASE as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from test_loaders import loader

from ptfast.core.protocols import DataInfo
from ptfast.data.build_data import Data
from ptfast.data.loaders import device_loader
from ptfast.data.map_source import TensorSource


def main(cases: list[dict[str, Any]]) -> None:
    for case in cases:
        channels = case.pop("channels")
        device_loader.READY_SHARE = case.pop("room")
        pixels = torch.randint(256, (40, 8, 8, channels), dtype=torch.uint8)
        figures = {"mean": [100.0 + i for i in range(channels)], "std": [50.0 + i for i in range(channels)]}
        facts = {"input_shape": (channels, 8, 8), "extra": {"normalize": figures}}
        info = DataInfo(kind="image", task="classification", num_classes=2, in_channels=channels, **facts)
        data = Data(info, TensorSource(pixels, torch.arange(40) % 2, images=True), None, None, "")
        case["input_type"] = getattr(torch, case["input_type"])
        plain, fused = (loader(data, "device", **case) for _ in range(2))
        fused.batches._kernel = fused.batches._build_kernel(channels, 16)
        assert fused.batches.fused, case
        for one, other in zip(fused.steps(0, 2), plain.steps(0, 2), strict=True):
            images, expected = one.micro_batches[0].data[0], other.micro_batches[0].data[0]
            assert images.dtype == case["input_type"]
            assert torch.equal(images, expected), case


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
