"""Time of one optimizer step at the size of ResNet-18 and of DistilBERT, as multiples of fused AdamW's.

`python scripts/bench_optimizers.py` prints a markdown table per model. Only the step is timed, on gradients
that stay. In every round all contenders take their steps, one after the other, each round beginning with
another; ratios are of times of the same round. Unlike in training, ours scale all layers, as timm's do.

SGD is there with Nesterov's momentum, as `optimizer=sgd_cifar` has it, and with plain momentum, whose default
step goes over memory less often. Muon, whose step takes seconds at these sizes on a CPU, is there where
`--only Muon` asks for it, such as with `--models GPT`. On a busy CPU `--cpu-time` times the work of one
thread, without its waits.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from bench_tools import interval, machine, version_of
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ptfast.optim.lamb import Lamb
from ptfast.optim.lars import Lars
from ptfast.optim.muon import Muon
from ptfast.optim.novograd import Novograd

Shapes = list[tuple[int, ...]]
LR = 1e-6


def resnet18() -> Shapes:
    """Shapes of torchvision's ResNet-18: 11.7 M parameters."""
    import torchvision

    with torch.device("meta"):
        return [tuple(p.shape) for p in torchvision.models.resnet18().parameters()]


def distilbert() -> Shapes:
    """Shapes of distilbert-base-uncased with a classifier of two: 67.0 M parameters."""
    width, norm = 768, [(768,), (768,)]
    shapes: Shapes = [(30522, width), (512, width), *norm]
    for _ in range(6):
        shapes += [(width, width), (width,)] * 4 + norm
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,), *norm]
    return [*shapes, (width, width), (width,), (2, width), (2,)]


def gpt() -> Shapes:
    """Shapes of the recipe char_gpt, four blocks of width 128: 0.8 M parameters."""
    width, norm = 128, [(128,)]
    shapes: Shapes = [(65, width), (128, width)]
    for _ in range(4):
        shapes += [*norm, (3 * width, width), (width, width), *norm, (4 * width, width), (width, 4 * width)]
    return [*shapes, *norm, (65, width)]


MODELS = {"ResNet-18": resnet18, "DistilBERT": distilbert, "GPT": gpt}


class Steps(Protocol):
    """What can take a step."""

    def step(self) -> object: ...


@dataclass(frozen=True)
class Contender:
    """An optimizer, and what its step is measured against."""

    name: str
    build: Callable[[list[nn.Parameter]], Steps]
    targets: tuple[tuple[str, float], ...] = ()
    """Other contenders, and the largest share of each one's time that this one is to take."""
    on_request: bool = False
    """Measured only where `--only` names it."""


def timm(cls: str, **keywords: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Build an optimizer of timm's, imported only then."""
    return lambda layers: getattr(importlib.import_module("timm.optim"), cls)(layers, lr=LR, **keywords)


def ours(cls: Callable[..., torch.optim.Optimizer], **keywords: Any) -> Callable[..., torch.optim.Optimizer]:
    """Build one of ours, scaling every layer."""
    return lambda layers: cls(layers, lr=LR, exclude_1d=False, **keywords)


class ClippedAdamW(torch.optim.AdamW):
    """AdamW after clipping the global norm, which NVLAMB does in its step."""

    def step(self, closure: Any = None) -> Any:
        """Clip, at a bound that leaves the gradients to the other contenders as they were, and step."""
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e9)
        return super().step(closure)


class MuonByMatrix:
    """torch's Muon, which takes one matrix after another, and fused AdamW for what ours leaves to it."""

    def __init__(self, layers: list[nn.Parameter]) -> None:
        ours = Muon(layers, ends=True).param_groups
        matrices = []
        for group in ours:
            for layer in group["params"] if group["muon"] else ():
                matrices.append(nn.Parameter(layer.detach().flatten(1)))
                matrices[-1].grad = layer.grad.flatten(1)
        rest = [layer for group in ours for layer in group["params"] if not group["muon"]]
        self._parts = torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(rest, LR, fused=True)

    def step(self) -> None:
        """Take both steps."""
        for part in self._parts:
            part.step()


BASE, CLIPPED = "AdamW fused", "AdamW fused, clipped"
SGD = {"lr": LR, "momentum": 0.9, "weight_decay": 1e-4}
NESTEROV = {**SGD, "nesterov": True}
DECAY = {"weight_decay": 1e-4}
TIMM_LARS = {"momentum": 0.9, **DECAY}
UNCLIPPED = {"max_grad_norm": None}
CONTENDERS = (
    Contender(BASE, lambda p: torch.optim.AdamW(p, LR, fused=True), (("AdamW default", 1 / 3),)),
    Contender("AdamW default", lambda p: torch.optim.AdamW(p, LR)),
    Contender(
        "SGD Nesterov fused",
        lambda p: torch.optim.SGD(p, **NESTEROV, fused=True),
        (("SGD Nesterov default", 1 / 4),),
    ),
    Contender("SGD Nesterov default", lambda p: torch.optim.SGD(p, **NESTEROV)),
    Contender("SGD fused", lambda p: torch.optim.SGD(p, **SGD, fused=True), (("SGD default", 1 / 4),)),
    Contender("SGD default", lambda p: torch.optim.SGD(p, **SGD)),
    Contender(CLIPPED, lambda p: ClippedAdamW(p, LR, fused=True)),
    Contender("LARS", ours(Lars, **DECAY), ((BASE, 1.5), ("timm LARS", 1.0), ("timm LARS foreach", 1.0))),
    Contender("timm LARS", timm("Lars", **TIMM_LARS)),
    Contender("timm LARS foreach", timm("Lars", **TIMM_LARS, foreach=True)),
    Contender("LAMB", ours(Lamb), ((BASE, 1.5), ("timm LAMB", 1.0), ("timm LAMB foreach", 1.0))),
    Contender("timm LAMB", timm("Lamb", **UNCLIPPED)),
    Contender("timm LAMB foreach", timm("Lamb", **UNCLIPPED, foreach=True)),
    Contender(
        "NVLAMB",
        ours(Lamb, max_grad_norm=1.0),
        ((CLIPPED, 1.5), ("timm NVLAMB", 1.0), ("timm NVLAMB foreach", 1.0)),
    ),
    Contender("timm NVLAMB", timm("Lamb")),
    Contender("timm NVLAMB foreach", timm("Lamb", foreach=True)),
    Contender("NovoGrad", ours(Novograd, **DECAY), ((BASE, 1.5), ("timm NovoGrad", 1.0))),
    Contender("timm NovoGrad", timm("NvNovoGrad", **DECAY)),
    Contender(
        "Muon", lambda p: Muon(p, LR, ends=True, fused=True), (("Muon by matrix", 1.0),), on_request=True
    ),
    Contender("Muon by matrix", MuonByMatrix, on_request=True),
)


