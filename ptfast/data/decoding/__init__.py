"""Files and texts into arrays."""

from __future__ import annotations

from ptfast.core import devices
from ptfast.core.errors import ConfigError, MachineError, PtfastError
from ptfast.core.sections.section import Family
from ptfast.data import DataSection
from ptfast.data.loaders import Dataloader
from ptfast.data.transforms import AugmentSection


def _by_gpu(data: DataSection) -> bool:
    return data.target.kwargs.get("decoder") == "nvjpeg"


def crops_for_nvjpeg(
    data: DataSection, augment: AugmentSection, dataloader: Dataloader
) -> PtfastError | None:
    """Refuse a GPU that decodes for something else than crops, or in processes that have no part in it."""
    if not _by_gpu(data):
        return None
    if augment.resized_crop is None:
        what = "nvJPEG decodes for augment.resized_crop"
        hint = "Use augment=resized_crop, or data.decoder=cpu"
        return ConfigError("C011", what, key="data.decoder", value="nvjpeg", suggestion=hint)
    if (kind := dataloader.kind) not in ("auto", "plain"):
        what, hint = "data.decoder=nvjpeg decodes in the process that trains", "Use dataloader=plain"
        return ConfigError("C011", what, key="dataloader.kind", value=kind, suggestion=hint)
    return None


def gpu_for_nvjpeg(data: DataSection, device: str) -> PtfastError | None:
    """Refuse nvJPEG where no CUDA device is used."""
    if not _by_gpu(data) or devices.usable_type(device) == "cuda":
        return None
    what, hint = "nvJPEG decodes on a CUDA device, and none is used", "Use data.decoder=cpu"
    return MachineError("E005", what, key="data.decoder", value="nvjpeg", suggestion=hint)


FAMILY = Family(
    rules=(crops_for_nvjpeg,),
    machine_rules=(gpu_for_nvjpeg,),
    panel=lambda data, skips_unreadable: {
        "decoding": "JPEG by the GPU, other files by the CPU" if _by_gpu(data) else None,
        "corrupt files": "skipped" if skips_unreadable else None,
    },
)
