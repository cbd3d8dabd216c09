"""Stages 1 and 4: the tests, kill and resume to the bit, and DDP and FSDP of one rank over NCCL."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

from scripts.gpu.check import ROOT, TESTS, Check, FailedError, Figures, NotShownError, Part
from scripts.gpu.killed import VARIABLE
from scripts.gpu.noise import write_text
from scripts.gpu.progress import read_notes

QUICK_TESTS = {
    "eager": ("tests/training/test_gpu_loop.py", "tests/data/loaders/test_device_loader.py"),
    "compiling": ("tests/techniques/test_compile.py",),
    "rest": ("tests/core/test_clock.py", "tests/core/test_durations.py"),
}
NUM_LISTED = 8
STEPS, KILLED_AT = 40, 25
BASE = (
    *("backend=deterministic", "device=cuda", f"steps={STEPS}", "epochs=null", "log_every=5steps"),
    *("saving.every=10steps", f"eval.every={STEPS}steps"),
)
RUNS = {
    "resnet": ("recipe=resnet_digits", "augment=crop_flip", "augment.crop_padding=1"),
    "gpt": (
        *("recipe=char_gpt", "model.width=64", "model.depth=2", "model.dropout=0.1", "data.path=text.txt"),
        *("data.context_length=64", "batch_size=16", "ema=ema", "gradients.accumulate=2"),
    ),
}


def run_tests(kind: str, check: Check) -> Figures:
    """Run the tests of one kind that no earlier call has brought to their end."""
    noted = check.out / TESTS
    words: list[object] = ["-p", "scripts.gpu.progress", "--kind", kind, "--noted", noted, "-W", "default"]
    words += ["-m", "gpu"] if kind != "rest" else []
    if importlib.util.find_spec("xdist"):
        # Tests on the GPU look at its memory: one at a time.
        workers = max(1, min(8, (os.cpu_count() or 2) // 2)) if kind == "rest" else 0
        words += ["-n", workers, "--dist", "loadfile"]
    without = check.emulated and kind == "rest"
    words += ["-p", "emulated_gpu"] if check.emulated and not without else []
    words += QUICK_TESTS[kind] if check.quick else ["tests"]
    env = {"LD_PRELOAD": "", "PYTEST_ADDOPTS": ""} if without else None
    check.python("-m", "pytest", *words, cwd=ROOT, emulate=False, ok=(0, 1, 5), env=env)
    notes = read_notes(noted, kind)
    outcomes = [note["outcome"] for note in notes.values()]
    figures = {state: outcomes.count(state) for state in ("passed", "failed", "skipped")}
    if failed := [f"{name}: {note['why']}" for name, note in notes.items() if note["outcome"] == "failed"]:
        raise FailedError("; ".join(failed[:NUM_LISTED]), figures)
    if not figures["passed"]:
        reasons = {note["why"].removeprefix("Skipped: ") for note in notes.values()}
        raise NotShownError("; ".join(sorted(reasons)) or "no such tests", figures)
    if without:
        raise NotShownError("run without the emulation, in which processes of tests compute nothing", figures)
    return figures


def saved(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a run, and its optimizer state, scaler and averages."""
    from ptfast.core.tensors.checkpoint_files import read_checkpoint
    from ptfast.core.tensors.dtensors import whole
    from ptfast.core.tensors.trees import map_tensors

    state = read_checkpoint(folder / "saved" / "last")
    return map_tensors(whole, state.model), map_tensors(whole, state.training)


def same_bits(one: Any, other: Any) -> bool:
    """Return True if two nests of tensors and plain values are equal to the bit."""
    import torch

    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def kill_and_resume(precision: str, check: Check) -> Figures:
    """A run that is killed between two checkpoints and resumed ends in the bits of one that is not."""
    write_text(check.scratch / "text.txt", 64, 20_000)
    differs = []
    for name, words in RUNS.items():
        killed = "callbacks=[{_target_: scripts.gpu.killed.Killed}]"
        train = ["train", *words, *BASE, f"precision={precision}", "run.resume=auto", killed]
        whole, stopped = (check.scratch / f"{name}-{precision}-{kind}" for kind in ("whole", "killed"))
        check.ptfast(*train, f"run.dir={whole}")
        ended_by = (-signal.SIGKILL,)
        check.ptfast(*train, f"run.dir={stopped}", env={VARIABLE: str(KILLED_AT)}, ok=ended_by)
        check.ptfast(*train, f"run.dir={stopped}")
        differs += [] if same_bits(saved(whole), saved(stopped)) else [name]
    figures = {"runs": len(RUNS), "killed at step": KILLED_AT, "steps": STEPS}
    if differs:
        raise FailedError(f"other bits after resuming: {', '.join(differs)}", figures)
    return {**figures, "bits": "the same"}


def one_rank(strategy: str, check: Check) -> Figures:
    """Train through DDP or FSDP and NCCL with one rank, beside one process without them."""
    if check.emulated and not check.nccl:
        raise NotShownError("this emulation has no NCCL")
    write_text(check.scratch / "text.txt", 64, 20_000)
    figures, apart = {}, []
    for name, words in RUNS.items():
        alone, wrapped = (check.scratch / f"{name}-{kind}" for kind in ("single", strategy))
        train = ["train", *words, *BASE, "precision=fp32", "rewrites.channels_last=false"]
        if not (alone / "summary.json").exists():
            check.ptfast(*train, f"run.dir={alone}")
        ranks = (f"parallel={strategy}", "parallel.nproc=1", "parallel.wrap_one_rank=true")
        said = check.ptfast(*train, *ranks, f"run.dir={wrapped}")
        if f"{strategy}, " not in said:
            raise FailedError(f"{name} did not train through {strategy}")
        losses = [json.loads((each / "summary.json").read_text())["val"]["loss"] for each in (alone, wrapped)]
        same = same_bits(saved(alone)[0], saved(wrapped)[0])
        figures[name] = "the same bits" if same else f"losses {losses[0]:.6g} and {losses[1]:.6g}"
        apart += [] if same or math.isclose(*losses, rel_tol=1e-3) else [name]
    if apart:
        raise FailedError(f"not the loss of a single process: {', '.join(apart)}", figures)
    if check.emulated:
        raise NotShownError("runs to its end; the emulation has a stand-in for NCCL", figures)
    return figures


STAGE_1 = [
    Part("tests marked gpu, not compiling", partial(run_tests, "eager"), 30, resumes=True),
    *(
        Part(f"kill and resume, {precision}", partial(kill_and_resume, precision), 90)
        for precision in ("amp_fp16", "bf16")
    ),
    *(Part(f"one rank of {each} over NCCL", partial(one_rank, each), 90) for each in ("ddp", "fsdp")),
]
STAGE_4 = [
    Part("tests marked gpu, compiling", partial(run_tests, "compiling"), 60, resumes=True),
    Part("tests that need no GPU", partial(run_tests, "rest"), 60, resumes=True),
]
