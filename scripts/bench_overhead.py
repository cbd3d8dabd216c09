"""Time per training step of one tiny network under ptfast, hand-written loops and other frameworks.

The network is so small that what surrounds it decides: an MLP 32 -> 64 -> 64 -> 10 (`--hidden 2`) and batches
of 64 out of 8,192 samples in memory. SGD with momentum, the learning rate falling linearly at every step, one
CPU thread, the loss read every 50 steps. Nothing is evaluated or saved while the clock runs. The clock is in
the network itself: it runs from the forward pass of one step to that of a later one, so that what each
framework does at its start and its end stays out.

    python scripts/bench_overhead.py [--rounds 9] [--epochs 16] [--hidden 2] [--only NAME ...]

The peers come with `pip install 'ptfast[bench]'`; one that is not installed is left out, and that is said.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from bench_tools import interval, machine, silence, version_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 8192, 32, 10
BATCH_SIZE, LR, MOMENTUM, LOG_STEPS = 64, 0.1, 0.9, 50
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
    """The network, with the clock: `times_s` holds when each forward pass began."""

    num_hidden: ClassVar[int] = 2
    latest: ClassVar[Mlp]
    """The one that ran last, for frameworks that make it themselves."""

    def __init__(self) -> None:
        super().__init__()
        widths = [NUM_FEATURES] + [64] * Mlp.num_hidden
        hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(64, NUM_CLASSES))
        self.times_s: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, features) to logits."""
        self.times_s.append(time.perf_counter())
        Mlp.latest = self
        return self.layers(inputs)


@dataclass(frozen=True)
class Bench:
    """The data, the length of one run, and where a framework may write."""

    points: Points
    total_steps: int
    folder: Path

    @property
    def epochs(self) -> int:
        return self.total_steps // STEPS_PER_EPOCH

    def loader(self) -> DataLoader[Any]:
        """The batches as tutorials make them."""
        return DataLoader(self.points, batch_size=BATCH_SIZE, shuffle=True)

    def lr_factor(self, step: int) -> float:
        """Linear decay to 0."""
        return 1 - step / self.total_steps

    def optimizer(self, model: nn.Module) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LambdaLR]:
        """The optimizer and schedule as tutorials make them."""
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)


def tutorial(bench: Bench) -> Mlp:
    """The loop that tutorials write."""
    model = Mlp()
    optimizer, scheduler = bench.optimizer(model)
    step = 0
    for _ in range(bench.epochs):
        for inputs, targets in bench.loader():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % LOG_STEPS == 0:
                loss.item()
    return model


def by_hand(bench: Bench) -> Mlp:
    """The leanest loop that torch's documented interfaces allow, on ptfast's batches."""
    from ptfast.core.batch_plan import BatchPlan, constant
    from ptfast.core.durations import Duration
    from ptfast.data.build_data import build_data
    from ptfast.data.loaders.build_loaders import build_train_loader
    from ptfast.data.loaders.loading import ReaderOptions
    from ptfast.data.sampling.sampler import Sharding

    data = build_data(bench.points, val=Duration.parse(0, "samples"), seed=0, task="auto", normalize=False)
    sharding = Sharding(BatchPlan(len(data.train), constant(BATCH_SIZE)), 1)
    in_memory = ReaderOptions(torch.device("cpu"), normalize=False, kind="memory")
    batches = build_train_loader(data, sharding, in_memory, seed=0)
    model = Mlp()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, fused=True)
    group = optimizer.param_groups[0]
    rates = [LR * bench.lr_factor(step) for step in range(bench.total_steps)]
    for step, batch in enumerate(batches.steps(0, bench.total_steps)):
        inputs, targets = batch.micro_batches[0].data
        group["lr"] = rates[step]
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        if step % LOG_STEPS == LOG_STEPS - 1:
            loss.item()
    return model


def ptfast(bench: Bench) -> Mlp:
    """The command line, in this process: composing, logging, seeding, saving and report included."""
    from ptfast.cli.command_line import run

    code = run(
        [
            *("train", f"epochs={bench.epochs}", f"batch_size={BATCH_SIZE}", f"log_every={LOG_STEPS}steps"),
            *("data=custom", "data._target_=bench_overhead.Points", "data.val=0", "data.normalize=false"),
            *("model=custom", "model._target_=bench_overhead.Mlp", "device=cpu", "backend.threads=1"),
            *("optimizer=sgd", f"optimizer.lr={LR}", f"optimizer.momentum={MOMENTUM}"),
            *("schedule=linear", "schedule.warmup=0", "eval.every=100%", "saving.every=100%"),
            f"run.root={bench.folder}",
        ]
    )
    if code:
        raise RuntimeError(f"ptfast ended with exit code {code}")
    return Mlp.latest


