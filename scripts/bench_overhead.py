"""Time per training step of one tiny network under ptfast, hand-written loops and other frameworks.

The network is so small that what surrounds it decides: an MLP 32 -> 64 -> 64 -> 10 (`--hidden 2`) and batches
of 64 out of 8,192 samples in memory. SGD with momentum, the learning rate falling linearly at every step, one
CPU thread, the loss read every 50 steps. Nothing is evaluated or saved while the clock runs. The clock is a
hook of the network itself: it runs from the forward pass of one step to that of a later one, so that what
each framework does at its start and its end stays out.

    python scripts/bench_overhead.py [--rounds 9] [--epochs 16] [--hidden 2] [--only NAME ...]

The peers come with `pip install '.[bench]'`; one that is not installed is left out, and that is said.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from bench_tools import interval, machine, silence, version_of
from peers import LOG_STEPS, Clock, Job, accelerate, by_hand, hf_trainer, ignite, lightning, ptfast
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 8192, 32, 10
BATCH_SIZE, LR, MOMENTUM = 64, 0.1, 0.9
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
FIRST_TIMED_STEP = STEPS_PER_EPOCH
"""The first epoch warms up caches and whatever a framework does once."""


class Points(TensorDataset):
    """Random points, labelled by a random network."""

    num_classes = NUM_CLASSES

    def __init__(self) -> None:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES)
            labeller = nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))
            super().__init__(inputs, labeller(inputs).argmax(1))


class Mlp(nn.Module):
    """The network."""

    num_hidden: ClassVar[int] = 2
    latest: ClassVar[Mlp]
    """The one made last, for frameworks that make it themselves."""

    def __init__(self) -> None:
        super().__init__()
        widths = [NUM_FEATURES] + [64] * Mlp.num_hidden
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(64, NUM_CLASSES))
        Mlp.latest = self

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, features) to logits."""
        return self.layers(inputs)


