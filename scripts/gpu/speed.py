"""Stage 2: CIFAR-10 to a fixed accuracy over seeds, and throughput beside a loop by hand, by precision."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from scripts.gpu.check import ROOT, Check, FailedError, Figures, NotShownError, OutOfTimeError, Part
from scripts.gpu.noise import write_folders, write_images, write_text

# The benches import one another by their bare names.
sys.path.insert(1, str(ROOT / "scripts"))

from bench_switches import Contender
from bench_tools import interval

NO_SPEED = "runs to its end; the emulation has no speed"
SEEDS = range(5)
LEAST_ACCURACY = {"cifar10": 0.94, "imagefolder": 0.90}
"""Of the mean over seeds: for the published pixels, and for JPEG copies of quality 75."""
PRECISIONS = ("bf16", "tf32", "fp32")
ROWS = [(precision, "none") for precision in PRECISIONS] + [("bf16", "model")]
"""Precision and compiling of the rows beside a loop by hand."""
STATED_PEAKS = {
    "A100": (312e12, 156e12, 19.5e12),
    "H100 80GB HBM3": (989e12, 495e12, 67e12),
    "H200": (989e12, 495e12, 67e12),
}
"""Operations a second that the makers state for dense products, in the order of `PRECISIONS`."""
SIZES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "resnet9": ({"model.width": 64, "batch_size": 512}, {"model.width": 4, "batch_size": 16}),
    "gpt": (
        {"model.width": 768, "model.depth": 12, "model.heads": 12}
        | {"data.context_length": 1024, "batch_size": 16},
        {"model.width": 16, "model.depth": 2, "model.heads": 2}
        | {"data.context_length": 32, "batch_size": 4},
    ),
    "resnet50": ({"batch_size": 64}, {"batch_size": 4}),
}
"""Of each model, and its smallest ones for --quick. The GPT is GPT-2 with 124 M parameters."""
IMAGES = {"resnet9": ((50_000, 32, 10), (500, 32, 10)), "resnet50": ((1024, 224, 1000), (16, 32, 10))}
"""Of noise: number, side and classes."""
_IMAGES = ("data=arrays", "optimizer=sgd_cifar", "optimizer.lr=0.01", "data.val=0", "schedule=constant")
WORDS = {
    "resnet9": (
        *_IMAGES,
        *("model=resnet9", "data.path=resnet9.npz", "augment=crop_flip", "dataloader=device"),
    ),
    "gpt": (
        *("model=gpt2_124m", "data=text_file", "data.path=tokens.txt", "optimizer=adamw_gpt2"),
        *("gradients=clip", "data.val=0", "schedule=constant"),
    ),
    "resnet50": (*_IMAGES, "model=torchvision", "model.name=resnet50", "data.path=resnet50.npz"),
}
STEPS = {"resnet9": 100, "gpt": 10}
"""Of a round, of the models that have a loop by hand."""


def words_of(task: str, check: Check) -> list[str]:
    """What ptfast trains; its noise is written if need be."""
    if task == "gpt":
        write_text(check.scratch / "tokens.txt", *((64, 100_000) if check.quick else (50_304, 2_000_000)))
    else:
        write_images(check.scratch / f"{task}.npz", *IMAGES[task][check.quick])
    return [
        *WORDS[task],
        *(f"{key}={value}" for key, value in SIZES[task][check.quick].items()),
        "device=cuda",
    ]


def check_compiler(compile_as: str, check: Check) -> None:
    """Refuse an option of `compile` that cannot be shown here."""
    if check.emulated and compile_as != "none":
        raise NotShownError("the emulation cannot compile")


def beside_by_hand(task: str, precisions: Sequence[str], check: Check) -> Figures:
    """Train with ptfast and with loops by hand: processes that start at once, then take turns."""
    words = words_of(task, check)
    sizes = {key.rpartition(".")[2]: value for key, value in SIZES[task][check.quick].items()}
    job = {
        "task": task,
        **sizes,
        "file": str(check.scratch / ("tokens.txt" if task == "gpt" else f"{task}.npz")),
    }
    endless = ("epochs=null", "steps=1000000", "log_every=1000000steps")
    ours: dict[tuple[str, str], Contender] = {}
    theirs: dict[tuple[str, bool], Contender] = {}
    for precision, kind in ROWS:
        if precision not in precisions or (check.emulated and kind != "none"):
            continue
        own = (f"precision={precision}", f"compile={kind}", *endless)
        bench = ROOT / "scripts/bench_switches.py"
        ours[precision, kind] = start(check, f"ptfast, {precision}, {kind}", bench, "--child", *words, *own)
        compiled = kind != "none"
        if (precision, compiled) not in theirs:
            given = json.dumps({**job, "precision": precision, "compiled": compiled})
            name = f"by hand, {precision}{', compiled' if compiled else ''}"
            theirs[precision, compiled] = start(check, name, "-m", "scripts.gpu.by_hand", given)
    rows = [*ours.values(), *theirs.values()]
    rounds, steps = (3, 2) if check.quick else (7, STEPS[task])
    stop = threading.Timer(max(check.left_s, 0), kill, rows)
    stop.start()
    try:
        with ThreadPoolExecutor(len(rows)) as pool:
            list(pool.map(lambda row: row.ask(steps), rows))
        for index in range(rounds):
            turn = index % len(rows)
            for row in rows[turn:] + rows[:turn]:
                row.facts = row.ask(steps)
                row.seconds.append(row.facts["seconds"])
            print(f"round {index + 1}/{rounds}: {[round(row.seconds[-1], 3) for row in rows]} s", flush=True)
    except RuntimeError as error:
        raise OutOfTimeError if check.left_s <= 0 else FailedError(str(error)) from None
    finally:
        stop.cancel()
        kill(*rows)
    tokens, figures = sizes.get("context_length", 1), {}
    for (precision, kind), row in ours.items():
        found = compared(row, theirs[precision, kind != "none"], steps, tokens)
        stated = next((peaks for name, peaks in STATED_PEAKS.items() if name in check.gpu), None)
        if stated is not None:
            found["MFU"] = round(found["TFLOP/s"] * 1e12 / stated[PRECISIONS.index(precision)], 3)
        figures[f"{precision}, compile={kind}"] = found
    if check.emulated:
        raise NotShownError(NO_SPEED, {name: found["memory MiB"] for name, found in figures.items()})
    return figures


def start(check: Check, name: str, *words: object) -> Contender:
    """A row's process, which waits for orders."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, words)]
    process = subprocess.Popen(
        command, cwd=check.scratch, env=check.environment(), start_new_session=True, **pipes
    )
    return Contender(name, process)


