"""Operators of real steps, and the bytes that forward keeps for backward, counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from ptfast.core.distributed import sum_over_ranks
from ptfast.core.machine import available_memory, peak_memory_bytes
from ptfast.core.protocols import StepBatch
from ptfast.core.tensors.trees import tensors_in
from ptfast.profiling.debug_aids.step_phases import Phases, watched
from ptfast.profiling.limits.operators import Operator, Operators
from ptfast.run import Run

COUNTED = ("forward", "backward", "optimizer")
MANY_LENGTHS = 8
"""Steps that are counted where sequences come in many lengths, and one is not like another."""


@dataclass
class Counted:
    """Counts over some steps, summed."""

    operators: list[Operator]
    steps: int
    kept_bytes: int
    """Of tensors that forward keeps for backward, weights left out."""
    batch_bytes: int
    """Of the batches, as the model takes them."""


class StepCounter:
    """Counts the operators of a process's second step, which trains as it would have without.

    The first step is left to itself: kernels are chosen in it and caches fill. A compiled model shows no
    operators: of that one, a step is taken for nothing as it was written, before training, and taken back.

    Cost: some 20 us for each operator of one step, or of eight where sequences have many lengths; booked as
    `measuring`, with that step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.counted: Counted | None = None
        self.why_not: str | None = None
        self.compiled = run.compilation is not None
        self.first_counted = run.progress.step + 1
        self._last = self.first_counted + (MANY_LENGTHS if run.resolved.padding_share is not None else 1)
        self._graphs = _num_graphs()
        if run.resolved.curriculum:
            self.why_not = "its batches grow"

    def due(self, step: int) -> bool:
        """Return True if the step after `step` is to be counted; the same on all ranks."""
        if not self.first_counted <= step < self._last or self.why_not or self.compiled:
            return False
        if _num_graphs() > self._graphs:
            # Its compiled parts would run as they were written, and round in other places.
            self.why_not = "the model compiles parts of itself"
        return self.why_not is None

    @contextmanager
    def counting(self, batches: Iterator[StepBatch], steps: int = 1) -> Iterator[Iterator[StepBatch]]:
        """Count the steps that are taken inside with what this gives in place of `batches`."""
        run, found = self.run, self.counted
        with run.clock.gathering("measuring"):
            if not run.ranks.is_first:
                yield batches
                return
            if found is None:
                found = Counted([], 0, 0, 0)
            look = _Look(run)
            with look.operators, watched(run, look):
                yield look.weighed(batches)
            found.operators += look.operators
            found.steps += steps
            found.kept_bytes += look.kept_bytes
            found.batch_bytes += look.batch_bytes
            self.counted = found

    def uncompiled(self, batches: Iterator[StepBatch]) -> AbstractContextManager[Iterator[StepBatch] | None]:
        """A context in which a step of a compiled model, taken as it was written, is counted.

        Gives None where there might not be the memory for that, which a compiled step takes less of.
        """
        if self.why_not or not self._has_room():
            self.why_not = self.why_not or "a step that is not compiled might not fit into memory"
            return nullcontext()
        return self._uncompiled(batches)

    @contextmanager
    def _uncompiled(self, batches: Iterator[StepBatch]) -> Iterator[Iterator[StepBatch]]:
        # Those that come later are to pass by without being weighed.
        with self.run.uncompiled(), self.counting(islice(batches, 1)) as weighed:
            yield chain(weighed, batches)

    def _has_room(self) -> bool:
        """Return True if there is as much memory again as was ever taken; all ranks agree."""
        device = self.run.device
        taken = peak_memory_bytes(device.type)
        if device.type == "cuda":
            lacks = 2 * taken > torch.cuda.get_device_properties(device).total_memory
        else:
            lacks = taken > available_memory()
        return not sum_over_ranks(torch.tensor(float(lacks), device=device), self.run.ranks)


class _Look(Phases):
    """One look at a step: its operators by phase, and what is kept for backward."""

    def __init__(self, run: Run) -> None:
        super().__init__(self._enter, self._leave)
        self.operators = Operators(None)
        self.kept_bytes = self.batch_bytes = 0
        self._kept: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        # Weights are there in any case, and their memory comes and goes where they are shared out.
        self._weights = (
            set() if run.sharded else {p.untyped_storage().data_ptr() for p in run.model.parameters()}
        )
        self._keeps = not run.sharded

    def weighed(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """The same batches, whose bytes are added up."""
        for batch in batches:
            tensors = tensors_in([data for data, _ in batch.micro_batches])
            self.batch_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            yield batch

    def _enter(self, name: str) -> None:
        self.operators.phase = name if name in COUNTED else None
        if name == "forward" and self._keeps:
            self._hooks.__enter__()

    def _leave(self, name: str) -> None:
        self.operators.phase = None
        if name == "forward" and self._keeps:
            self._hooks.__exit__(None, None, None)
            self.kept_bytes += sum(self._kept.values())
            self._kept.clear()

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in self._weights:
            self._kept[address] = storage.nbytes()
        return tensor


def _num_graphs() -> int:
    """Graphs that this process has compiled so far."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else dynamo.utils.counters["stats"]["unique_graphs"]
