"""Checks of the data: who reads it, what is done to each sample, what a batch holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ptfast.core.machine import spare_cores
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import duration
from ptfast.data.loaders.loader_choice import HAND_OVER_S
from ptfast.data.map_source import SubsetSource
from ptfast.measure.audit.examined import Examined
from ptfast.measure.audit.finding import Finding, Price, source_place
from ptfast.techniques.backend.torch_settings import MOST_SHAPES

WAITING = 0.1
"""Part of a step that is spent waiting for data from which on that is worth a change."""
PADDING = 0.1
"""Part of the tokens that is padding from which on that is worth a change."""
DECODING = 0.3
"""Part of a sample's time in decoders from which on they are what it takes."""
FAR, NARROW, WIDE = 1.0, 0.25, 4.0
"""Inputs are not normalised where means lie `FAR` deviations from 0, or deviations beyond the others."""


def no_workers(examined: Examined) -> Iterator[Finding]:
    """Steps wait for samples that this process reads between them, while cores are to spare."""
    samples, loader = examined.samples, examined.run.train_loader
    if samples is None or loader.kind not in ("plain", "packed") or not _waits(examined) or spare_cores() < 2:
        return
    if samples.seconds / samples.num_samples * examined.run.settings.batch_size < HAND_OVER_S:
        return
    yield Finding(
        f"{examined.steps.waiting:.0%} of a step waits for samples of {_each(samples.seconds, samples)}, "
        "and no worker reads ahead",
        _reader(examined),
        "",
        ("dataloader=workers",),
    )


def decoding_in_every_epoch(examined: Examined) -> Iterator[Finding]:
    """Steps wait for images that are decoded anew in every epoch."""
    samples = examined.samples
    if samples is None or not _waits(examined) or samples.decoding_s < DECODING * samples.seconds:
        return
    yield Finding(
        f"decoding takes {_each(samples.decoding_s, samples)} a sample, anew in every epoch",
        _reader(examined),
        "decode once: ptfast pack SRC DST, or dataloader=memory where the images fit",
    )


def work_on_single_samples(examined: Examined) -> Iterator[Finding]:
    """Arithmetic and transforms of single samples in a data set, of which a batch takes one call for all."""
    samples = examined.samples
    if samples is None or not _waits(examined):
        return
    mend = "return raw samples (uint8 images); data.normalize and augment=... work on whole batches"
    transforms = _transforms(_dataset(examined))
    if transforms:
        yield Finding(f"transforms of one image at a time: {', '.join(transforms)}", _reader(examined), mend)
    for place, calls in samples.calls.arithmetic.items():
        if calls.count >= samples.num_samples and not place.startswith("torchvision/"):
            names = ", ".join(sorted(calls.names))
            yield Finding(
                f"every sample goes through operations of its own ({names})",
                place,
                mend,
                price=Price(calls.seconds / samples.num_samples * examined.run.settings.batch_size),
            )


def arrays_copied(examined: Examined) -> Iterator[Finding]:
    """torch.tensor(array) in a data set, which copies what torch.from_numpy shares."""
    if examined.samples is None:
        return
    for place, calls in examined.samples.calls.copied.items():
        yield Finding(
            "torch.tensor copies an array of each sample",
            place,
            "torch.from_numpy(array), or torch.as_tensor(array)",
            price=Price(calls.seconds / examined.samples.num_samples * examined.run.settings.batch_size),
        )


def memory_not_pinned(examined: Examined) -> Iterator[Finding]:
    """Batches go to a CUDA device from memory that is not page-locked, for which the host waits."""
    loader = examined.config.dataloader
    if examined.device_type == "cuda" and loader.pin is False and examined.run.train_loader.kind != "device":
        yield Finding(
            "batches are copied from memory that is not pinned",
            "dataloader.pin",
            "",
            ("dataloader.pin=true", "dataloader.side_stream=true"),
        )


def padding(examined: Examined) -> Iterator[Finding]:
    """A tenth of the tokens or more are padding, which costs what text does."""
    batching, share = examined.config.batching, examined.run.resolved.padding_share
    if share is None:
        share = _padded_by_the_data(examined)
        if share >= PADDING:
            yield Finding(
                f"{share:.0%} of the tokens of a batch are padding that the data set has put there",
                _reader(examined),
                "leave texts as long as they are, with `lengths` in the data set; batching=buckets then",
            )
        return
    if share < PADDING or batching.pack:
        return
    fixed, documents = batching.padding == "fixed", examined.run.info.kind == "tokens"
    mend = "batching=longest" if fixed else "batching=pack" if documents else "batching=buckets"
    if fixed or documents or not batching.buckets:
        yield Finding(
            f"{share:.0%} of the tokens of an epoch are padding",
            "batching",
            "",
            (mend,),
            kind="reordered" if fixed else "training",
        )