@dataclass
class Bench(Job):
    """The job of all loops: data, optimizer and schedule as tutorials make them."""

    points: ClassVar[Points] = Points()

    @property
    def total_steps(self) -> int:
        return self.epochs * STEPS_PER_EPOCH

    def build_model(self) -> Mlp:
        return Mlp()

    def samples(self, split: str) -> Points:
        return self.points

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def build_optimizer(self, model: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def lean_by_hand(bench: Job, clock: Clock) -> None:
    """The leanest loop that torch's documented interfaces allow, on ptfast's batches."""
    from ptfast.core.batch_plan import BatchPlan
    from ptfast.core.durations import Duration
    from ptfast.data.build_data import build_data
    from ptfast.data.loaders.build_loaders import build_train_loader
    from ptfast.data.loaders.pipeline import LoaderOptions
    from ptfast.data.sampling.sampler import Sharding

    total_steps = bench.epochs * STEPS_PER_EPOCH
    data = build_data(Bench.points, val=Duration.parse(0, "samples"), seed=0, task="auto", normalize=False)
    sharding = Sharding(BatchPlan(len(data.train), BATCH_SIZE), 1)
    in_memory = LoaderOptions(torch.device("cpu"), normalize=False, kind="memory")
    batches = build_train_loader(data, sharding, in_memory, seed=0)
    model = Mlp()
    clock.watch(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=True)
    group = optimizer.param_groups[0]
    rates = [LR * (1 - step / total_steps) for step in range(total_steps)]
    for step, batch in enumerate(batches.steps(0, total_steps)):
        inputs, targets = batch.micro_batches[0].data
        group["lr"] = rates[step]
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        if step % LOG_STEPS == LOG_STEPS - 1:
            loss.item()


def checked_steps(bench: Job, clock: Clock) -> None:
    """The same with every step checked for numbers that are not finite."""
    command_line(bench, clock, "numerics=skip", ptfast.WATCH)


def command_line(bench: Job, clock: Clock, *more: str) -> None:
    """ptfast's command line, in this process: composing, logging, seeding, saving and report included."""
    words = [
        *("train", f"epochs={bench.epochs}", f"batch_size={BATCH_SIZE}", f"log_every={LOG_STEPS}steps"),
        *("data=custom", "data._target_=bench_overhead.Points", "data.val=0", "data.normalize=false"),
        *("model=custom", "model._target_=bench_overhead.Mlp", "device=cpu", "backend.threads=1"),
        *("optimizer=sgd", f"optimizer.lr={LR}", f"optimizer.momentum={MOMENTUM}"),
        *("schedule=linear", "schedule.warmup=0", "eval.every=100%", "saving.every=100%"),
        *(f"run.root={bench.folder}", *(more or (ptfast.WATCH,))),
    ]
    ptfast.train(words, clock)


@dataclass(frozen=True)
class Contender:
    name: str
    train: Callable[[Job, Clock], object]
    packages: tuple[str, ...] = ()
    """The packages that it needs, as named in the package index."""


CONTENDERS = (
    Contender("ptfast", command_line),
    Contender("ptfast numerics=skip", checked_steps),
    Contender("by hand: ptfast's batches, fused SGD, LR table", lean_by_hand),
    Contender("by hand: DataLoader, SGD, LambdaLR", by_hand.train),
    Contender("Ignite", ignite.train, ("pytorch-ignite",)),
    Contender("Accelerate", accelerate.train, ("accelerate",)),
    Contender("Lightning, all off", lightning.train, ("lightning",)),
    Contender("HF Trainer", hf_trainer.train, ("transformers", "accelerate")),
    Contender("Lightning, default with self.log", partial(lightning.train, lean=False), ("lightning",)),
)


def measure(contender: Contender, bench: Bench) -> tuple[float, float]:
    """Microseconds per step of one run, and the loss it ends at (so that all can be seen to train alike)."""
    torch.manual_seed(0)
    clock = Clock()
    with silence():
        contender.train(bench, clock)
    times_s = [time_s for time_s, _ in clock.steps]
    if len(times_s) != bench.total_steps:
        raise RuntimeError(f"{contender.name} took {len(times_s)} steps, not {bench.total_steps}")
    num_steps = bench.total_steps - 1 - FIRST_TIMED_STEP
    inputs, targets = bench.points.tensors
    with torch.no_grad():
        loss = F.cross_entropy(Mlp.latest.eval()(inputs), targets).item()
    return (times_s[-2] - times_s[FIRST_TIMED_STEP]) / num_steps * 1e6, loss


def main() -> None:
    """Measure all contenders in turn, round by round, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, after one that warms up")
    parser.add_argument(
        "--epochs", type=int, default=16, help=f"length of a run, {STEPS_PER_EPOCH} steps each"
    )
    parser.add_argument("--hidden", type=int, default=2, help="hidden layers of the network, 1 or more")
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders whose name contains one of these words"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    Mlp.num_hidden = args.hidden
    # ptfast imports the network by its path: let that be this module, not a second copy of it.
    sys.modules["bench_overhead"] = sys.modules["__main__"]

    contenders = []
    for contender in CONTENDERS:
        if args.only and not any(word.lower() in contender.name.lower() for word in args.only):
            continue
        if missing := [package for package in contender.packages if version_of(package) is None]:
            print(f"left out: {contender.name} ({' and '.join(missing)} not installed)")
            continue
        contenders.append(contender)

    steps_us: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), BATCH_SIZE, args.epochs, LR, evaluates=False)
        for round_number in range(args.rounds + 1):
            shift = round_number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                step_us, losses[contender.name] = measure(contender, bench)
                if round_number:
                    steps_us[contender.name].append(step_us)
            print(f"round {round_number} of {args.rounds}", file=sys.stderr)

    print_table(contenders, steps_us, losses)
    packages = ["torch", *dict.fromkeys(package for c in contenders for package in c.packages)]
    versions = ", ".join(f"{package} {version_of(package)}" for package in packages)
    length = f"{bench.total_steps:,} steps, {args.hidden} hidden layers, 1 thread"
    print(f"\n{args.rounds} interleaved rounds of {length}. {versions}.")
    print(f"{machine()}.")


def print_table(
    contenders: list[Contender], steps_us: dict[str, list[float]], losses: dict[str, float]
) -> None:
    """One row per contender; a ratio is of two times taken in the same round."""
    first = contenders[0].name
    header = (
        "loop",
        "us per step [min-max]",
        "steps/s",
        f"time of {first} over this [95 %]",
        "speed-up",
        "loss",
    )
    print(f"\n| {' | '.join(header)} |")
    print("|---|--:|--:|--:|--:|--:|")
    for contender in contenders:
        times = steps_us[contender.name]
        ratios = [base / time_us for base, time_us in zip(steps_us[first], times, strict=True)]
        ratio, (low, high) = statistics.median(ratios), interval(ratios)
        median = statistics.median(times)
        print(
            f"| {contender.name} | {median:.0f} [{min(times):.0f}-{max(times):.0f}] | {1e6 / median:,.0f} "
            f"| {ratio:.3f} [{low:.3f}-{high:.3f}] | {1 / ratio:.2f}x | {losses[contender.name]:.3f} |"
        )


if __name__ == "__main__":
    main()
