"""How OpenMP's threads should wait for each other: time per step by policy, on a quiet and on a busy machine.

    python scripts/bench_waiting.py                        quiet
    python scripts/bench_waiting.py --neighbors 2         beside two processes that keep a core busy each
    python scripts/bench_waiting.py --ranks 2 --threads 2  two processes train at once, crowding the cores
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python scripts/bench_waiting.py

A policy is read when the OpenMP runtime loads, so each one has processes of its own. They stand still
(SIGSTOP) while another is measured, since threads that wait actively would keep a core busy; each round
begins with another policy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench_tools import interval, machine, version_of  # noqa: E402

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
POLICIES = {
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "as torch ships": {},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
}
WORKLOADS = ("resnet20", "resnet20_wide_8x8", "gpt")


def build(name: str) -> tuple:
    """A model and one batch for it."""
    import torch

    from ptfast.models.gpt import Gpt
    from ptfast.models.resnet_cifar import ResNetCifar

    torch.manual_seed(0)
    if name == "gpt":
        tokens = torch.randint(64, (16, 129))
        model = Gpt(vocab_size=64, context_length=128)
        return model, tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)
    side, batch, width = (32, 128, 16) if name == "resnet20" else (8, 64, 48)
    channels = 3 if name == "resnet20" else 1
    model = ResNetCifar(in_channels=channels, num_classes=10, depth=20, width=width)
    images = torch.randn(batch, channels, side, side).contiguous(memory_format=torch.channels_last)
    return model.to(memory_format=torch.channels_last), images, torch.randint(10, (batch,))


def child(names: list[str], threads: int) -> None:
    """Train a workload for so many seconds whenever asked to, and answer with the seconds of a step."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(threads)
    parts = {}
    for name in names:
        model, inputs, targets = build(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)
        parts[name] = model, optimizer, inputs, targets
    for line in sys.stdin:
        name, seconds = line.split()
        model, optimizer, inputs, targets = parts[name]
        num_steps, start_s = 0, time.perf_counter()
        while num_steps < 2 or time.perf_counter() - start_s < float(seconds):
            outputs = model(inputs)
            F.cross_entropy(outputs.reshape(len(targets), -1), targets).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            num_steps += 1
        print((time.perf_counter() - start_s) / num_steps, flush=True)


class Policy:
    """The processes that wait by one policy, at a stand except while they are measured."""

    def __init__(
        self, name: str, variables: dict[str, str], names: list[str], args: argparse.Namespace
    ) -> None:
        self.name = name
        environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        command = [sys.executable, __file__, "--child", *names, "--threads", str(args.threads)]
        self.processes = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment | variables
            )
            for _ in range(args.ranks)
        ]
        self.step_s: dict[str, list[float]] = {workload: [] for workload in names}

    def measure(self, workload: str, seconds: float) -> float:
        """Seconds of a step, the mean over ranks."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            print(workload, seconds, file=process.stdin, flush=True)
        answers = [float(process.stdout.readline()) for process in self.processes]  # type: ignore[union-attr]
        self.stop()
        return statistics.mean(answers)

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes beside this one that keep a core busy each."""
    # They end with this process, however it ends.
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10_000))"
    processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--neighbors", type=int, default=0, help="busy processes beside the training")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train at once")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process")
    parser.add_argument("--spins", type=int, nargs="*", default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    args = parser.parse_args()
    if args.child:
        child(args.child, args.threads)
        return 0
    chosen = POLICIES | {f"spin {count:,}": {"GOMP_SPINCOUNT": str(count)} for count in args.spins}
    policies = [Policy(name, variables, args.workloads, args) for name, variables in chosen.items()]
    try:
        for policy in policies:
            for workload in args.workloads:
                policy.measure(workload, args.seconds)
        with busy(args.neighbors):
            for index in range(args.rounds):
                turn = index % len(policies)
                for workload in args.workloads:
                    for policy in policies[turn:] + policies[:turn]:
                        policy.step_s[workload].append(policy.measure(workload, args.seconds))
                print(f"round {index + 1}/{args.rounds}", file=sys.stderr, flush=True)
    finally:
        for policy in policies:
            policy.end()
    first = policies[0]
    print(
        "| waiting | "
        + " | ".join(f"{name}: ms a step | over {first.name}" for name in args.workloads)
        + " |"
    )
    print("|---|" + "--:|--:|" * len(args.workloads))
    for policy in policies:
        cells = []
        for name in args.workloads:
            ratios = [own / base for own, base in zip(policy.step_s[name], first.step_s[name], strict=True)]
            low, high = interval(ratios)
            cells.append(f"{statistics.median(policy.step_s[name]) * 1e3:.1f}")
            cells.append(f"{statistics.median(ratios):.2f} [{low:.2f}-{high:.2f}]")
        print(f"| {policy.name} | {' | '.join(cells)} |")
    load = f"{args.ranks} rank(s) of {args.threads} thread(s), {args.neighbors} busy neighbor(s)"
    print(f"\n{load}, {args.rounds} rounds, torch {version_of('torch')}, {machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
