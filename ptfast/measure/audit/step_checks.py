"""Checks of the data, of the steps as they run, and of the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from ptfast.core import devices
from ptfast.core.machine import shared_memory, spare_cores, usable_cores
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import duration, num_bytes
from ptfast.data.loaders.loader_choice import HAND_OVER_S
from ptfast.measure.audit.audit_context import CALL_STEPS, AuditContext, Finding, Price, SampleTrace
from ptfast.measure.audit.model_checks import times
from ptfast.measure.audit.traces import source_place
from ptfast.techniques.backend.torch_settings import MOST_SHAPES

WAITING = 0.1
"""Part of a step that is spent waiting for data from which on that is worth a change."""
PADDING = 0.1
"""Part of the tokens that is padding from which on that is worth a change."""
DECODING = 0.3
"""Part of a sample's time in decoders from which on they are what it takes."""
FAR, NARROW, WIDE = 1.0, 0.25, 4.0
"""Inputs are not normalised where means lie `FAR` deviations from 0, or deviations beyond the others."""


def no_workers(context: AuditContext) -> Iterator[Finding]:
    """Steps wait for samples that this process reads between them, while cores are to spare."""
    samples, in_here = _awaited(context), context.run.train_loader.kind in ("plain", "packed")
    if samples is None or not in_here or spare_cores() < 2:
        return
    if samples.seconds / samples.num_samples * context.run.batch_size >= HAND_OVER_S:
        each = _each(samples.seconds, samples)
        what = f"{context.steps.waiting:.0%} of a step waits for samples of {each}, and no worker reads ahead"
        yield Finding(what, _reader(context), "", ("dataloader=workers",))


def decoding_in_every_epoch(context: AuditContext) -> Iterator[Finding]:
    """Steps wait for images that are decoded anew in every epoch."""
    samples = _awaited(context)
    if samples is not None and samples.decoding_s >= DECODING * samples.seconds:
        what = f"decoding takes {_each(samples.decoding_s, samples)} a sample, anew in every epoch"
        mend = "decode once: ptfast pack SRC DST, or dataloader=memory where the images fit"
        yield Finding(what, _reader(context), mend)


def work_on_single_samples(context: AuditContext) -> Iterator[Finding]:
    """Arithmetic and transforms of single samples in a data set, of which a batch takes one call for all."""
    if (samples := _awaited(context)) is None:
        return
    mend = "return raw samples (uint8 images); data.normalize and augment=... work on whole batches"
    dataset, names = getattr(context.source, "dataset", None), list[str]()
    while dataset is not None and not names:
        for value in (getattr(dataset, name, None) for name in ("transform", "transforms")):
            kinds = [type(part) for part in getattr(value, "transforms", [value])]
            ours = [kind for kind in kinds if kind.__module__.startswith("torchvision.transforms")]
            names = names or [kind.__name__ for kind in ours]
        dataset = getattr(dataset, "dataset", None)
    if names:
        yield Finding(f"transforms of one image at a time: {', '.join(names)}", _reader(context), mend)
    for place, calls in samples.calls.arithmetic.items():
        if calls.count >= samples.num_samples and not place.startswith("torchvision/"):
            what = f"every sample goes through operations of its own ({', '.join(sorted(calls.names))})"
            yield Finding(what, place, mend, price=_price(context, samples, calls.seconds))


def arrays_copied(context: AuditContext) -> Iterator[Finding]:
    """torch.tensor(array) in a data set, which copies what torch.from_numpy shares."""
    if context.samples is None:
        return
    for place, calls in context.samples.calls.copied.items():
        what, mend = (
            "torch.tensor copies an array of each sample",
            "torch.from_numpy(array), or torch.as_tensor(array)",
        )
        yield Finding(what, place, mend, price=_price(context, context.samples, calls.seconds))


def memory_not_pinned(context: AuditContext) -> Iterator[Finding]:
    """Batches go to a CUDA device from memory that is not page-locked, for which the host waits."""
    loader = context.config.dataloader
    if context.device_type == "cuda" and loader.pin is False and context.run.train_loader.kind != "device":
        mends = ("dataloader.pin=true", "dataloader.side_stream=true")
        yield Finding("batches are copied from memory that is not pinned", "dataloader.pin", "", mends)


def padding(context: AuditContext) -> Iterator[Finding]:
    """A tenth of the tokens or more are padding, which costs what text does."""
    batching, kind, share = context.config.batching, context.run.info.kind, context.run.resolved.padding_share
    if share is None:
        tokens = next((t for t in tensors_in(context.batch) if t.dim() == 2 and t.dtype == torch.int64), None)
        if tokens is None or kind not in ("text", "tokens"):
            return
        stated = context.run.info.pad_id
        pad = int(tokens[:, -1].mode().values) if stated is None else stated
        # Padding stands at the ends of rows.
        share = float((tokens.flip(1) == pad).int().cumprod(1).float().mean())
        if share >= PADDING:
            what = f"{share:.0%} of the tokens of a batch are padding that the data set has put there"
            mend = "leave texts as long as they are, with `lengths` in the data set; batching=buckets then"
            yield Finding(what, _reader(context), mend)
        return
    fixed, documents = batching.padding == "fixed", kind == "tokens"
    if share >= PADDING and not batching.pack and (fixed or documents or not batching.buckets):
        override = "batching=longest" if fixed else "batching=pack" if documents else "batching=buckets"
        what = f"{share:.0%} of the tokens of an epoch are padding"
        yield Finding(what, "batching", "", (override,), "reordered" if fixed else "training")


