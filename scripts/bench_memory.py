"""Savings and cost of activation checkpointing: bytes kept for backward, peak memory, time of a step.

    python scripts/bench_memory.py                               ResNet-110 and the GPT on the CPU
    python scripts/bench_memory.py gpt --compile --batch-size 8  with the compiler's memory budgets
    python scripts/bench_memory.py --device cuda --precision bf16

Each row is a process of its own, so that none finds memory that another has left. In every round all of
them take the same number of optimizer steps, one after the other, each round beginning with another. Ratios
are to the first row, those of compiled rows to the compiled model without a budget. Time on a CPU is the
processor's, which a busy machine lengthens less than the clock's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_tools import interval, machine, silence, version_of  # noqa: E402

MODELS = {
    "resnet110": ("ResNet-110, 32x32 pixels", 64),
    "gpt": ("GPT, 12 blocks of width 256, 256 tokens", 8),
}
"""Each model in words, and its batch size."""
EAGER = ("none", "full", "every_n", "selective")
COMPILED = ("compile=model", "budget 0.5", "budget 0.2")


@dataclass
class Row:
    """One row: its process, which waits for orders."""

    name: str
    process: subprocess.Popen[str]
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    def ask(self, order: str) -> Any:
        """Give an order and wait for its answer."""
        assert self.process.stdin
        assert self.process.stdout
        print(order, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended: see above")
        return json.loads(line)


class Bench:
    """A model in one mode, and what can be asked of it."""

    def __init__(self, model: str, mode: str, device: str, batch_size: int, precision: str) -> None:
        import torch
        import torch.nn.functional as F

        from ptfast.models.gpt import Gpt
        from ptfast.models.resnet_cifar import ResNetCifar
        from ptfast.techniques.checkpointing import Checkpointing
        from ptfast.techniques.checkpointing.activation_checkpointing import (
            apply_checkpointing,
            apply_memory_budget,
        )

        self.torch, self.device, self.loss = torch, torch.device(device), F.cross_entropy
        self.autocast = torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")
        torch.manual_seed(0)
        if model == "gpt":
            self.model: Any = Gpt(
                vocab_size=256, context_length=256, width=256, depth=12, heads=8, dropout=0.1
            )
            tokens = torch.randint(256, (batch_size, 257), device=device)
            self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:]
        else:
            self.model = ResNetCifar(10, depth=110).to(memory_format=torch.channels_last)
            images = torch.randn(batch_size, 3, 32, 32, device=device)
            self.inputs = images.contiguous(memory_format=torch.channels_last)
            self.targets = torch.randint(10, (batch_size,), device=device)
        self.model.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, fused=True)
        if mode in EAGER:
            apply_checkpointing(self.model, Checkpointing(mode=mode, every=2))  # type: ignore[arg-type]
        else:
            apply_memory_budget(float(mode.split()[1]) if mode.startswith("budget") else None)
            self.model.compile()

    def forward(self) -> Any:
        """The loss of the batch."""
        with self.autocast:
            logits = self.model(self.inputs)
            return self.loss(logits.flatten(0, -2), self.targets.flatten())

    def steps(self, count: int) -> float:
        """Take steps; returns their seconds."""
        clock = time.perf_counter if self.device.type == "cuda" else time.process_time
        self.synchronize()
        start_s = clock()
        for _ in range(count):
            self.forward().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.synchronize()
        return clock() - start_s

    def synchronize(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def saved_bytes(self) -> int:
        """Bytes that a forward pass keeps for the backward pass beside parameters, each storage once."""
        held = {t.untyped_storage().data_ptr() for t in (*self.model.parameters(), *self.model.buffers())}
        found: dict[int, Any] = {}

        def pack(tensor: Any) -> Any:
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage())
            return tensor

        with self.torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.forward()
        total = sum(storage.nbytes() for address, storage in found.items() if address not in held)
        del loss
        return total

    def peak_bytes(self) -> tuple[int, int]:
        """The most memory that two steps take, in all and beyond what rests between them."""
        if self.device.type == "cuda":
            self.torch.cuda.reset_peak_memory_stats()
            resting = self.torch.cuda.memory_allocated()
            self.steps(2)
            peak = self.torch.cuda.max_memory_allocated()
        else:
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            resting = status_bytes("VmRSS")
            self.steps(2)
            peak = status_bytes("VmHWM")
        return peak, peak - resting


def status_bytes(name: str) -> int:
    """A figure of this process's memory, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def child(options: dict[str, Any]) -> None:
    """Build one row, and answer orders: `facts` once, then a number of steps to take."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with silence():
        bench = Bench(**options)
        for line in sys.stdin:
            if line.strip() == "facts":
                saved = bench.saved_bytes()
                bench.steps(2)
                peak, beyond = bench.peak_bytes()
                answer: Any = {"saved": saved, "peak": peak, "beyond": beyond}
            else:
                answer = bench.steps(int(line))
            print(json.dumps(answer), file=answers, flush=True)


def start(mode: str, options: dict[str, Any]) -> Row:
    """The process of one row."""
    command = [sys.executable, __file__, "--child", json.dumps({**options, "mode": mode})]
    return Row(mode, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))


def table(rows: list[Row], num_steps: int) -> None:
    """Print the rows of one model as markdown."""
    print("| checkpointing | kept for backward | ratio | peak of a step | ratio | in all | time [95 %] |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        base = next(r for r in rows if r.name == (EAGER if row.name in EAGER else COMPILED)[0])
        kept, beyond, peak = (row.facts[name] / 2**20 for name in ("saved", "beyond", "peak"))
        ratios = [own / other for own, other in zip(row.seconds, base.seconds, strict=True)]
        low, high = interval(ratios)
        cells = [
            f"`{row.name}`",
            f"{kept:,.0f} MiB",
            f"{row.facts['saved'] / base.facts['saved']:.2f}",
            f"{beyond:,.0f} MiB",
            f"{row.facts['beyond'] / base.facts['beyond']:.2f}",
            f"{peak:,.0f} MiB",
            f"{statistics.median(ratios):.2f} [{low:.2f}-{high:.2f}]"
            if row is not base
            else f"1 ({statistics.median(row.seconds) / num_steps * 1000:,.0f} ms)",
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> int:
    """Measure and print; returns the exit code."""
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="all of them if none is named")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int)
    parser.add_argument(
        "--compile", action="store_true", help="rows of the compiled model and its budgets too"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps of a row in each round")
    args = parser.parse_args()
    for model in args.models or MODELS:
        what, batch_size = MODELS[model]
        options = {
            "model": model,
            "device": args.device,
            "batch_size": args.batch_size or batch_size,
            "precision": args.precision,
        }
        rows = [start(mode, options) for mode in (*EAGER, *(COMPILED if args.compile else ()))]
        for row in rows:
            row.facts = row.ask("facts")
        for index in range(args.rounds):
            turn = index % len(rows)
            for row in rows[turn:] + rows[:turn]:
                row.seconds.append(row.ask(str(args.steps)))
            print(f"{model}: round {index + 1}/{args.rounds}", file=sys.stderr, flush=True)
        for row in rows:
            row.process.communicate()
        table(rows, args.steps)
        print(
            f"\n{what}, batches of {options['batch_size']}, {args.precision}: {args.rounds} rounds of"
            f" {args.steps} steps, {args.device}, {os.environ.get('OMP_NUM_THREADS', 'all')} threads, torch"
            f" {version_of('torch')}, {machine()}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
