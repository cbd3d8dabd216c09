"""Memory in a few steps: what each phase takes, and what is kept from forward for backward."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptfast.profiling.debug_aids.step_phases import PHASES, Phases
from ptfast.run import Run

MEMORY, SNAPSHOT = "memory.txt", "memory.pickle"
"""Files in the run directory: a table and, on a GPU, a snapshot for pytorch.org/memory_viz."""
TOP = 10
"""Kinds of tensors that the terminal shows."""
SAMPLE_S = 0.001
"""Sampling interval."""


class Memory(Phases):
    """The memory that each phase takes at most, and what is kept from forward for backward, in some steps.

    Args:
        wait: steps before.
        active: steps that are looked at.
    """

    def __init__(self, run: Run, wait: int, active: int) -> None:
        super().__init__(self._enter, self._leave)
        self.run, self.first, self.last = run, run.progress.step + wait, run.progress.step + wait + active
        self.peaks: Counter[str] = Counter()
        self.kept: dict[int, Tensor] = {}
        self.kinds: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.kept_bytes = 0
        self.parameters = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self.looking = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self._start_if_due(run.progress.step)

    def on_step(self, run: Any, step: int) -> None:
        if self.looking and step >= self.last:
            self.close()
        self._start_if_due(step)

    def _start_if_due(self, step: int) -> None:
        if step != self.first or self.ended.is_set():
            return
        self.looking = True
        if self.run.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self.thread.start()

    def _enter(self, name: str) -> None:
        if self.looking and name == "forward":
            self.kept.clear()
            self.hooks.__enter__()

    def _leave(self, name: str) -> None:
        if not self.looking:
            return
        self._note(name)
        if name == "forward":
            self.hooks.__exit__(None, None, None)
            total = sum(tensor.untyped_storage().nbytes() for tensor in self.kept.values())
            if total > self.kept_bytes:
                self.kept_bytes, self.kinds = total, Counter()
                for tensor in self.kept.values():
                    kind = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
                    self.kinds[kind] += tensor.untyped_storage().nbytes()
            self.kept.clear()

    def _keep(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self.parameters:
            self.kept.setdefault(address, tensor)
        return tensor

    def _look(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            if (name := self.name) is not None:
                self._note(name)

    def _note(self, name: str) -> None:
        self.peaks[name] = max(self.peaks[name], memory_bytes(self.run.device))

    def close(self) -> None:
        """Stop sampling, and write and show the results. Safe to call twice."""
        if not self.looking:
            return
        self.looking = False
        self.ended.set()
        self.thread.join()
        lines = [f"memory: peaks of {self.last - self.first} steps, by phase"]
        lines += [f"  {self.peaks[name] / 2**20:9,.1f} MiB  {name}" for name in PHASES]
        lines.append(f"  {self.kept_bytes / 2**20:9,.1f} MiB  kept for backward by one micro-batch, most by")
        rows = [
            f"  {size / 2**20:9,.1f} MiB  {dtype} {'x'.join(map(str, shape)) or 'scalar'}"
            for (dtype, shape), size in self.kinds.most_common()
        ]
        folder: Path = self.run.folder
        (folder / MEMORY).write_text("\n".join(lines + rows) + "\n")
        if self.run.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
            torch.cuda.memory._record_memory_history(enabled=None)
            rows.append(f"  {SNAPSHOT} is for pytorch.org/memory_viz")
        for line in lines + rows[:TOP]:
            self.run.display.note(line)


def memory_bytes(device: torch.device) -> int:
    """Bytes in use now: of the GPU's memory by tensors, or of the machine's by this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
