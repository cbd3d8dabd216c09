"""What switches of the GPU's path are worth, each beside the same without it, on the first CUDA device.

    python scripts/bench_gpu_path.py                  all of them
    python scripts/bench_gpu_path.py norms images     some of: norms loss images segments saving

Medians of interleaved rounds, in milliseconds of wall time between two waits for the device; for losses and
segments also MiB of memory. `images` has a row for each set of changes to batches of 512 images of 32 x 32.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

ROUNDS, CALLS = 7, 20
DEVICE = torch.device("cuda", 0)


def milliseconds(*sides: Callable[[], Any], calls: int = CALLS) -> list[float]:
    """The median time of a call of each of `sides`, in turns."""
    found: list[list[float]] = [[] for _ in sides]
    for number in range(ROUNDS + 1):
        for side, times in zip(sides, found, strict=True):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            for _ in range(calls):
                side()
            torch.cuda.synchronize()
            if number:
                times.append((time.perf_counter() - start_s) / calls * 1e3)
    return [statistics.median(times) for times in found]


def row(name: str, without: float, with_it: float, more: str = "") -> None:
    """A line of the table."""
    print(f"| {name} | {without:.3f} | {with_it:.3f} | {without / with_it:.2f} | {more} |", flush=True)


class RmsNorm(nn.Module):
    """As transformers' LlamaRMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def norms() -> None:
    """Forward and backward of an RMS norm, by hand and as one kernel."""
    from ptfast.techniques.rewrites.model_rewrites import apply_fused_rms_norm

    for width in (768, 4096):
        for dtype in (torch.float32, torch.bfloat16):
            by_hand, fused = (nn.Sequential(RmsNorm(width)).to(DEVICE, dtype) for _ in range(2))
            assert apply_fused_rms_norm(fused) == ["0"]
            inputs = torch.randn(8192, width, device=DEVICE, dtype=dtype, requires_grad=True)

            def step(model: nn.Module, inputs: Tensor = inputs) -> None:
                model(inputs).backward(inputs.detach())

            times = milliseconds(lambda: step(by_hand), lambda: step(fused))  # noqa: B023
            row(f"RMS norm, 8,192 x {width:,}, {str(dtype)[6:]}", *times)


