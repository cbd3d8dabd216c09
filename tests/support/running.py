"""Runs in this process, for tests: torch is imported once and not for every run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from conftest import IMPORT_PATHS

from ptfast.cli import command_line
from ptfast.config.read import read_config
from ptfast.core.distributed import Ranks
from ptfast.core.plain_display import Display
from ptfast.core.protocols import DataInfo
from ptfast.core.run_records import Progress
from ptfast.core.tensors.checkpoint_files import CheckpointContent, ShardedDraft, WholeDraft, read_checkpoint
from ptfast.core.tensors.dtensors import whole
from ptfast.core.tensors.trees import map_tensors
from ptfast.run import Run
from ptfast.training.build import build

WITH_TESTS = {"PYTHONPATH": os.pathsep.join(IMPORT_PATHS)}
"""Environment of a command that imports classes from the tests."""
FREE = ("samples_per_s", "step_s", "peak_memory_bytes", "memory_bytes", "cpu_cores", "gpu_use")
"""Figures that no two runs share."""


def train(*words: str) -> int:
    """`ptfast train WORDS...`, later words in place of earlier ones of their key; returns the exit code."""
    return command_line.run(["train", *{word.partition("=")[0]: word for word in words}.values()])


def write_state(saved: Path, step: int, state: CheckpointContent) -> Path:
    """Write a checkpoint as one rank does."""
    return WholeDraft(saved, step, state).write(state)


def write_shards(saved: Path, step: int, state: CheckpointContent, ranks: Ranks) -> Path:
    """Write a state as several ranks do together, each its part."""
    draft = ShardedDraft(saved, step, state, ranks)
    return draft.publish(lambda: draft.write(draft.content))


def whole_facts(step: int) -> dict[str, Any]:
    """The facts of a state at `step`, of no run."""
    info = asdict(DataInfo("features", "classification"))
    return {"progress": asdict(Progress(step)), "best_figures": {}, "figures": {}, "info": info}


def build_run(folder: Path, *words: str, ranks: Ranks | None = None, **given: Any) -> Run:
    """The run of `ptfast train WORDS...`, built and not trained; on one rank, or by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    return build(read_config(words)[1], ranks=ranks or Ranks(), folder=folder, display=Display(), **given)


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in FREE} for line in lines]


def summary(folder: Path) -> dict[str, Any]:
    """A run's summary.json."""
    return json.loads((folder / "summary.json").read_text())


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    """The saved weights of a run."""
    return map_tensors(whole, read_checkpoint(folder / "saved" / name, check=False).model)


def training_state(folder: Path, name: str = "last") -> dict[str, Any]:
    """Optimizer and averaged weights as saved."""
    return map_tensors(whole, read_checkpoint(folder / "saved" / name, check=False).training)


def same_pixels(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True for equal bytes; torch's plain kernels round by the layout in memory, a level apart."""
    apart = int(torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"))
    return bool(((one.int() - other.int()).abs() <= apart).all())


def same_bits(left: Any, right: Any) -> bool:
    """Return True if two nests of tensors and plain values are equal to the bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_bits(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same_bits(a, b) for a, b in zip(left, right, strict=True))
    return left == right