def kill(*rows: Contender) -> None:
    """End the rows and all that they started."""
    for row in rows:
        if row.process.poll() is None:
            os.killpg(row.process.pid, signal.SIGKILL)


def compared(ours: Contender, theirs: Contender, steps: int, tokens: int) -> Figures:
    """Samples, or tokens, a second of both rows, and their ratio with its interval."""
    rates = [
        steps * row.facts["batch_size"] * tokens / statistics.median(row.seconds) for row in (ours, theirs)
    ]
    ratios = [other / own for own, other in zip(ours.seconds, theirs.seconds, strict=True)]
    figures: Figures = dict(zip(("ptfast /s", "by hand /s"), map(round, rates), strict=True))
    figures["times by hand"] = round(statistics.median(ratios), 3)
    figures["95 %"] = [round(end, 3) for end in interval(ratios)]
    figures["TFLOP/s"] = round(theirs.facts["flops"] * steps / statistics.median(ours.seconds) / 1e12, 1)
    figures["memory MiB"] = [round(row.facts["peak_memory_bytes"] / 2**20) for row in (ours, theirs)]
    return figures


def images(check: Check) -> tuple[str, str]:
    """CIFAR-10 in the folder of data, as words for ptfast: the published files, or JPEG copies by class."""
    if check.quick:
        write_folders(check.scratch / "cifar", 10, 32)
        return "data=imagefolder", f"data.root={check.scratch / 'cifar'}"
    if check.data is None:
        raise NotShownError("no data: give --data FOLDER with CIFAR-10, or put it into shared/data")
    if any((check.data / name).exists() for name in ("cifar-10-batches-py", "cifar-10-python.tar.gz")):
        return "data=cifar10", f"data.root={check.data}"
    for folder in (check.data, check.data / "cifar", check.scratch / "cifar"):
        if (folder / "train").is_dir():
            return "data=imagefolder", f"data.root={folder}"
    if not (archive := check.data / "cifar10-jpeg.tar.xz").is_file():
        raise NotShownError(
            f"no CIFAR-10 in {check.data}: cifar-10-batches-py, train/CLASS, or {archive.name}"
        )
    with tarfile.open(archive) as held:
        held.extractall(check.scratch / "cifar", filter="data")
    inner = next(path.parent for path in (check.scratch / "cifar").glob("**/train"))
    return "data=imagefolder", f"data.root={inner}"


