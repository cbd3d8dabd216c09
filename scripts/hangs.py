"""Hang a run in 46 ways, and see whether one SIGTERM, one Ctrl-C or `run.hang_timeout` ends it.

    python scripts/hangs.py [--only NAME ...] [--by term ctrl_c limit] [--at-once 4]

A run saves every other step and hangs at about its sixth, or before or after training, and is left for a
second. It must then be over within 90 seconds, with the exit code that the docs give; the place of the hang
must stand in a stack in the run directory or in a message; no process may be left; and the newest state must
be there still. Exits 1 if a run does not. About fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from ptfast.core.protocols import Callback, Logger
from ptfast.core.run_directory import read_json
from ptfast.core.tensors import checkpoint_files
from ptfast.tasks.ratios import Ratios
from ptfast.tasks.supervised import SupervisedTask

ROOT = Path(__file__).resolve().parent.parent
AT_STEP = 6
HANG_S, PATIENCE_S = 200.0, 90.0
LIMIT = "8s"
CODES = {"term": (75, 143), "ctrl_c": (130,), "limit": (7,)}
KILLED = -signal.SIGKILL
"""Code that keeps Python's lock, or stays outside of Python, cannot end its process: another one kills it."""


def hang_here(how: str) -> None:
    """Hang in the way that is asked for, having said so to whoever watches."""
    Path("hangs").touch()
    end_s = time.monotonic() + HANG_S
    if how == "sleep":
        time.sleep(HANG_S)
    elif how == "deaf":
        while time.monotonic() < end_s:
            try:
                time.sleep(1)
            except BaseException:
                continue
    elif how == "holds the lock":
        while time.monotonic() < end_s:
            all(itertools.repeat(True))
    elif how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=HANG_S)
    elif how == "queue":
        queue.Queue[int]().get(timeout=HANG_S)
    elif how == "thread":
        thread = threading.Thread(target=time.sleep, args=(HANG_S,), daemon=True)
        thread.start()
        thread.join()
    elif how == "process":
        subprocess.run(["sleep", str(HANG_S)], check=False)
    elif how == "socket":
        left, right = socket.socketpair()
        left.settimeout(HANG_S)
        left.recv(1)
        right.close()
    elif how == "pipe":
        reads, writes = os.pipe()
        os.write(writes, b"")
        os.read(reads, 1)
    elif how == "full pipe":
        print("x" * 10_000_000, flush=True)
    elif how == "call":
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "collective":
        torch.distributed.barrier()


class Rows(Dataset[Any]):
    """Random rows, one of which does not come: of training data by default, or of `held_out`."""

    num_classes = 2

    def __init__(self, how: str = "", at: int = 55, held_out: bool = False, builds: str = "") -> None:
        if builds:
            hang_here(builds)
        self.how, self.at, self.reads = how, at, 0
        self.inputs, self.targets = torch.randn(100, 4), torch.arange(100) % 2
        if held_out:
            self.how, self.val = "", Rows(how, at)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.how and self.reads == self.at:
            hang_here(self.how)
        return self.inputs[index], self.targets[index]


class Stream(IterableDataset[Any]):
    """The same without a length."""

    num_classes = 2

    def __init__(self, how: str) -> None:
        self.rows = Rows(how)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(100))


class HangingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, how: str) -> Tensor:
        ctx.how = how
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hang_here(ctx.how)
        return gradients[0], None