def layers_of(shapes: Shapes, device: torch.device) -> list[nn.Parameter]:
    """Weights and gradients as long as in training; all contenders share them."""
    torch.manual_seed(0)
    layers = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    for layer in layers:
        layer.grad = torch.randn_like(layer) * 1e-2
    return layers


def time_steps(optimizer: Steps, steps: int, device: torch.device, clock: Callable[[], float]) -> float:
    """Milliseconds per step."""
    synchronize(device)
    begin_s = clock()
    for _ in range(steps):
        optimizer.step()
    synchronize(device)
    return (clock() - begin_s) / steps * 1e3


def synchronize(device: torch.device) -> None:
    """Wait for the device, where it runs beside the host."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    contenders: list[Contender],
    shapes: Shapes,
    rounds: int,
    steps: int,
    device: torch.device,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Times in ms by contender, one of each round; the first round only warms up."""
    layers = layers_of(shapes, device)
    optimizers = [(contender.name, contender.build(layers)) for contender in contenders]
    times_ms: dict[str, list[float]] = {name: [] for name, _ in optimizers}
    for number in range(rounds + 1):
        shift = number % len(optimizers)
        for name, optimizer in optimizers[shift:] + optimizers[:shift]:
            time_ms = time_steps(optimizer, steps, device, clock)
            if number:
                times_ms[name].append(time_ms)
        print(f"round {number} of {rounds}", file=sys.stderr)
    return times_ms


def print_table(contenders: list[Contender], times_ms: dict[str, list[float]]) -> None:
    """One row per contender, with the share of its own of the time of what it is measured against."""
    print("| optimizer | ms per step [min-max] | times AdamW fused [95 %] | targets |\n|---|--:|--:|---|")
    for contender in contenders:
        times = times_ms[contender.name]
        ratio, (low, high) = share(times, times_ms[BASE])
        met = []
        for other, bound in contender.targets:
            if other in times_ms:
                part, _ = share(times, times_ms[other])
                verdict = "met" if part <= bound else "missed"
                met.append(f"{part:.2f} of {other}, at most {bound:.2f}: {verdict}")
        print(
            f"| {contender.name} | {statistics.median(times):.2f} [{min(times):.2f}-{max(times):.2f}] "
            f"| {ratio:.2f} [{low:.2f}-{high:.2f}] | {'; '.join(met)} |"
        )


def share(times: list[float], others: list[float]) -> tuple[float, tuple[float, float]]:
    """Median of the ratios of times of the same round, and its 95 % interval."""
    ratios = [time / other for time, other in zip(times, others, strict=True)]
    return statistics.median(ratios), interval(ratios)


def _is_asked_for(contender: Contender, only: list[str]) -> bool:
    return any(word in contender.name for word in only) if only else not contender.on_request


def main() -> None:
    """Measure at each model's size, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, after one that warms up")
    parser.add_argument("--steps", type=int, default=3, help="steps per contender and round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose name contains one of these")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--cpu-time", action="store_true", help="time one thread's work, not the wall")
    args = parser.parse_args()
    if args.cpu_time and (args.threads > 1 or args.device.type != "cpu"):
        parser.error("--cpu-time is for one thread of the CPU")
    clock = time.thread_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    has_timm = version_of("timm") is not None
    if not has_timm:
        print("left out: timm's optimizers (timm is not installed)")
    contenders = [
        contender
        for contender in CONTENDERS
        if (has_timm or not contender.name.startswith("timm"))
        and (contender.name == BASE or _is_asked_for(contender, args.only))
    ]
    for model in args.models:
        shapes = MODELS[model]()
        times_ms = measure(contenders, shapes, args.rounds, args.steps, args.device, clock)
        size = sum(torch.Size(shape).numel() for shape in shapes) / 1e6
        print(f"\n{model}, {size:.1f} M parameters in {len(shapes)} tensors, float32\n")
        print_table(contenders, times_ms)
    versions = ", ".join(f"{name} {version_of(name)}" for name in ("torch", "timm") if version_of(name))
    device = torch.cuda.get_device_name() if args.device.type == "cuda" else f"{args.threads} threads"
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    kind = "CPU time" if args.cpu_time else "wall time"
    print(f"\n{kind}, {args.rounds} interleaved rounds of {args.steps} steps, {device}{load}. {versions}.")
    print(f"{machine()}.")


if __name__ == "__main__":
    main()