def loss() -> None:
    """Forward and backward of the last layer of GPT-2 and its loss, whole and in chunks."""
    from ptfast.core.protocols import DataInfo, LinearLogits
    from ptfast.tasks.language_modelling import LanguageModelling

    task = LanguageModelling(DataInfo(kind="tokens", task="language_modelling", vocab_size=50304))
    for width in (768, 4096):
        weight = torch.randn(50304, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        hidden = torch.randn(16384, width, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        targets = torch.randint(50304, (16384,), device=DEVICE)
        peaks, losses = [], []

        def whole(weight: Tensor = weight, hidden: Tensor = hidden, targets: Tensor = targets) -> Tensor:
            return task.loss_sum((hidden @ weight.T).float(), targets)

        def chunked(weight: Tensor = weight, hidden: Tensor = hidden, targets: Tensor = targets) -> Tensor:
            return task.loss_sum(LinearLogits(hidden, weight), targets)

        for side in (whole, chunked):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            value = side()
            value.backward()
            losses.append(float(value))
            peaks.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        more = f"{peaks[0]:,.0f} and {peaks[1]:,.0f} MiB; losses differ by {losses[1] / losses[0] - 1:.1e}"
        times = milliseconds(lambda: whole().backward(), lambda: chunked().backward(), calls=3)
        row(f"loss of 16,384 tokens, width {width:,}, 50,304 classes", *times, more)


def images() -> None:
    """A batch of images on the device: by single operators, and by one kernel."""
    from ptfast.core.batch_plan import BatchPlan
    from ptfast.core.protocols import DataInfo
    from ptfast.data.loaders import device_loader
    from ptfast.data.loaders.device_loader import DeviceBatches
    from ptfast.data.loaders.pipeline import LoaderOptions, Prepare
    from ptfast.data.map_source import TensorSource
    from ptfast.data.sampling.sampler import Sampler, Sharding
    from ptfast.data.transforms.augment_plan import build_augment

    crops = {"crop_padding": 4, "flip": True}
    colors = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}
    figures = {"mean": [125.0, 123.0, 114.0], "std": [63.0, 62.0, 67.0]}
    info = DataInfo(kind="image", task="classification", num_classes=10, input_shape=(3, 32, 32))
    info = replace(info, in_channels=3, extra={"normalize": figures})
    pixels = torch.randint(256, (51200, 32, 32, 3), dtype=torch.uint8)
    source = TensorSource(pixels, torch.arange(51200) % 10, images=True)
    sharding = Sharding(BatchPlan(51200, 512), 1, 0, 1)
    for ready, name, changes in (
        (True, "crop and flip, ready beforehand", crops),
        (True, "the same with cutout", {**crops, "cutout": 8}),
        (False, "crop and flip of bytes", crops),
        (False, "the same with cutout", {**crops, "cutout": 8}),
        (False, "with colors", {**crops, **colors}),
        (False, "with colors and cutout", {**crops, **colors, "cutout": 8}),
    ):
        device_loader.READY_SHARE = 0.125 if ready else 0.0
        augment = build_augment(changes, info, images=True, task_name="classification", normalize=True)
        sides: list[Any] = []
        for fused in (False, True):
            how = LoaderOptions(DEVICE, channels_last=True, input_type=torch.bfloat16, fused=fused)
            prepare = Prepare(how, info, images=True)
            batches = DeviceBatches(Sampler(sharding, 0), prepare, source, augment)
            batches._chunk_steps = 1
            sides.append(batches)
        steps = [each.steps(0, 10**6) for each in sides]
        same = all(torch.equal(*(next(each).micro_batches[0].data[0] for each in steps)) for _ in range(3))
        counts = [kernels(lambda each=each: next(each)) for each in steps]
        times = milliseconds(*(lambda each=each: next(each) for each in steps))
        more = f"{counts[0]} and {counts[1]} kernels, fused: {sides[1].fused}, same bits: {same}"
        row(f"512 images, {name}", *times, more)


def kernels(call: Callable[[], Any]) -> int:
    """How many kernels a call launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    on_device = [each for each in seen.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not each.name.lower().startswith(("memcpy", "memset")) for each in on_device)


def segments() -> None:
    """A GPT's steps over texts of ever new lengths: memory reserved beside memory allocated."""
    from ptfast.core.tensors.torch_internals import set_allocator
    from ptfast.models.gpt import Gpt

    def lengths() -> Iterator[int]:
        draws = torch.Generator().manual_seed(0)
        while True:
            yield int(torch.randint(32, 1025, (), generator=draws))

    found: dict[bool, tuple[float, str]] = {}
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length of the first side
    for expands in (False, True):
        torch.cuda.empty_cache()
        set_allocator(f"expandable_segments:{expands}")
        torch.cuda.reset_peak_memory_stats()
        model, drawn = Gpt(50304, 1024, width=768, depth=12, heads=12).to(DEVICE), lengths()
        start_s = 0.0
        for number in range(60):
            if number == 10:
                torch.cuda.synchronize()
                start_s = time.perf_counter()
            tokens = torch.zeros(8, next(drawn), dtype=torch.long, device=DEVICE)
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        torch.cuda.synchronize()
        took = (time.perf_counter() - start_s) / 50 * 1e3
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        found[expands] = took, f"{reserved / 2**20:,.0f} MiB reserved for {allocated / 2**20:,.0f}"
        del model, tokens, logits
    set_allocator("expandable_segments:False")
    row(
        "GPT-2, lengths of 32 to 1,024",
        found[False][0],
        found[True][0],
        f"{found[False][1]}; {found[True][1]}",
    )


BENCHES = {"norms": norms, "loss": loss, "images": images, "segments": segments}

if __name__ == "__main__":
    if unknown := {*sys.argv[1:]} - {*BENCHES}:
        sys.exit(f"bench_gpu_path: no {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}\n")
    print("| what | without, ms | with it, ms | ratio | |\n|---|---:|---:|---:|---|")
    for name in sys.argv[1:] or BENCHES:
        BENCHES[name]()
