"""Stage 3: launch gaps, what switches are worth, other trainers, and `find batch` until memory ends."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from typing import Any

from scripts.gpu.check import ROOT, Check, Figures, NotShownError, Part
from scripts.gpu.speed import NO_SPEED, STEPS, check_compiler, images, words_of

ON_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
NUM_PROFILED = 5
LOADERS = ("workers", "plain", "memory", "device")
"""The first is torch's DataLoader."""
COMMON_ROWS = (
    *("plain", "safe", "plain precision=tf32", "plain precision=bf16", "plain optimizer.fused=true", "fast"),
    *(f"fast precision=bf16 checkpointing={kind}" for kind in ("full", "selective")),
    *(f"fast precision=bf16 compile={kind}" for kind in ("blocks", "model", "reduce_overhead")),
)
SWITCHES = {
    "resnet50": (
        *COMMON_ROWS,
        *("plain precision=amp", "plain rewrites.channels_last=true", "plain backend.cudnn_benchmark=true"),
    ),
    "gpt": COMMON_ROWS,
    "resnet9": tuple(f"fast precision=bf16 dataloader={kind}" for kind in LOADERS),
}
BYTES_VARIABLES = ("EMULATED_GPU_BYTES", "NULLCUDA_BYTES")
"""Memory of an emulated GPU."""
PEER_DATA = ("sst2", "tinyshakespeare.txt")
PEER_SAMPLES = {"resnet": (12_800, 320), "mobilenet": (1600, 160), "sst2": (6920, 320), "gpt": (3200, 128)}
"""Of an epoch, by task; the second ones, five batches, for --quick."""


def gaps(events: Iterable[dict[str, Any]], num_steps: int) -> Figures:
    """How busy the GPU is from the first kernel of a trace to the last, and the gaps between them."""
    spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") in ON_THE_GPU)
    if not spans:
        raise NotShownError("the trace has no kernels")
    busy_us, idle_us, end_us = 0.0, [], spans[0][0]
    for start, end in spans:
        if start > end_us:
            idle_us.append(start - end_us)
        busy_us += max(0.0, end - max(start, end_us))
        end_us = max(end_us, end)
    whole_us = end_us - spans[0][0]
    return {
        "launches a step": round(len(spans) / num_steps),
        "busy": round(busy_us / whole_us, 3),
        "step ms": round(whole_us / num_steps / 1000, 3),
        "gaps a step": round(len(idle_us) / num_steps),
        "median gap us": round(sorted(idle_us)[len(idle_us) // 2], 1) if idle_us else 0,
        "longest gap us": round(max(idle_us, default=0.0), 1),
    }


def launch_gaps(task: str, compile_as: str, check: Check) -> Figures:
    """Profile some steps in bf16."""
    check_compiler(compile_as, check)
    folder = check.scratch / f"profile-{task}-{compile_as}"
    length = ("steps=30", "epochs=null", "log_every=30steps", "debug.wait=15", f"debug.active={NUM_PROFILED}")
    own = (f"compile={compile_as}", "precision=bf16", "debug=profiler", f"run.dir={folder}")
    check.ptfast("train", *words_of(task, check), *own, *length)
    return gaps(json.loads((folder / "trace.json").read_text())["traceEvents"], NUM_PROFILED)


def switches(task: str, check: Check) -> Figures:
    """The table of bench_switches, which leaves out rows that cannot run here."""
    rounds, steps = (3, 1) if check.quick else (5, 10)
    rows = [word for row in SWITCHES[task][: 3 if check.quick else None] for word in ("--row", row)]
    bench = (ROOT / "scripts/bench_switches.py", "--rounds", rounds, "--steps", steps)
    said = check.python(*bench, *rows, *words_of(task, check))
    if check.emulated:
        raise NotShownError(NO_SPEED)
    return table_of(said)


def table_of(said: str) -> Figures:
    """The rows of a table in markdown, by their first cell."""
    lines = [line.strip("|").split("|") for line in said.splitlines() if line.startswith("|")]
    rows = [[cell.strip(" `") for cell in cells] for cells in lines[2:]]
    return {name: ", ".join(filter(None, cells)) for name, *cells in rows}


def peers(task: str, check: Check) -> Figures:
    """Whole trainings under other trainers, where bench_peers is there and trains on a GPU."""
    bench = ROOT / "scripts" / "bench_peers.py"
    if not bench.is_file():
        raise NotShownError("there is no scripts/bench_peers.py")
    if "--device" not in check.python(bench, "--help"):
        raise NotShownError("scripts/bench_peers.py trains on a CPU only")
    if check.data is None:
        raise NotShownError(
            "no data: give --data FOLDER with cifar10-jpeg.tar.xz, sst2 and tinyshakespeare.txt"
        )
    folder, results = check.scratch / "peers", check.out / "peers.jsonl"
    folder.mkdir(exist_ok=True)
    cifar = images(check)[1].removeprefix("data.root=")
    for name, place in {"cifar": cifar, **{each: check.data / each for each in PEER_DATA}}.items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(place)
    small = ("--epochs", 1, "--only", "ptfast", "by_hand") if check.quick else ()
    own = ("--task", task, "--precision", "bf16", "--device", "cuda", "--results", results)
    own = (*own, "--samples", PEER_SAMPLES[task][check.quick], "--rounds", 1 if check.quick else 2)
    said = check.python(bench, "--data", folder, *own, *small)
    if check.emulated:
        raise NotShownError(NO_SPEED)
    return table_of(said)


def find_batch(check: Check) -> Figures:
    """The quickest batch of GPT-2, with batches that grow until memory ends."""
    folder = check.scratch / "find-batch"
    flags = ("--from", 128 if check.emulated else 4, "--seconds", 0.2 if check.quick else 1, "--out", folder)
    # An emulated GPU of 192 MiB is full soon.
    env = dict.fromkeys(BYTES_VARIABLES, str(192 * 2**20)) if check.emulated else {}
    most = ("--to", 2048) if check.emulated else ()
    check.ptfast("find", "batch", *words_of("gpt", check), "precision=bf16", *flags, *most, env=env)
    found = json.loads((folder / "batch.json").read_text())
    too_large = (found["too_large"] or {"size": "not reached"})["size"]
    figures = {"chosen": found["chosen"], "too large": too_large}
    if check.emulated:
        raise NotShownError(NO_SPEED, figures)
    return figures


STAGE_3 = [
    *(
        Part(f"launch gaps, {task}, compile={kind}", partial(launch_gaps, task, kind), 60)
        for task in STEPS
        for kind in ("none", "model")
    ),
    Part("find batch", find_batch, 300),
    *(Part(f"switches, {name}", partial(switches, name), 240) for name in SWITCHES),
    *(Part(f"peers, {task}", partial(peers, task), 300) for task in PEER_SAMPLES),
]