def shapes_under_a_search_for_kernels(context: AuditContext) -> Iterator[Finding]:
    """Inputs of many shapes under cudnn_benchmark=true, which times all kernels anew for each."""
    shapes = len(context.steps.shapes)
    searches = context.device_type == "cuda" and context.config.backend.cudnn_benchmark is True
    if searches and shapes > MOST_SHAPES:
        what = f"inputs of {shapes} shapes in a few steps, for each of which cuDNN times its kernels"
        yield Finding(what, "backend.cudnn_benchmark", "", ("backend.cudnn_benchmark=auto",), "reordered")


def inputs_not_normalised(context: AuditContext) -> Iterator[Finding]:
    """Inputs whose mean is far from 0 or whose deviation is far from 1, as the model gets them."""
    inputs = next(tensors_in(context.batch), None)
    scaled = context.run.info.kind in ("image", "features")
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
    what = f"inputs of mean {means.mean():.3g} and deviation {deviations.mean():.3g}"
    where, overrides = _reader(context) if context.samples is not None else "data", ("data.normalize=true",)
    mend = ""
    if context.config.data.normalize:
        mend = "return uint8 images, which data.normalize handles, or normalise whole batches in the model"
        overrides = ()
    yield Finding(what, where, mend, overrides, "training")


def _awaited(context: AuditContext) -> SampleTrace | None:
    """Samples that were fetched, where steps wait for their like."""
    return context.samples if context.steps.waiting >= WAITING else None


def _price(context: AuditContext, samples: SampleTrace, seconds: float) -> Price:
    return Price(seconds / samples.num_samples * context.run.batch_size)


def _each(seconds: float, samples: SampleTrace) -> str:
    each_s = seconds / samples.num_samples
    return duration(each_s) if seconds > 1 else f"{each_s * 1e3:.2g} ms"


def _reader(context: AuditContext) -> str:
    """The place of the `__getitem__` of the user's data set, or of its class; `data` for data of ours."""
    if (dataset := getattr(context.source, "dataset", None)) is None:
        return "data"
    method = getattr(type(dataset), "__getitems__", None) or getattr(type(dataset), "__getitem__", None)
    return source_place(method or type(dataset))


DATA_CHECKS = (
    no_workers,
    decoding_in_every_epoch,
    work_on_single_samples,
    arrays_copied,
    memory_not_pinned,
    padding,
    shapes_under_a_search_for_kernels,
    inputs_not_normalised,
)


_MENDS = {
    "item": "keep sums as tensors on the device, and read them once in a while",
    "cpu": "keep it on the device until it is needed, once in many steps",
    "print of a tensor": "print once in many steps, of a value that was read anyway",
    "if or while on a tensor": "torch.where, or a decision by shapes and settings that the host knows",
    "boolean mask": "torch.where or a product with the mask, whose shapes are known",
    "repeat_interleave": "repeat_interleave(..., output_size=N)",
}
_ELSE = "an operation whose result has a shape that is known beforehand"


def reads_on_the_host(context: AuditContext) -> Iterator[Finding]:
    """A value that is read from the device in every step, for which the host waits."""
    for (what, place), calls in context.calls.reads.items():
        if _is_debugging(context, place):
            continue
        often, price = times(calls.count / CALL_STEPS), Price(calls.seconds / CALL_STEPS)
        said = f"{what}: {often} a step, the host waits for the device"
        yield Finding(said, place, _MENDS.get(what, _ELSE), price=price)
    known = {place for _, place in context.calls.reads}
    for place, count in context.syncs.items():
        if place not in known:
            yield Finding(f"{times(count / CALL_STEPS)} a step, the host waits for the device", place, _ELSE)


def tensors_made_on_the_host(context: AuditContext) -> Iterator[Finding]:
    """A tensor that the model makes on the host and moves to the device."""
    for place, calls in context.calls.moved.items():
        if not _is_debugging(context, place):
            what = f"a tensor made on the host and moved, {times(calls.count / CALL_STEPS)} a step"
            mend, price = "device=x.device where it is made", Price(calls.seconds / CALL_STEPS)
            yield Finding(what, place, mend, price=price)


def debugging_left_on(context: AuditContext) -> Iterator[Finding]:
    """Anomaly detection, a profiler, NVTX marks or gradcheck that the user's own code turns on."""
    names = {"anomaly": "anomaly detection is on", "profiler": "a profiler is on"}
    for aid, places in context.aids.items():
        what, where = names.get(aid, f"{aid} runs"), ", ".join(places) or "unknown"
        trial = context.trial(_without_anomaly_detection) if aid == "anomaly" else None
        yield Finding(what, where, f"remove it; debug={aid} when it is needed", trial=trial)


