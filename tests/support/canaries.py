"""A dataset that takes whatever it is given, and can fail with all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset


class Points(TensorDataset):
    def __init__(self, fails: bool = False, **settings: Any) -> None:
        super().__init__(torch.randn(40, 4), torch.arange(40) % 2)
        if fails:
            raise RuntimeError(f"cannot reach the host with {settings}")
