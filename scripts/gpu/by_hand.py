"""Training loops in plain torch, as a careful user writes them, on ptfast's models and the same noise.

    python -m scripts.gpu.by_hand '{"task": "gpt", "file": "text.txt", "precision": "bf16", ...}'

Answers as a child of `bench_switches` does: for every number read, it trains as many steps and prints what
they took. Batches are cut on the device, and nothing waits for a loss before the last step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ptfast.models.gpt import Gpt
from ptfast.models.resnet9 import ResNet9

DEVICE = torch.device("cuda")


def resnet9(
    job: dict[str, Any],
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], tuple[Tensor, Tensor]]]:
    """Random crops and flips of images on the device, SGD with Nesterov's momentum."""
    held = np.load(job["file"])
    images = torch.from_numpy(held["x"]).to(DEVICE).float().div_(255).sub_(0.5).div_(0.25)
    images = F.pad(images.permute(0, 3, 1, 2), (4, 4, 4, 4)).contiguous(memory_format=torch.channels_last)
    targets = torch.from_numpy(held["y"]).to(DEVICE)
    batch_size, span = job["batch_size"], torch.arange(32, device=DEVICE)
    model = ResNet9(10, width=job["width"]).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=5e-4, nesterov=True, fused=True)

    def batch() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(images), (batch_size,), device=DEVICE)
        top, left = torch.randint(9, (2, batch_size, 1), device=DEVICE)
        rows, columns = (top + span)[:, :, None], (left + span)[:, None, :]
        cut = images.permute(0, 2, 3, 1)[chosen[:, None, None], rows, columns].permute(0, 3, 1, 2)
        mirrored = torch.rand(batch_size, 1, 1, 1, device=DEVICE) < 0.5
        return torch.where(mirrored, cut.flip(3), cut), targets[chosen]

    return model, optimizer, batch


def gpt(job: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], tuple[Tensor, Tensor]]]:
    """Windows of a text on the device, AdamW."""
    codes = np.frombuffer(Path(job["file"]).read_text(encoding="utf-8").encode("utf-32-le"), dtype=np.uint32)
    letters, numbers = np.unique(codes, return_inverse=True)
    tokens = torch.from_numpy(numbers.astype(np.int64)).to(DEVICE)
    length, sizes = job["context_length"], {name: job[name] for name in ("width", "depth", "heads")}
    model = Gpt(len(letters), length, **sizes, tied_head=True).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 6e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    places = torch.arange(length + 1, device=DEVICE)

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(tokens) - length, (job["batch_size"], 1), device=DEVICE)
        windows = tokens[starts + places]
        return windows[:, :-1], windows[:, 1:]

    return model, optimizer, batch


def main(job: dict[str, Any]) -> None:
    """Build the loop of `job`, and train as many steps as each line of standard input says."""
    precision = job["precision"]
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = True
    model, optimizer, batch = {"resnet9": resnet9, "gpt": gpt}[job["task"]](job)
    forward, clips = torch.compile(model) if job["compiled"] else model, job["task"] == "gpt"

    def step(forward: Callable[[Tensor], Tensor]) -> Tensor:
        inputs, targets = batch()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(forward(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    with FlopCounterMode(display=False) as counter:
        step(model)
    facts = {"flops": counter.get_total_flops(), "batch_size": job["batch_size"]}
    for line in sys.stdin:
        step(forward)
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(int(line)):
            loss = step(forward)
        facts |= {"loss": loss.item(), "seconds": time.perf_counter() - start_s}
        torch.cuda.empty_cache()
        print(json.dumps({**facts, "peak_memory_bytes": torch.cuda.max_memory_allocated()}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
