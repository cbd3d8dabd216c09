"""Two runs compared bit by bit: weights, optimizer, averages, progress, and the training log."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptfast.core.tensors.dtensors import whole
from ptfast.core.tensors.saved_state import read_state
from ptfast.report.loggers import METRICS_FILE, USAGE, read_records

_FREE = ("samples_per_s", "step_s", "timed_steps", "timed_samples", "timed_s", "peak_memory_bytes", *USAGE)
"""Figures of the clock and the machine."""
TOLERANCE = 1e-6
"""Relative, for training losses of several ranks: an interruption changes the order of their sums."""
_SUMS = {
    *("loss", "window_loss", "epoch_loss", "best_value"),
    *("recent_losses", "best_states", "largest_spike", "best_figures"),
}


def compare_runs(left: Path, right: Path, *, tolerates: bool = False) -> tuple[list[str], list[str]]:
    """What differs between two runs, and, if it `tolerates` any, training losses that nearly agree."""
    states = [read_state(run / "saved" / "last") for run in (left, right)]
    logs = [read_records(run / METRICS_FILE) for run in (left, right)]
    close: list[str] | None = [] if tolerates else None
    found = list(differences(states[0].model, states[1].model, "model"))
    found += differences(states[0].training, states[1].training, "training")
    for name in ("progress", "best_figures", "stream"):
        one, other = (state.facts.get(name) for state in states)
        found += differences(one, other, name, close)
    one, other = ((run / "saved" / "best").resolve().name for run in (left, right))
    found += differences(one, other, "saved.best")
    for split in ("train", "val", "test"):
        one, other = ([line for line in log if line["split"] == split] for log in logs)
        found += differences(one, other, f"{METRICS_FILE}.{split}", close if split == "train" else None)
    return found, close or []


def differences(left: Any, right: Any, place: str, close: list[str] | None = None) -> Iterator[str]:
    """Where two nests differ in any bit; sums of losses that nearly agree are added to `close`, if given."""
    left, right = whole(left), whole(right)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            yield f"{place}: {left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
        elif count := int((_bytes(left) != _bytes(right)).any(-1).sum()):
            yield f"{place}: {count:,} of {left.numel():,} values differ"
    elif isinstance(left, dict) and isinstance(right, dict):
        for name in dict.fromkeys(name for name in (*left, *right) if name not in _FREE):
            if (name in left) != (name in right):
                yield f"{place}.{name} is missing"
            else:
                yield from differences(left[name], right[name], f"{place}.{name}", close)
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        yield from differences(dict(enumerate(left)), dict(enumerate(right)), place, close)
    elif type(left) is not type(right) or repr(left) != repr(right):
        pair: Any = left, right
        text = f"{place}: {left!r} and {right!r}"
        are_sums = not _SUMS.isdisjoint(place.split(".")) and all(isinstance(each, float) for each in pair)
        if close is not None and are_sums and math.isclose(*pair, rel_tol=TOLERANCE):
            close.append(text)
        else:
            yield text


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(tensor.numel(), 1).view(torch.uint8)
