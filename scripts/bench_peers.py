"""Whole trainings under ptfast, a loop by hand and other trainers: speed, time to a figure, memory.

    python scripts/bench_peers.py --data FOLDER
    python scripts/bench_peers.py --data FOLDER --task gpt --precision bf16 --rounds 5 --results FILE

FOLDER holds `cifar/train/CLASS/*.jpg` and `cifar/test/CLASS/*.jpg`, `sst2/train.tsv` and `sst2/dev.tsv`, and
`tinyshakespeare.txt`. Each training is a process of its own, on all cores. In a round every peer trains once,
with the round's number as its seed; each round begins with another. All train the same model on the same
samples for as many epochs, at the same batch size, precision and rates, with the flags that their own docs
recommend, save compiling, which on a CPU takes longer than these trainings.

Samples a second are those of the steps between evaluations. Times count from the start of the process; a
target is reached somewhere between two evaluations, on a straight line from one to the next. Memory is the
peak. Results are added to FILE, and the table is of all rounds in it.

On a busy machine, --cpu-time counts the processor time of trainings on one thread each instead.

With --device cuda, all train on the GPU. The host then runs ahead by some steps, so compare long trainings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bench_tools import add_result, interval, machine, read_results, silence, version_of  # noqa: E402
from peers import Clock  # noqa: E402

IMAGES, TEXTS = ("resnet", "mobilenet"), ("sst2", "gpt")


class Peer(NamedTuple):
    """One row of the table."""

    title: str
    packages: tuple[str, ...] = ()
    """What it needs, as named in the package index."""
    tasks: tuple[str, ...] = IMAGES + TEXTS


PEERS = {
    "by_hand": Peer("by hand"),
    "ptfast": Peer("ptfast"),
    "lightning": Peer("Lightning", ("lightning",)),
    "accelerate": Peer("Accelerate", ("accelerate",)),
    "hf_trainer": Peer("HF Trainer", ("transformers", "accelerate")),
    "timm": Peer("timm", ("timm",), IMAGES),
}
"""By the module of `peers`. The others are compared with the first."""


def main() -> None:
    """Train for some rounds, and print a table for each task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "ptfast-bench-peers")
    parser.add_argument("--task", nargs="+", choices=IMAGES + TEXTS, default=IMAGES + TEXTS)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time, on one thread")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=tuple(PEERS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds to add; 0 prints the tables alone")
    parser.add_argument("--epochs", type=int, help="in place of the task's own")
    parser.add_argument("--samples", type=int, help="of an epoch, in place of the task's own")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to add to")
    args = parser.parse_args()
    from peers.tasks import TASKS

    given = {"epochs": args.epochs, "num_train": args.samples}
    chosen = {name: value for name, value in given.items() if value is not None}
    places = {"data": str(args.data.absolute()), "cache": str(args.cache.absolute())}
    peers = []
    for name in args.only:
        if missing := [package for package in PEERS[name].packages if version_of(package) is None]:
            print(f"left out: {PEERS[name].title} ({' and '.join(missing)} not installed)")
        else:
            peers.append(name)
    with tempfile.TemporaryDirectory() as folder:
        file = args.results or Path(folder) / "results"
        for task in args.task:
            options = {**TASKS[task][1], **chosen, **places, "bf16": args.precision == "bf16"}
            options["device"] = args.device
            key = {"task": task, "bf16": options["bf16"], "cpu_time": args.cpu_time}
            key |= {"device": args.device} if args.device != "cpu" else {}
            able = [name for name in peers if task in PEERS[name].tasks]
            first = 1 + max((result["round"] for result in read_results(file, key)), default=-1)
            for number in range(first, first + args.rounds):
                turn = number % len(able)
                for name in able[turn:] + able[:turn]:
                    place = Path(folder) / f"{task}-{name}-{number}"
                    result = train_apart(name, task, options, number, place, cpu_time=args.cpu_time)
                    print(f"round {number}: {name} {result['samples_per_s']:.0f}/s", file=sys.stderr)
                    add_result(file, {**key, "round": number, "peer": name, **result})
            print_table(task, options, read_results(file, key))
    packages = ["torch", *dict.fromkeys(package for name in peers for package in PEERS[name].packages)]
    print(f"\n{', '.join(f'{name} {version_of(name)}' for name in packages)}, {machine()}.")


