"""A step on many ranks, predicted: what each holds, what it sends, and how long it waits for the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ptfast.core.tensors.torch_internals import BatchNorm
from ptfast.profiling.limits.accelerators import Accelerator
from ptfast.profiling.limits.fake_step import StepCosts
from ptfast.profiling.limits.operators import Operator, flops
from ptfast.profiling.limits.roofline import TYPES
from ptfast.techniques.parallel import Parallel

PRODUCTS, MEMORY, LINKS = 0.6, 0.8, 0.8
"""Parts of the peaks that products, memory and links between ranks reach, assumed."""
NETWORK_BYTES_PER_S = 100e9 / 8
"""Each way between two machines of which the vendor says nothing, assumed."""


@dataclass(frozen=True)
class Exchange:
    """A collective operation, all its calls in a step together."""

    kind: Literal["all-reduce", "all-gather", "reduce-scatter"]
    what: str
    num_bytes: int
    """Of whole tensors, as they are before or after on every rank."""
    overlaps: bool = True
    """The ranks compute meanwhile."""

    def sent_bytes(self, num_ranks: int) -> float:
        """Bytes that each rank sends around a ring, and receives."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * (num_ranks - 1) / num_ranks * self.num_bytes


@dataclass(frozen=True)
class Scale:
    """The ranks of a run, and how they train together."""

    num_ranks: int
    num_local_ranks: int
    """On each machine."""
    parallel: Parallel
    passes: int
    """Micro-batches of each rank in a step."""
    gathered_type: torch.dtype | None = None
    """For fsdp, what weights are gathered in; None for their own."""
    blocks: tuple[nn.Module, ...] = ()
    """For fsdp, parts whose weights are gathered together."""

    @property
    def strategy(self) -> str:
        """How they train together."""
        return self.parallel.strategy if self.num_ranks > 1 else "single"

    @property
    def sharded(self) -> bool:
        """Weights are shared out."""
        return self.strategy == "fsdp"

    def share_bytes(self, tensor: Tensor) -> int:
        """Bytes of a weight, its gradient or its state that a rank keeps."""
        if not self.sharded or not tensor.ndim:
            return _num_bytes(tensor)
        return _padded(tensor, self.num_ranks) // self.num_ranks * tensor.element_size()

    def gathered_bytes(self, weight: Tensor) -> int:
        """Bytes of a weight that all ranks gather."""
        size = weight.element_size() if self.gathered_type is None else self.gathered_type.itemsize
        return _padded(weight, self.num_ranks) * size


