"""The CIFAR-10 speed-run airbench94_muon as one loop in plain torch, for a CPU.

    python scripts/airbench94_by_hand.py FOLDER                accuracy after 8 epochs
    python scripts/airbench94_by_hand.py FOLDER --stop 8       time of the first 8 steps alone

FOLDER holds train/CLASS/*.jpg and test/CLASS/*.jpg of 32x32 pixels, decoded once and held in memory.
Autocast in bfloat16 with weights in float32, channels last, crops gathered in one operation. It uses nothing
of ptfast, so that `scripts/bench_records.py` can compare the recipe `cifar_speedrun` with it. It prints one
JSON object.

Source: Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498; the version with
Muon of KellerJordan/cifar10-airbench.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

PAD = 2
"""Pixels by which a crop may be off, in each direction."""


class Net(nn.Module):
    """A whitening convolution, three blocks, a linear layer: 1.97 M parameters."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # pyright: ignore[reportArgumentType] - there is one
        self.blocks = nn.Sequential(Block(24, 64), Block(64, 256), Block(256, 256))
        self.head = nn.Linear(256, num_classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 3, 32, 32) to logits (batch, classes)."""
        x = self.blocks(F.gelu(self.whiten(x)))
        return self.head(F.max_pool2d(x, 3).flatten(1)) / 256


class Block(nn.Module):
    """Two convolutions, each with batch norm and GELU; the size is halved after the first."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
        self.norm2 = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            nn.init.dirac_(conv.weight.data[: conv.in_channels])
            norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to (batch, channels, height / 2, width / 2)."""
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


class Muon(torch.optim.Optimizer):
    """Convolutions set to one norm, then moved along the orthogonal matrix nearest to their momentum."""

    def __init__(self, weights: list[Tensor], lr: float, momentum: float) -> None:
        super().__init__(weights, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure
        """Take a step."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                velocity = state["momentum"].mul_(group["momentum"]).add_(weight.grad)
                ahead = weight.grad.add(velocity, alpha=group["momentum"])
                weight.mul_(len(weight) ** 0.5 / weight.norm())
                update = orthogonal(ahead.reshape(len(ahead), -1)).view(weight.shape)
                weight.add_(update, alpha=-group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, about, by three Newton-Schulz iterations in bfloat16."""
    x = matrix.bfloat16()
    x = x / (x.norm() + 1e-7)
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    for _ in range(3):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if is_tall else x


def read_split(folder: Path) -> tuple[Tensor, Tensor]:
    """Images (samples, 3, 32, 32) in uint8 and their labels."""
    files = [
        (file, label)
        for label, of_class in enumerate(sorted(path for path in folder.iterdir() if path.is_dir()))
        for file in sorted(of_class.iterdir())
    ]
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file, _ in files])
    return torch.from_numpy(images).permute(0, 3, 1, 2), torch.tensor([label for _, label in files])


@torch.no_grad()
def whitening_filters(images: Tensor) -> Tensor:
    """Filters (24, 3, 2, 2) that make patches of 2x2 pixels uncorrelated, and their negatives."""
    patches = F.unfold(images, 2).transpose(1, 2).reshape(-1, 12)
    eigenvalues, eigenvectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (eigenvectors / (eigenvalues + 5e-4).sqrt()).T.reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters])


def epoch_batches(
    padded: Tensor, labels: Tensor, mirrored: Tensor, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The whole batches of an epoch: crops of `padded`, (samples, 36, 36, 3), some of them mirrored."""
    pixels = torch.arange(padded.shape[1] - 2 * PAD)
    order = torch.randperm(len(padded))
    for index in order.split(batch_size)[: len(padded) // batch_size]:
        top, left = torch.randint(2 * PAD + 1, (2, len(index), 1))
        columns = torch.where(mirrored[index, None], pixels.flip(0), pixels) + left
        crops = padded[index[:, None, None], (top + pixels)[:, :, None], columns[:, None, :]]
        yield crops.permute(0, 3, 1, 2), labels[index]


@torch.no_grad()
def accuracies(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Accuracy on images as they are, and over six views of each: mirrored, and moved by a pixel."""
    net.eval()

    def both_ways(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = net(x)
        return logits, (logits + net(x.flip(-1))) / 2

    right = torch.zeros(2)
    for x, y in zip(images.split(2000), labels.split(2000), strict=True):
        x = x.contiguous(memory_format=torch.channels_last)
        moved = F.pad(x, (1, 1, 1, 1), mode="reflect")
        with torch.autocast("cpu", torch.bfloat16):
            plain, still = both_ways(x)
            views = still + (both_ways(moved[..., :-2, :-2])[1] + both_ways(moved[..., 2:, 2:])[1]) / 2
        right += torch.stack([(logits.argmax(1) == y).sum() for logits in (plain, views)])
    plain_share, views_share = (right / len(labels)).tolist()
    return plain_share, views_share


def main() -> None:
    """Train, evaluate, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=2000)
    parser.add_argument("--stop", type=int, help="steps after which to end, without evaluating")
    parser.add_argument("--compile", action="store_true", help="compile the network")
    parser.add_argument("--cpu-time", action="store_true", help="time the work of the process, not the wall")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    images, labels = read_split(args.folder / "train")
    floats = images.float()
    mean, std = floats.mean((0, 2, 3)).view(3, 1, 1), floats.std((0, 2, 3)).view(3, 1, 1)
    floats = (floats - mean) / std
    padded = F.pad(floats, (PAD,) * 4, mode="reflect").bfloat16().permute(0, 2, 3, 1).contiguous()

    net = Net(len(labels.unique())).to(memory_format=torch.channels_last)
    net.whiten.weight.data.copy_(whitening_filters(floats[torch.randperm(len(floats))[:5000]]))
    del images, floats
    if args.compile:
        net.compile()
    steps_per_epoch = len(labels) // args.batch_size
    num_steps, bias_steps = args.epochs * steps_per_epoch, 3 * steps_per_epoch
    # The source's rates, for the mean of a batch's losses.
    biases = [p for name, p in net.named_parameters() if "norm" in name and p.requires_grad]
    rates = [(net.whiten.bias, 106.0), *((bias, 106.0) for bias in biases), (net.head.weight, 1340.0)]
    groups = [{"params": [p], "lr": lr, "weight_decay": 4e-3 / lr} for p, lr in rates]
    sgd = torch.optim.SGD(groups, momentum=0.85, nesterov=True, fused=True)
    muon = Muon([p for p in net.parameters() if p.ndim == 4 and p.requires_grad], 0.24, 0.6)
    every_group = [*sgd.param_groups, *muon.param_groups]
    first_rates = [group["lr"] for group in every_group]

    net.train()
    mirrored = torch.rand(len(labels)) < 0.5
    clock = time.process_time if args.cpu_time else time.perf_counter
    step, times_s = 0, [clock()]
    last_step = min(num_steps, args.stop or num_steps)
    while step < last_step:
        for inputs, targets in epoch_batches(padded, labels, mirrored, args.batch_size):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(net(inputs), targets, label_smoothing=0.2)
            loss.backward()
            for group, rate in zip(every_group, first_rates, strict=True):
                group["lr"] = rate * (1 - step / num_steps)
            if step < bias_steps:
                every_group[0]["lr"] = first_rates[0] * (1 - step / bias_steps)
            else:
                net.whiten.requires_grad_(False)
            sgd.step()
            muon.step()
            for optimizer in (sgd, muon):
                optimizer.zero_grad(set_to_none=True)
            step += 1
            times_s.append(clock())
            if step == last_step:
                break
        # Every image turns over from one epoch to the next.
        mirrored = ~mirrored
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result: dict[str, object] = {"times_s": times_s, "memory_bytes": usage.ru_maxrss * 1024}
    if args.stop is None:
        test_images, test_labels = read_split(args.folder / "test")
        test_images = (test_images.float() - mean) / std
        result["plain"], result["views"] = accuracies(net, test_images, test_labels)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
