"""The 1,797 handwritten digits that ship with the package: real data that trains in seconds, offline.

Provenance: the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak 1998),
UCI Machine Learning Repository, https://doi.org/10.24432/C50P49, license CC BY 4.0.
The values are unchanged.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ptfast.core.durations import Duration
from ptfast.data.dataset import Splits, image_info
from ptfast.data.map_source import TensorSource


class Digits:
    """Images of 8x8 pixels in 17 shades, ten classes, one split."""

    name = "digits"

    def load(self, *, val: Duration, seed: int) -> Splits:
        with np.load(Path(__file__).with_name("digits.npz")) as arrays:
            images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
        info = image_info((1, 8, 8), class_names=tuple("0123456789"), max_value=16)
        return Splits(info, TensorSource(images[..., None], labels.long(), images=True))