def lightning_lean(bench: Bench) -> Mlp:
    """Lightning with everything switched off that can be."""
    return fit_lightning(
        bench,
        log=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning_default(bench: Bench) -> Mlp:
    """Lightning as it comes, logging with `self.log`."""
    return fit_lightning(bench, log=True)


def fit_lightning(bench: Bench, *, log: bool, **options: Any) -> Mlp:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Mlp()

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, targets = batch
            loss = F.cross_entropy(self.model(inputs), targets)
            if log:
                self.log("loss", loss)
            elif self.global_step % LOG_STEPS == LOG_STEPS - 1:
                loss.item()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = bench.optimizer(self)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=bench.epochs,
        log_every_n_steps=LOG_STEPS,
        default_root_dir=bench.folder,
        **options,
    )
    trainer.fit(module, bench.loader())
    return module.model


def accelerate(bench: Bench) -> Mlp:
    """The tutorial's loop with Accelerate around it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Mlp()
    optimizer, scheduler = bench.optimizer(model)
    wrapped, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, bench.loader(), scheduler)
    step = 0
    for _ in range(bench.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            step += 1
            if step % LOG_STEPS == 0:
                loss.item()
    return model


def hf_trainer(bench: Bench) -> Mlp:
    """The Trainer of transformers, clipping and saving off."""
    from transformers import Trainer, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Mlp()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.model(inputs)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            inputs, label = bench.points[index]
            return {"inputs": inputs, "labels": label}

    model = WithLoss()
    arguments = TrainingArguments(
        output_dir=str(bench.folder / "hf"),
        num_train_epochs=bench.epochs,
        per_device_train_batch_size=BATCH_SIZE,
        logging_steps=LOG_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_grad_norm=0.0,
        use_cpu=True,
    )
    Trainer(model, arguments, train_dataset=Samples(), optimizers=bench.optimizer(model)).train()
    return model.model


def ignite(bench: Bench) -> Mlp:
    """Ignite's supervised trainer."""
    from ignite.engine import Events, create_supervised_trainer

    model = Mlp()
    optimizer, scheduler = bench.optimizer(model)
    trainer = create_supervised_trainer(
        model, optimizer, F.cross_entropy, output_transform=lambda x, y, p, loss: loss
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=LOG_STEPS), lambda engine: engine.state.output.item()
    )
    trainer.run(bench.loader(), max_epochs=bench.epochs)
    return model


@dataclass(frozen=True)
class Contender:
    name: str
    train: Callable[[Bench], Mlp]
    packages: tuple[str, ...] = ()
    """The packages that it needs, as named in the package index."""


CONTENDERS = (
    Contender("ptfast", ptfast),
    Contender("by hand: ptfast's batches, fused SGD, LR table", by_hand),
    Contender("by hand: DataLoader, SGD, LambdaLR", tutorial),
    Contender("Ignite", ignite, ("pytorch-ignite",)),
    Contender("Accelerate", accelerate, ("accelerate",)),
    Contender("Lightning, all off", lightning_lean, ("lightning",)),
    Contender("HF Trainer", hf_trainer, ("transformers", "accelerate")),
    Contender("Lightning, default with self.log", lightning_default, ("lightning",)),
)


def measure(contender: Contender, bench: Bench) -> tuple[float, float]:
    """Microseconds per step of one run, and the loss it ends at (so that all can be seen to train alike)."""
    torch.manual_seed(0)
    with silence():
        model = contender.train(bench)
    times_s = model.times_s
    if len(times_s) != bench.total_steps:
        raise RuntimeError(f"{contender.name} took {len(times_s)} steps, not {bench.total_steps}")
    num_steps = bench.total_steps - 1 - FIRST_TIMED_STEP
    inputs, targets = bench.points.tensors
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs), targets).item()
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
        bench = Bench(Points(), args.epochs * STEPS_PER_EPOCH, Path(folder))
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