def speedrun(seed: int, compile_as: str, check: Check) -> Figures:
    """`recipes/cifar_speedrun.yaml` with one seed."""
    check_compiler(compile_as, check)
    words = ("recipe=cifar_speedrun", *images(check), f"compile={compile_as}", "device=cuda")
    small = ("model.widths=[4,8,8]", "batch_size=80", "eval.batch_size=80") if check.quick else ()
    folder = check.scratch / f"speedrun-{compile_as}-{seed}"
    check.ptfast("train", *words, *small, f"seed={seed}", f"run.dir={folder}")
    found = json.loads((folder / "summary.json").read_text())
    others = ("start_up", "warm_up", "evaluation", "saving", "closing")
    training_s = found["wall_s"] - sum(found["time_budget"].get(name, 0.0) for name in others)
    figures = {
        "data": words[1].removeprefix("data="),
        "test accuracy": found["test"]["accuracy"],
        "training s": round(training_s, 2),
        "wall s": round(found["wall_s"], 1),
        "samples /s": found["train_samples_per_s"],
    }
    if check.emulated:
        raise NotShownError("runs to its end, on noise", figures if not check.quick else {})
    return figures


def over_seeds(compile_as: str, check: Check) -> Figures:
    """Mean and deviation of the runs before."""
    assert check.record is not None
    names = [speedrun_name(seed, compile_as) for seed in SEEDS]
    entries = [check.record.entries(2)[name] for name in names]
    if why := next((entry["why"] for entry in entries if entry["state"] != "passed"), ""):
        raise NotShownError(why)
    runs = [entry["figures"] for entry in entries]
    figures = {}
    for name in ("test accuracy", "training s", "wall s"):
        values = [run[name] for run in runs]
        figures[name] = f"{statistics.mean(values):.4g} (deviation {statistics.stdev(values):.2g})"
    least, mean = LEAST_ACCURACY[runs[0]["data"]], statistics.mean(run["test accuracy"] for run in runs)
    if mean < least:
        raise FailedError(f"below {least}, the accuracy expected of this data", figures)
    return figures


def speedrun_name(seed: int, compile_as: str) -> str:
    return f"CIFAR-10, compile={compile_as}, seed {seed}"


def parts() -> list[Part]:
    """Of stage 2."""
    listed = []
    for compile_as in ("none", "model"):
        for seed in SEEDS:
            listed.append(Part(speedrun_name(seed, compile_as), partial(speedrun, seed, compile_as), 90))
        listed.append(Part(f"CIFAR-10, compile={compile_as}, all seeds", partial(over_seeds, compile_as), 1))
    for task, together in (("resnet9", PRECISIONS), ("gpt", ("bf16",)), ("gpt", ("tf32", "fp32"))):
        run = partial(beside_by_hand, task, together)
        listed.append(Part(f"{task}, {' and '.join(together)}, beside a loop by hand", run, 120))
    return listed


STAGE_2 = parts()