def build_job(task: str, options: dict[str, Any], folder: Path) -> Any:
    """The job of a task; `options` are its other fields, as JSON has them."""
    from peers.tasks import TASKS

    paths = {name: Path(options[name]) for name in ("data", "cache")}
    return TASKS[task][0](folder=folder, **{**options, **paths})


def train_apart(
    name: str, task: str, options: dict[str, Any], seed: int, folder: Path, *, cpu_time: bool
) -> dict[str, Any]:
    """What one training took, in a process of its own."""
    from peers import ptfast

    folder.mkdir(parents=True)
    job = build_job(task, options, folder)
    job.prepare()
    words = ptfast.words_of(job, seed)
    order = {
        "peer": name,
        "task": task,
        "options": options,
        "seed": seed,
        "folder": str(folder),
        "words": words,
        "cpu_time": cpu_time,
    }
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if cpu_time:
        environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, __file__, "--child", json.dumps(order)]
    start_s = 0.0 if cpu_time else time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} failed on {task}:\n{done.stdout}{done.stderr}")
    answer = json.loads((folder / "answer.json").read_text())
    clock = Clock(**answer["clock"])
    return {
        "samples_per_s": clock.samples_per_s(),
        "first_step_s": clock.steps[0][0] - start_s,
        "evaluations": [(moment - start_s, figure) for moment, figure in clock.evaluations],
        "steps": len(clock.steps),
        "memory_bytes": answer["memory_bytes"],
    }


def child(order: dict[str, Any]) -> None:
    """Train as one peer, in this process."""
    clock, folder = Clock(order["cpu_time"]), Path(order["folder"])
    peer = importlib.import_module(f"peers.{order['peer']}")
    with silence():
        if order["peer"] == "ptfast":
            peer.train(order["words"], clock)  # torch is not imported yet
        else:
            import torch

            torch.manual_seed(order["seed"])
            peer.train(build_job(order["task"], order["options"], folder), clock)
    from ptfast.core.machine import peak_memory_bytes

    answer = {"clock": vars(clock), "memory_bytes": peak_memory_bytes(order["options"]["device"])}
    (folder / "answer.json").write_text(json.dumps(answer))


def print_table(task: str, options: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    """One row per peer; ratios are of two trainings of the same round."""
    from peers.tasks import TASKS

    first, kind = next(iter(PEERS)), TASKS[task][0]
    for result in results:
        result["target_s"] = kind.reached_s(result["evaluations"], options["target"])
    base = {result["round"]: result for result in results if result["peer"] == first}
    length = f"{options['epochs']} epochs of {options['num_train']:,} samples, batch {options['batch_size']}"
    print(f"\n{task}, {'bfloat16' if options['bf16'] else 'float32'}: {length}, target {options['target']}\n")
    over = f"times {PEERS[first].title} [95 %]"
    print(f"| | samples/s [min-max] | {over} | target after | {over} | first step | memory | reached, last |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, peer in PEERS.items():
        if not (own := [result for result in results if result["peer"] == name]):
            continue
        columns = {key: [result[key] for result in own if result[key] is not None] for key in own[0]}
        speeds, times = columns["samples_per_s"], columns["target_s"]
        ends = [evaluations[-1][1] for evaluations in columns["evaluations"]]
        ratios = [
            with_interval(
                [
                    result[key] / base[result["round"]][key]
                    for result in own
                    if result[key] and base.get(result["round"], {}).get(key)
                ]
            )
            for key in ("samples_per_s", "target_s")
        ]
        cells = [
            peer.title,
            f"{statistics.median(speeds):,.0f} [{min(speeds):,.0f}-{max(speeds):,.0f}]",
            ratios[0],
            f"{statistics.median(times):.1f} s" if times else "never",
            ratios[1],
            f"{statistics.median(columns['first_step_s']):.1f} s",
            f"{statistics.median(columns['memory_bytes']) / 2**20:,.0f} MiB",
            f"{len(times)} of {len(own)}, {statistics.median(ends):.3f}",
        ]
        print(f"| {' | '.join(cells)} |")


def with_interval(ratios: Sequence[float]) -> str:
    """Median and interval of ratios."""
    if not ratios:
        return ""
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.2f} [{low:.2f}-{high:.2f}]"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    else:
        main()
