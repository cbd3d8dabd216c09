"""A program that reads batches of a side stream under torch's sanitizer, and fails where streams race."""

from __future__ import annotations

import os
from collections import UserDict
from typing import Any
from unittest import mock

import torch
from torch.cuda._sanitizer import CUDASanitizerDispatchMode, EventHandler

from ptfast.core.protocols import DataInfo
from ptfast.data.loaders.pipeline import LoaderOptions, Prepare, SideStream, prefetched

DEVICE = torch.device("cuda", 0)


class Encoding(UserDict[str, Any]):
    """A batch with a `to` of its own, as tokenizers of Hugging Face give."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
        self.data = {name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()}
        return self


def train(kind: Any) -> None:
    """Read batches that nobody keeps, so that their memory is used again."""
    prepare = Prepare(
        LoaderOptions(DEVICE, pin=True), DataInfo(kind="features", task="regression"), images=False
    )
    raw = (kind({"x": torch.full((1 << 20,), float(number))}) for number in range(6))
    for batch in prefetched(map(prepare, raw), SideStream(DEVICE)):
        batch["x"].sum()
        del batch


if __name__ == "__main__":
    torch.zeros(1, device=DEVICE)
    # Memory that is given back and taken again stays the same memory.
    untold = dict.fromkeys(("_handle_memory_allocation", "_handle_memory_deallocation"), lambda *_: None)
    with mock.patch.multiple(EventHandler, **untold), CUDASanitizerDispatchMode():
        train(Encoding)
        train(dict)
    os._exit(0)  # the sanitizer's callbacks outlive what they call
