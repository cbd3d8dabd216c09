"""A step for nothing, in which a process does what it does once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain

from ptfast.core.protocols import StepBatch
from ptfast.training.step import Trainer
from ptfast.training.stopping import Stopped


def rehearse(trainer: Trainer, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """Where a model is compiled or several ranks resume, run the next step's backward once for nothing.

    A compiler is at work in the first backward of a process, which is no training. And
    DistributedDataParallel regroups its buckets after the first backward of a process. Among three ranks
    or more that changes the order of sums, and a resumed run would differ from one never killed.

    Returns:
        All batches, the rehearsed one included.
    """
    run, window = trainer.run, trainer.window
    averaged = run.ranks.distributed and not run.sharded
    resumes = averaged and run.progress.step
    if not (resumes or run.compilation is not None) or run.progress.step >= run.total_steps:
        return batches
    first = None
    with contextlib.suppress(Stopped):
        first = next(batches, None)
    if first is None:
        return batches
    buffers = [(buffer, buffer.clone()) for buffer in run.model.buffers()]
    sums = window.sums()
    run.forward.train()
    try:
        with run.forward.rehearsing() if averaged else contextlib.nullcontext():
            trainer.accumulate(first, run.progress.step)
    finally:
        for parameter in trainer.parameters:
            parameter.grad = None
        for buffer, before in buffers:
            buffer.copy_(before)
        window.put_back(sums)
    return chain([first], batches)