def shapes_under_a_search_for_kernels(examined: Examined) -> Iterator[Finding]:
    """Inputs of many shapes under cudnn_benchmark=true, which times all kernels anew for each."""
    shapes = len(examined.steps.shapes)
    searches = examined.device_type == "cuda" and examined.config.backend.cudnn_benchmark is True
    if searches and shapes > MOST_SHAPES:
        yield Finding(
            f"inputs of {shapes} shapes in a few steps, for each of which cuDNN times its kernels",
            "backend.cudnn_benchmark",
            "",
            ("backend.cudnn_benchmark=auto",),
            kind="reordered",
        )


def inputs_not_normalised(examined: Examined) -> Iterator[Finding]:
    """Inputs whose mean is far from 0 or whose deviation is far from 1, as the model gets them."""
    inputs = next(tensors_in(examined.batch), None)
    scaled = examined.run.info.kind in ("image", "features")
    if not scaled or inputs is None or not inputs.is_floating_point():
        return
    # Channels of an image, features of a vector.
    rows = inputs.detach().float()
    channels = rows.transpose(0, 1).flatten(1) if rows.dim() > 1 else rows[None]
    means, deviations = channels.mean(1), channels.std(1, correction=0)
    spread = deviations > 0
    if not bool(spread.any()):
        return
    means, deviations = means[spread], deviations[spread]
    off = (means.abs() > FAR * deviations) | (deviations < NARROW) | (deviations > WIDE)
    if 2 * int(off.sum()) < len(off):
        return
    normalizes = examined.config.data.normalize
    yield Finding(
        f"inputs of mean {means.mean():.3g} and deviation {deviations.mean():.3g}",
        _reader(examined) if examined.samples is not None else "data",
        "return uint8 images, which data.normalize takes care of, or normalise whole batches in the model"
        if normalizes
        else "",
        () if normalizes else ("data.normalize=true",),
        kind="training",
    )


def _waits(examined: Examined) -> bool:
    return examined.steps.waiting >= WAITING


def _each(seconds: float, samples: Any) -> str:
    each_s = seconds / samples.num_samples
    return duration(each_s) if seconds > 1 else f"{each_s * 1e3:.2g} ms"


def _dataset(examined: Examined) -> Any:
    """The user's data set; None for data of ours."""
    source: Any = examined.source
    while isinstance(source, SubsetSource):
        source = source.source
    return getattr(source, "dataset", None)


def _reader(examined: Examined) -> str:
    """Where the data set says how a sample is made: its `__getitem__`, or its class."""
    if (dataset := _dataset(examined)) is None:
        return "data"
    method = getattr(type(dataset), "__getitems__", None) or getattr(type(dataset), "__getitem__", None)
    return source_place(method or type(dataset))


def _transforms(dataset: Any) -> list[str]:
    """Names of the transforms of torchvision in the attributes of a data set, or of one inside it."""
    while dataset is not None:
        for value in (getattr(dataset, name, None) for name in ("transform", "transforms")):
            parts = getattr(value, "transforms", [value])
            names = [
                type(part).__name__
                for part in parts
                if type(part).__module__.startswith("torchvision.transforms")
            ]
            if names:
                return names
        dataset = getattr(dataset, "dataset", None)
    return []


def _padded_by_the_data(examined: Examined) -> float:
    """The share of a batch of tokens that is padding at the ends of its rows."""
    tokens = next((t for t in tensors_in(examined.batch) if t.dim() == 2 and t.dtype == torch.int64), None)
    if tokens is None or examined.run.info.kind not in ("text", "tokens"):
        return 0.0
    stated = examined.run.info.pad_id
    pad = int(tokens[:, -1].mode().values) if stated is None else stated
    # Of each row, tokens behind the last that is none.
    return float((tokens.flip(1) == pad).int().cumprod(1).float().mean())


CHECKS = (
    no_workers,
    decoding_in_every_epoch,
    work_on_single_samples,
    arrays_copied,
    memory_not_pinned,
    padding,
    shapes_under_a_search_for_kernels,
    inputs_not_normalised,
)