def exchanges(model: nn.Module, scale: Scale) -> list[Exchange]:
    """What the ranks send each other in a step, but for sums of a few bytes."""
    if scale.num_ranks == 1:
        return []
    weights = list(model.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    if scale.sharded:
        # Forward and backward of each micro-batch gather them, the last one sends gradients.
        gathered = 2 * scale.passes * sum(map(scale.gathered_bytes, weights))
        summed = sum(_padded(weight, scale.num_ranks) * weight.element_size() for weight in trained)
        found = [Exchange("all-gather", "weights", gathered), Exchange("reduce-scatter", "gradients", summed)]
    else:
        found = [Exchange("all-reduce", "gradients", sum(_sent_bytes(p, scale.parallel) for p in trained))]
    norms = [
        m
        for m in model.modules()
        if isinstance(m, BatchNorm) and m.running_mean is not None and m.momentum is not None
    ]
    if norms:
        # Mean, variance and count of each layer, once a step, or in forward and again in backward.
        own = 4 * sum(2 * norm.num_features + 1 for norm in norms)
        calls = scale.passes if scale.parallel.sync_batchnorm else 1
        of_norms = Exchange("all-gather", "BatchNorm", calls * own * scale.num_ranks, overlaps=False)
        found.append(of_norms)
        if scale.parallel.sync_batchnorm:
            sums = sum(8 * norm.num_features for norm in norms)
            found.append(Exchange("all-reduce", "BatchNorm", calls * sums, overlaps=False))
    return found


def memory_of_rank(
    model: nn.Module, state: Iterable[Tensor], average: Iterable[Tensor], costs: StepCosts, scale: Scale
) -> dict[str, int]:
    """Bytes that a rank holds at its fullest, by what they are of.

    Args:
        state: of the optimizer.
        average: of the weights.
    """
    weights, parallel = list(model.parameters()), scale.parallel
    trained = [weight for weight in weights if weight.requires_grad]
    whole = sum(map(_num_bytes, trained))
    rows = {
        "weights": sum(map(scale.share_bytes, weights)) + sum(map(_num_bytes, model.buffers())),
        "gradients": sum(map(scale.share_bytes, trained)),
        "optimizer state": sum(map(scale.share_bytes, state)),
        "averaged weights": sum(map(scale.share_bytes, average)),
        "activations": costs.peak_bytes,
    }
    if scale.sharded:
        # Until the last micro-batch nobody sends them.
        rows["gradients"] += whole * (scale.passes > 1)
        rows["gathered weights"] = _gathered_at_once(weights, scale)
    elif scale.num_ranks > 1:
        copies = (not parallel.gradient_as_bucket_view) + (parallel.compression == "powersgd")
        rows["copies of gradients"] = copies * whole
    return {name: size for name, size in rows.items() if size}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one of many ranks."""

    compute_s: float
    waited_s: float
    """For what is sent, as far as it lasts longer than what is computed meanwhile."""

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.compute_s + self.waited_s

    @property
    def efficiency(self) -> float:
        """The part of the step in which a rank does what it would do alone."""
        return self.compute_s / self.step_s


def step_time(
    costs: StepCosts,
    held: Mapping[str, int],
    sent: Iterable[Exchange],
    scale: Scale,
    device: Accelerator,
    link_bytes_per_s: float,
    *,
    rounds: bool,
) -> StepTime:
    """The time of a step, each operator at the limit that holds it back.

    An operator takes as long as its products at `PRODUCTS` of the peak, its reads and writes at `MEMORY` of
    that, or its call, whichever is longest. DDP sends gradients beside the last backward pass, all but the
    last bucket of them; FSDP gathers and sends a block's beside other blocks.

    Args:
        held: as from `memory_of_rank`.
        link_bytes_per_s: of each rank, as from `link_of`.
        rounds: float32 products may round to TF32.
    """

    def seconds(phase: str) -> float:
        return sum(_seconds(o, device, rounds) for o in costs.operators if o.phase == phase)

    forward_s, backward_s = seconds("forward"), seconds("backward")
    update = 3 * held["weights"] + 2 * held.get("optimizer state", 0) + 2 * held.get("averaged weights", 0)
    update_s = update / (MEMORY * device.bytes_per_s)
    compute_s = scale.passes * (forward_s + backward_s) + update_s
    beside_s = {
        "all-reduce": backward_s,
        "all-gather": scale.passes * (forward_s + backward_s) - backward_s / 2,
        "reduce-scatter": backward_s / 2,
    }
    waited_s = 0.0
    for exchange in sent:
        took_s = exchange.sent_bytes(scale.num_ranks) / (LINKS * link_bytes_per_s)
        if not (device.overlaps and exchange.overlaps):
            waited_s += took_s
            continue
        bucket = scale.parallel.bucket_mb * 2**20 / max(exchange.num_bytes, 1)
        alone = 1 / (len(scale.blocks) + 1) if scale.sharded else min(1.0, bucket)
        waited_s += max(took_s - beside_s[exchange.kind], alone * took_s)
    return StepTime(compute_s, waited_s)


def link_of(device: Accelerator, scale: Scale, network_bytes_per_s: float | None = None) -> float:
    """Bytes a second that each rank sends around rings: those of its slowest link.

    Rings side by side leave a machine through each of its network cards.

    Args:
        network_bytes_per_s: of a machine to the others, each way; None for what the vendor says.
    """
    if scale.num_ranks <= scale.num_local_ranks:
        return device.link_bytes_per_s
    if network_bytes_per_s is None:
        of_one = device.network_bytes_per_s
        network_bytes_per_s = NETWORK_BYTES_PER_S if of_one is None else of_one * scale.num_local_ranks
    alone = scale.num_local_ranks == 1
    return network_bytes_per_s if alone else min(device.link_bytes_per_s, network_bytes_per_s)


def _seconds(operator: Operator, device: Accelerator, rounds: bool) -> float:
    if operator.is_view:
        return 0.0
    name = TYPES.get(operator.dtype or torch.float32, "tf32" if rounds else "fp32")
    products_s = flops(operator) / (PRODUCTS * device.peak(name))
    moved_s = operator.num_bytes / (MEMORY * device.bytes_per_s)
    return operator.count * max(products_s, moved_s, device.call_s)


def _padded(tensor: Tensor, num_ranks: int) -> int:
    """Elements of a tensor, its rows filled up to a multiple of the ranks."""
    rows = max(len(tensor), 1) if tensor.ndim else 1
    return math.ceil(rows / num_ranks) * num_ranks * (tensor.numel() // rows)


def _sent_bytes(gradient: Tensor, parallel: Parallel) -> int:
    """Bytes of a gradient as DDP sends it."""
    size = 2 if parallel.compression in ("bf16", "fp16") else gradient.element_size()
    if parallel.compression == "powersgd" and gradient.ndim > 1:
        thin = (len(gradient) + gradient.numel() // len(gradient)) * parallel.powersgd_rank
        if 2 * thin < gradient.numel():
            return thin * size
    return gradient.numel() * size


def _gathered_at_once(weights: list[nn.Parameter], scale: Scale) -> int:
    """Bytes of whole weights at most: of what is in no block, two blocks, and gradients of one of them."""
    in_blocks = {id(p) for block in scale.blocks for p in block.parameters()}
    rest = sum(scale.gathered_bytes(p) for p in weights if id(p) not in in_blocks)
    sizes = [sum(map(scale.gathered_bytes, block.parameters())) for block in scale.blocks]
    whole = [sum(map(_num_bytes, block.parameters())) for block in scale.blocks]
    return rest + sum(sorted(sizes)[-2:]) + max(whole, default=0)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
