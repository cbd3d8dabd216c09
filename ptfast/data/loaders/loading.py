"""How raw batches are read and made ready for the model, for every loader of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ptfast.core.protocols import DataInfo
from ptfast.core.tensors.trees import map_tensors
from ptfast.data.loaders.worker_processes import WorkerPool
from ptfast.data.transforms.normalize import Normalizer


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are read and reach the device."""

    device: torch.device
    normalize: bool = True
    channels_last: bool = False
    """Memory format of images on the device."""
    input_type: torch.dtype = torch.float32
    """Type of images once normalized; another is that of autocast, for a model that casts them first."""
    kind: str = "plain"
    """`plain` (this process fetches), `workers` (processes fetch whole micro-batches), `memory` (decoded in
    memory, gathered and augmented at once), `device` (the same on the training device), `packed` (as `plain`,
    from memory-mapped files)."""
    reason: str = "as the config says"
    """Why that kind, for the panel."""
    workers: int | str = 0
    prefetch: int = 2
    worker_threads: int = 1
    """Threads of each worker process."""
    pin: bool | str = "auto"
    fused: bool = True
    """Images on a GPU are gathered, changed and normalized in one kernel."""

    @property
    def pins(self) -> bool:
        return self.device.type == "cuda" and self.pin in (True, "auto")

    def describe(self, workers: int) -> str:
        threads = f" of {self.worker_threads} threads" if self.worker_threads > 1 else ""
        return f"{workers} process{'es' * (workers > 1)}{threads}"

    def pool(self, batches: Callable[[Any], Any], workers: int, among: int | None = None) -> WorkerPool:
        return WorkerPool(
            batches, workers, self.prefetch, pin=self.pins, threads=self.worker_threads, among=among
        )


class Prepare:
    """Moves raw batches to the device, brings them into the model's layout and normalizes them.

    Without statistics in `info`, `images` (uint8, channels last) are scaled to 0 to 1, and other inputs stay
    as they are; `statistics` are those that it applies.
    """

    def __init__(self, options: LoaderOptions, info: DataInfo, *, images: bool) -> None:
        self.device, self.images, self.channels_last = options.device, images, options.channels_last
        self.fuses = options.fused and images and options.device.type == "cuda"
        self.pin, self._on_host = options.pins, options.device.type == "cpu"
        self.input_type = options.input_type if images else torch.float32
        self.statistics: dict[str, list[float]] | None = None
        if options.normalize:
            self.statistics = info.extra.get("normalize")
        if self.statistics is None and images:
            channels = info.in_channels or 3
            self.statistics = {"mean": [0.0] * channels, "std": [info.extra.get("max_value", 255)] * channels}
        self.layout = torch.channels_last if self.channels_last else torch.contiguous_format
        self._normalizer: Normalizer | None = None
        if self.statistics is not None:
            how = {"images": images, "dtype": self.input_type, "layout": self.layout}
            self._normalizer = Normalizer(**self.statistics, device=self.device, **how)

    def __call__(self, raw: Any) -> Any:
        """The batch for a raw one: `(inputs, targets)`, or a user's own structure with its tensors moved."""
        if isinstance(raw, (tuple, list)) and len(raw) == 2 and isinstance(raw[0], Tensor):
            return self.inputs(raw[0]), self.move(raw[1])
        return self.move(raw)

    def inputs(self, inputs: Tensor) -> Tensor:
        return self.laid_out(self.move(inputs))

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Raw inputs on the device, normalized; images as (batch, channels, height, width)."""
        if self.images:
            if inputs.shape[3] == 1 and not self.channels_last:
                # Strides of a lone channel are ambiguous; these are the ones of a plain contiguous tensor.
                inputs = inputs.reshape(len(inputs), 1, *inputs.shape[1:3])
            else:
                inputs = inputs.permute(0, 3, 1, 2)
                fuses = self._normalizer is not None and self._normalizer.fuses(inputs)
                inputs = inputs if self.channels_last or fuses else inputs.contiguous()
        elif self.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs if self._normalizer is None else self._normalizer(inputs)

    @property
    def mean_and_factor(self) -> tuple[Tensor, Tensor] | None:
        """Mean and factor by which inputs are normalized."""
        return self._normalizer and self._normalizer.mean_and_factor

    def move(self, value: Any) -> Any:
        """`value` with every tensor in it on the device."""
        return value if self._on_host else map_tensors(self._moved, value)

    def _moved(self, tensor: Any) -> Any:
        if self.pin and isinstance(tensor, Tensor) and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        # Some devices still copy from memory that is not pinned when the host goes on to overwrite it.
        return tensor.to(self.device, non_blocking=self.pin)