class Net(nn.Module):
    """A layer that hangs at a step, or in evaluation after it, or as it is built; on one rank or all."""

    def __init__(
        self, num_classes: int, how: str = "", where: str = "forward", rank: int | None = None
    ) -> None:
        super().__init__()
        if where == "builds":
            hang_here(how)
        self.how, self.where, self.passes = how, where, 0
        self.hangs = rank is None or rank == int(os.environ.get("RANK", "0"))
        self.layer = nn.Linear(4, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += self.training
        if self.hangs and self.how and self.passes == AT_STEP:
            if self.where == "backward" and self.training:
                inputs = HangingBackward.apply(inputs.requires_grad_(), self.how)
            elif self.where == ("forward" if self.training else "evaluation"):
                hang_here(self.how)
        return self.layer(inputs)


class Loss(SupervisedTask):
    """Classification whose loss hangs."""

    def __init__(self, info: Any, how: str) -> None:
        super().__init__(info)
        self.how, self.calls = how, 0

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == AT_STEP:
            hang_here(self.how)
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")


class Sgd(torch.optim.SGD):
    """SGD that hangs."""

    def __init__(self, parameters: Any, how: str, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.how, self.steps = how, 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        if self.steps == AT_STEP:
            hang_here(self.how)
        return super().step(closure)


class Calls(Callback):
    """Hangs in one of its methods."""

    def __init__(self, how: str, where: str = "step") -> None:
        self.how, self.where = how, where

    def _act(self, where: str, step: int) -> None:
        if where == self.where and step >= AT_STEP:
            hang_here(self.how)

    def on_start(self, run: Any) -> None:
        self._act("start", AT_STEP)
        if self.where == "disk":
            seal: Callable[..., Any] = checkpoint_files._seal

            def slow(draft: Path, step: int, *others: Any) -> Any:
                self._act("disk", step)
                return seal(draft, step, *others)

            checkpoint_files._seal = slow

    def on_step(self, run: Any, step: int) -> None:
        self._act("step", step)

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        self._act("evaluation", step)

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        self._act("save", step)

    def on_end(self, run: Any, status: str) -> None:
        self._act("end", AT_STEP)


class Metric(Ratios):
    """A metric that hangs as it is read."""

    computed = 0

    def compute(self) -> Any:
        Metric.computed += 1
        if self.computed == AT_STEP // 2:
            hang_here("sleep")
        return super().compute()


class Log(Logger):
    """A logger that hangs."""

    def __init__(self, where: str) -> None:
        self.where = where

    def open(self, folder: Path, config: Any) -> None:
        if self.where == "open":
            hang_here("sleep")

    def log(self, record: Any) -> None:
        if self.where == "log" and record["step"] == AT_STEP:
            hang_here("sleep")

    def close(self) -> None:
        if self.where == "close":
            hang_here("sleep")


DATA, NET = "data._target_=hangs.Rows", ("model=custom", "model._target_=hangs.Net")
WORKER = ("dataloader=workers", "dataloader.workers=1")
RANKS = ("parallel=ddp", "parallel.nproc=2", "device=cpu", *NET, "+model.rank=1")


def calls(how: str, where: str = "step") -> tuple[str, ...]:
    return (f"callbacks=[{{_target_: hangs.Calls, how: {how}, where: {where}}}]",)


KINDS: dict[str, tuple[str, ...]] = {
    "a read": ("dataloader=plain", "+data.how=sleep"),
    "a read, deaf": ("dataloader=plain", "+data.how=deaf"),
    "a read, holding the lock": ("dataloader=plain", "+data.how=holds the lock"),
    "a worker's read": (*WORKER, "+data.how=sleep"),
    "a worker's read, deaf": (*WORKER, "+data.how=deaf"),
    "a worker's read, holding the lock": (*WORKER, "+data.how=holds the lock"),
    "a stopped worker": (*WORKER, "+data.how=stopped"),
    "a stream": ("data._target_=hangs.Stream", "+data.how=sleep", "data.val=0"),
    "a held-out read": ("dataloader=plain", "+data.how=sleep", "+data.held_out=true", "+data.at=250"),
    "a worker's held-out read": (*WORKER, "+data.how=sleep", "+data.held_out=true", "+data.at=50"),
    "the data as it is built": ("+data.builds=sleep",),
    "the model as it is built": (*NET, "+model.how=sleep", "+model.where=builds"),
    "forward": (*NET, "+model.how=sleep"),
    "forward, deaf": (*NET, "+model.how=deaf"),
    "forward, holding the lock": (*NET, "+model.how=holds the lock"),
    "backward": (*NET, "+model.how=sleep", "+model.where=backward"),
    "backward, holding the lock": (*NET, "+model.how=holds the lock", "+model.where=backward"),
    "an evaluation": (*NET, "+model.how=sleep", "+model.where=evaluation"),
    "the loss": ("task._target_=hangs.Loss", "+task.how=sleep"),
    "the optimizer": ("optimizer._target_=hangs.Sgd", "+optimizer.how=sleep"),
    "the optimizer, holding the lock": (*("optimizer._target_=hangs.Sgd", "+optimizer.how=holds the lock"),),
    "a metric": ("metrics.own._target_=hangs.Metric",),
    "a logger that opens": ("logger.own._target_=hangs.Log", "+logger.own.where=open"),
    "a logger that logs": ("logger.own._target_=hangs.Log", "+logger.own.where=log"),
    "a logger that closes": ("logger.own._target_=hangs.Log", "+logger.own.where=close"),
    "a dead disk": calls("sleep", "disk"),
    "a dead disk, holding the lock": calls("holds the lock", "disk"),
    **{f"on_{where}": calls("sleep", where) for where in ("start", "evaluation", "save", "end")},
    "on_step": calls("sleep"),
    "on_step, deaf": calls("deaf"),
    "on_step, holding the lock": calls("holds the lock"),
    **{f"a {how}": calls(how) for how in ("lock", "queue", "thread", "process", "socket", "pipe")},
    "a call that never returns": calls("call"),
    "a full pipe": calls("full pipe"),
    "a rank's forward": (*RANKS, "+model.how=sleep"),
    "a rank's forward, holding the lock": (*RANKS, "+model.how=holds the lock"),
    "a stopped rank": (*RANKS, "+model.how=stopped"),
    "a collective of one rank": (*RANKS, "+model.how=collective"),
}
BASE = ("data=custom", DATA, "model.hidden=[8]", "batch_size=10", "steps=8", "epochs=null", "log_every=2")
BASE = (*BASE, "data.val=20samples", "eval.every=2steps", "saving.every=2steps", "run.dir=r", "seed=1")


def family(pid: int) -> set[int]:
    """A process and all that it has started, and they."""
    found = {pid}
    for child in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(child.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == pid:
            found |= family(int(child.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def saved_step(folder: Path) -> int:
    """The step of the newest state; -1 if there is none."""
    last = folder / "r/saved/last"
    return int(last.resolve().name.partition("-")[2]) if last.exists() else -1


def try_one(kind: str, by: str, folder: Path) -> str:
    """How a run that hangs in this way ended; the first word is `ok` if as it should."""
    folder.mkdir()
    given = {word.partition("=")[0].lstrip("+"): word for word in (*BASE, *KINDS[kind])}
    if "model" in given:
        del given["model.hidden"]
    words = [*given.values(), *([f"run.hang_timeout={LIMIT}"] if by == "limit" else [])]
    path = os.pathsep.join((str(ROOT), str(ROOT / "scripts")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "ptfast", "train", *words],
        cwd=folder,
        env=environment,
        stdout=writes if kind == "a full pipe" else (folder / "out.txt").open("w"),
        stderr=(folder / "err.txt").open("w"),
        start_new_session=True,
    )
    try:
        end_s = time.monotonic() + 120
        while not (folder / "hangs").exists():
            if process.poll() is not None or time.monotonic() > end_s:
                return f"never hung: {(folder / 'err.txt').read_text()[-300:]}"
            time.sleep(0.05)
        time.sleep(1)
        before = saved_step(folder)
        processes, start_s = family(process.pid), time.monotonic()
        if by == "term":
            os.kill(process.pid, signal.SIGTERM)
        elif by == "ctrl_c":
            os.killpg(process.pid, signal.SIGINT)
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"still there after {PATIENCE_S:.0f} s"
        took_s = time.monotonic() - start_s
        time.sleep(1.5)
        faults = []
        if left := [pid for pid in processes if alive(pid)]:
            faults.append(f"{len(left)} processes left")
        allowed = (*CODES[by], *((KILLED,) if "holding the lock" in kind or "call" in kind else ()))
        if kind in ("a logger that logs", "a logger that closes"):
            allowed += (0,)  # it is given up, and the run goes on to its end
        if code not in allowed:
            faults.append(f"exit code {code}")
        files = [folder / "err.txt", folder / "out.txt", *folder.glob("r/hang-*.txt")]
        told = "".join(file.read_text() for file in files if file.exists())
        told += str(read_json(folder / "r/summary.json"))
        # A signal wakes these, and they end after their step.
        wakes = by != "limit" and kind in ("a full pipe", "a stopped rank")
        names = ("hang_here", "hangs.py:", "it waits for data", ", stopped", "logger own", "wait for rank 1")
        names += ("Log did not finish",)
        if not wakes and not any(name in told for name in names):
            faults.append("not named")
        if (step := saved_step(folder)) < before:
            faults.append(f"saved step {step}")
        return f"{'; '.join(faults) or 'ok'} ({code}, {took_s:.0f} s, step {step})"
    finally:
        for pid in family(process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        os.close(reads)
        os.close(writes)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS], metavar="NAME")
    parser.add_argument("--by", nargs="+", choices=CODES, default=[*CODES])
    parser.add_argument("--at-once", type=int, default=4)
    asked = parser.parse_args()
    folder, cases = Path(tempfile.mkdtemp()), [(kind, by) for kind in asked.only for by in asked.by]
    good = 0
    with ThreadPoolExecutor(asked.at_once) as pool:
        ends = pool.map(
            lambda case: try_one(*case, folder / f"{case[0].replace(' ', '-')}-{case[1]}".replace("'", "")),
            cases,
        )
        for (kind, by), end in zip(cases, ends, strict=True):
            good += end.startswith("ok")
            print(f"{kind:36} {by:7} {end}", flush=True)
    print(f"{good} of {len(cases)} ended as they should")
    if good == len(cases):
        shutil.rmtree(folder)
    else:
        print(f"their output is in {folder}")
    return int(good < len(cases))


if __name__ == "__main__":
    sys.exit(main())
