"""Checks of the data, of the steps as they run, and of the machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ptfast.core import devices
from ptfast.core.machine import spare_cores, usable_cores
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import counted, short_time
from ptfast.data.loaders.loader_choice import HAND_OVER_S
from ptfast.measure.audit.audit_context import CALL_STEPS, AuditContext, Finding, Price, SampleTrace
from ptfast.measure.audit.model_checks import times
from ptfast.measure.audit.traces import source_place

WAITING, PADDING, DECODING = 0.1, 0.1, 0.3
"""Smallest shares to report: waiting in a step's time, padding in tokens, decoding in a sample's time."""
FAR, NARROW, WIDE = 1.0, 0.25, 4.0
"""Inputs are not normalized if a mean is `FAR` deviations from 0, or a deviation is out of bounds."""
_MENDS = {
    "item": "keep sums as tensors on the device, and read them once in many steps",
    "cpu": "keep it on the device until it is needed, once in many steps",
    "print of a tensor": "print once in many steps, a value that is read anyway",
    "if or while on a tensor": "torch.where, or a decision by shapes and settings that the host knows",
    "boolean mask": "torch.where or a product with the mask, whose shapes are known",
    "repeat_interleave": "repeat_interleave(..., output_size=N)",
}
_ELSE = "an operation whose result has a shape known in advance"


def check_data(context: AuditContext) -> Iterator[Finding]:
    """Yield findings on samples and batches."""
    run, config, dataset_place = context.run, context.config, "data"
    if (dataset := getattr(context.source, "dataset", None)) is not None:
        # Point to the code of the user's dataset.
        method = getattr(type(dataset), "__getitems__", None) or getattr(type(dataset), "__getitem__", None)
        dataset_place = source_place(method or type(dataset))
    if context.samples is not None:
        yield from _check_samples(context, context.samples, dataset_place)
    if context.device_type == "cuda" and config.dataloader.pin is False and run.train_loader.kind != "device":
        what = "batches are copied from memory that is not pinned"
        overrides = ("dataloader.pin=true", "dataloader.side_stream=true")
        yield Finding("memory not pinned", what, "dataloader.pin", "", overrides)
    yield from _check_padding(context, dataset_place)
    if (what := _offset(context)) is not None:
        where = dataset_place if context.samples is not None else "data"
        own = "return uint8 images, which data.normalize handles, or normalize whole batches in the model"
        mend, overrides = (own, ()) if config.data.normalize else ("", ("data.normalize=true",))
        yield Finding("inputs not normalized", what, where, mend, overrides, "training")


def _check_samples(context: AuditContext, samples: SampleTrace, dataset_place: str) -> Iterator[Finding]:
    """Yield findings on slow samples and copied arrays."""
    run, count = context.run, samples.num_samples
    per_step = run.batch_size / count
    if context.waiting >= WAITING:
        in_here = run.train_loader.kind in ("plain", "packed")
        if in_here and spare_cores() >= 2 and samples.seconds * per_step >= HAND_OVER_S:
            each = short_time(samples.seconds / count)
            what = f"{context.waiting:.0%} of a step waits for samples of {each}, and no worker prefetches"
            yield Finding("no workers", what, dataset_place, "", ("dataloader=workers",))
        if samples.decoding_s >= DECODING * samples.seconds:
            what = f"decoding takes {short_time(samples.decoding_s / count)} per sample, in every epoch again"
            mend = "decode once: ptfast pack SRC DST, or dataloader=memory where the images fit"
            yield Finding("decoding in every epoch", what, dataset_place, mend)
        mend = "return raw samples (uint8 images); data.normalize and augment=... work on whole batches"
        dataset, names = getattr(context.source, "dataset", None), list[str]()
        while dataset is not None and not names:
            for value in (getattr(dataset, name, None) for name in ("transform", "transforms")):
                kinds = [type(part) for part in getattr(value, "transforms", [value])]
                known = (kind for kind in kinds if kind.__module__.startswith("torchvision.transforms"))
                names = names or [kind.__name__ for kind in known]
            dataset = getattr(dataset, "dataset", None)
        if names:
            what = f"transforms on single images: {', '.join(names)}"
            yield Finding("work on single samples", what, dataset_place, mend)
        for place, calls in samples.calls.arithmetic.items():
            if calls.count >= count and not place.startswith("torchvision/"):
                what = f"operations on single samples ({', '.join(sorted(calls.names))})"
                price = Price(calls.seconds * per_step)
                yield Finding("work on single samples", what, place, mend, price=price)
    for place, calls in samples.calls.copied.items():
        what = "torch.tensor copies the array of each sample"
        mend = "torch.from_numpy(array), or torch.as_tensor(array)"
        yield Finding("arrays copied", what, place, mend, price=Price(calls.seconds * per_step))


def _check_padding(context: AuditContext, dataset_place: str) -> Iterator[Finding]:
    batching, kind, run = context.config.batching, context.run.info.kind, context.run
    share = run.choices.get("padding_share")
    if share is None:
        tokens = next((t for t in tensors_in(context.batch) if t.dim() == 2 and t.dtype == torch.int64), None)
        if tokens is None or kind not in ("text", "tokens"):
            return
        stated = context.run.info.pad_id
        pad = int(tokens[:, -1].mode().values) if stated is None else stated
        # Padding is at the end of each row.
        share = float((tokens.flip(1) == pad).int().cumprod(1).float().mean())
        if share >= PADDING:
            what = f"{share:.0%} of the tokens of a batch are padding added by the dataset"
            mend = "leave texts as long as they are, with `lengths` in the dataset; batching=buckets then"
            yield Finding("padding", what, dataset_place, mend)
        return
    fixed, documents = batching.padding == "fixed", kind == "tokens"
    if share >= PADDING and not batching.pack and (fixed or documents or not batching.buckets):
        override = "batching=longest" if fixed else "batching=pack" if documents else "batching=buckets"
        what = f"{share:.0%} of the tokens of an epoch are padding"
        yield Finding("padding", what, "batching", "", (override,), "reordered" if fixed else "training")


def _offset(context: AuditContext) -> str | None:
    """Describe the mean and standard deviation of unnormalized inputs; None for normalized ones."""
    inputs = next(tensors_in(context.batch), None)
    scaled = context.run.info.kind in ("image", "features")
    if not scaled or inputs is None or not inputs.is_floating_point():
        return None
    # Rows are channels of images or features of vectors.
    rows = inputs.detach().float()
    channels = rows.transpose(0, 1).flatten(1) if rows.dim() > 1 else rows[None]
    means, stds = channels.mean(1), channels.std(1, correction=0)
    spread = stds > 0
    means, stds = means[spread], stds[spread]
    off = (means.abs() > FAR * stds) | (stds < NARROW) | (stds > WIDE)
    if not len(off) or 2 * int(off.sum()) < len(off):
        return None
    return f"inputs of mean {means.mean():.3g} and standard deviation {stds.mean():.3g}"


def check_loop(context: AuditContext) -> Iterator[Finding]:
    """Yield findings on the training loop: waits for the device, debugging aids, compilation."""
    for (read, place), calls in context.calls.reads.items():
        what = f"{read}: {times(calls.count / CALL_STEPS)} a step, the host waits for the device"
        price = Price(calls.seconds / CALL_STEPS)
        yield Finding("reads on the host", what, place, _MENDS.get(read, _ELSE), price=price)
    known = {place for _, place in context.calls.reads}
    for place, count in context.syncs.items():
        if place not in known:
            what = f"{times(count / CALL_STEPS)} a step, the host waits for the device"
            yield Finding("reads on the host", what, place, _ELSE)
    for place, calls in context.calls.moved.items():
        what = f"a tensor created on the host and moved, {times(calls.count / CALL_STEPS)} a step"
        mend, price = "device=x.device where it is created", Price(calls.seconds / CALL_STEPS)
        yield Finding("tensors made on the host", what, place, mend, price=price)
    for debug, aid in context.aids.items():
        mend = f"remove it; debug={debug} when it is needed"
        yield Finding("debugging left on", f"{aid} is on", "your code", mend)
    if (place := context.evaluation.with_gradients) is not None:
        mend = "remove torch.enable_grad() or set_grad_enabled(True) around it"
        yield Finding("gradients in evaluation", "gradients are recorded in evaluation", place, mend)
    for reason, count in context.graph_breaks.items():
        what = f"{times(count)}, graph break: {reason}"
        yield Finding("graph breaks", what, "compile", "code that torch can compile as one graph")


def check_machine(context: AuditContext) -> Iterator[Finding]:
    """Yield findings on settings that do not suit the machine; `ptfast doctor` checks the machine itself."""
    config, on_cuda = context.config, context.device_type == "cuda"
    threads, cores = torch.get_num_threads(), usable_cores()
    most = usable_cores(hyperthreads=True)
    if threads > most or (context.device_type == "cpu" and 2 * threads <= cores):
        what = f"{counted(threads, 'thread')} on {counted(cores, 'core')}"
        mend, key = "or OMP_NUM_THREADS, where that sets it", "backend.threads"
        yield Finding("threads not matching cores", what, key, mend, (f"{key}=auto",), "reordered")
    exact = config.precision.mode == "fp32" and torch.get_float32_matmul_precision() == "highest"
    if on_cuda and exact and devices.check_precision("tf32", "cuda") is None:
        what = "float32 matrix products do not use tensor cores"
        yield Finding("tf32 off", what, "precision", "", ("precision=tf32",), "reduced")