def gradients_in_evaluation(context: AuditContext) -> Iterator[Finding]:
    """Operations that record gradients while a batch is evaluated."""
    if (place := context.evaluation.with_gradients) is not None:
        mend = "remove torch.enable_grad() or set_grad_enabled(True) around it"
        yield Finding("gradients are recorded in evaluation", place, mend)


def graph_breaks(context: AuditContext) -> Iterator[Finding]:
    """Places where compiling breaks off, where something is compiled."""
    for reason, count in context.graph_breaks.items():
        what = f"{times(count)}, compiling broke off: {reason}"
        yield Finding(what, "compile", "code that can be compiled as a whole")


def compiled_again(context: AuditContext) -> Iterator[Finding]:
    """Graphs that are compiled again while steps run, as shapes or settings change."""
    compilation = context.run.compilation
    report = compilation.report() if compilation is not None else {}
    # Once is usual: the last batch of an epoch is smaller.
    if "advice" in report:
        what = f"{report['recompiled']} graphs compiled again within {context.run.progress.step} steps"
        yield Finding(what, "compile", "", ("compile.dynamic=true",), "reordered")


@contextmanager
def _without_anomaly_detection() -> Iterator[None]:
    """Have nobody turn anomaly detection on inside."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.set_anomaly_enabled(False)
    try:
        with mock.patch.object(torch, "set_anomaly_enabled"):
            yield
    finally:
        torch.set_anomaly_enabled(*before)


def _is_debugging(context: AuditContext, place: str) -> bool:
    """True for the line of a debugging aid, which is found as such."""
    return any(place.endswith(known) for places in context.aids.values() for known in places)


LOOP_CHECKS = (
    reads_on_the_host,
    tensors_made_on_the_host,
    debugging_left_on,
    gradients_in_evaluation,
    graph_breaks,
    compiled_again,
)


OTHERS = 0.25
"""Cores that others take on average from which on they are a neighbour."""


def threads_beside_cores(context: AuditContext) -> Iterator[Finding]:
    """More threads than cores, which then wait for each other, or fewer on a CPU that trains."""
    threads, cores = torch.get_num_threads(), usable_cores() - round(context.steps.others_cores)
    most = usable_cores(hyperthreads=True)
    if threads > most or (context.device_type == "cpu" and 2 * threads <= cores):
        what = f"{threads} thread{'s' * (threads != 1)} on {cores} free core{'s' * (cores != 1)}"
        mend = "or OMP_NUM_THREADS, where that sets it"
        yield Finding(what, "backend.threads", mend, ("backend.threads=auto",), "reordered")


def tf32_off(context: AuditContext) -> Iterator[Finding]:
    """Float32 products without TF32 on an NVIDIA GPU that has it."""
    exact = context.config.precision.mode == "fp32" and torch.get_float32_matmul_precision() == "highest"
    if context.device_type == "cuda" and exact and devices.lack_of_precision("tf32", "cuda") is None:
        what = "float32 products without tensor cores"
        yield Finding(what, "precision", "", ("precision=tf32",), "reduced")


def compiler_missing(context: AuditContext) -> Iterator[Finding]:
    """No C++ compiler, or on a GPU no triton: compile=... cannot be tried."""
    if (lack := devices.lack_of_compiler(context.device_type)) is not None:
        yield Finding(lack.what, "this machine", lack.remedy.partition(", or ")[0], kind="reordered")


def shared_memory_small(context: AuditContext) -> Iterator[Finding]:
    """Less shared memory than the worker processes' batches take, as in a container that was given little."""
    loader, batch = context.config.dataloader, context.batch
    ahead = max(context.run.resolved.workers, 1) * (loader.prefetch + 1)
    needed = ahead * sum(tensor.nbytes for tensor in tensors_in(batch))
    there = shared_memory()
    if loader.kind not in ("memory", "device") and there < needed:
        what = f"{num_bytes(there)} of shared memory, and batches read ahead take {num_bytes(needed)}"
        yield Finding(what, "/dev/shm", "docker run --shm-size=8g, or dataloader.prefetch=1")


def clocks_throttled(context: AuditContext) -> Iterator[Finding]:
    """Processors that were slowed down for heat or power while steps ran."""
    if context.steps.throttled:
        what = "the processors were slowed down for heat or power"
        yield Finding(what, "this machine", "better cooling, or less load")


def noisy_neighbours(context: AuditContext) -> Iterator[Finding]:
    """Other processes that kept cores busy while steps ran."""
    if (cores := context.steps.others_cores) >= OTHERS:
        mend = "end them, or measure when they are done"
        yield Finding(f"other processes took {cores:.1f} cores", "this machine", mend)


MACHINE_CHECKS = (
    threads_beside_cores,
    tf32_off,
    compiler_missing,
    shared_memory_small,
    clocks_throttled,
    noisy_neighbours,
)
