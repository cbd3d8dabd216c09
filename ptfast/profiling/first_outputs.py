"""Check a model in evaluation: its outputs must not be random, nor depend on the rest of the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.errors import name_of
from ptfast.core.sections.origins import is_ours
from ptfast.core.tensors.kept_buffers import buffers_kept
from ptfast.core.tensors.trees import copied, map_tensors, tensors_in, tree_leaves
from ptfast.data.sampling.counter_draws import seeded
from ptfast.run import Run

RANDOM = "returns different outputs for the same inputs in evaluation"
RANDOM_HINT = "F.dropout needs training=self.training; nn.Dropout follows eval() by itself"
DEPENDENT = "returns different outputs for a sample alone and in a batch"
DEPENDENT_HINT = "Use BatchNorm with running statistics, and no statistics over other samples"
STEADY, ALONE = 1e-4, 1e-2
"""Largest tolerated relative differences: when a batch is computed again, and when a sample is computed
alone; ten times as large in 16 bits."""
_SEED = 0x5EED


class FirstOutputs:
    """Wraps the forward pass of a run's model in evaluation; warns once if outputs are not reproducible.

    Cost: in the first evaluation of a process, one more forward pass of a batch and one of a sample. Random
    states and buffers are restored.
    """

    def __init__(self, forward: Any, run: Run) -> None:
        self.forward, self._run = forward, run

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        run = self._run
        if run.outputs_checked:
            return self.forward(*args, **keywords)
        run.outputs_checked = True
        given = copied((args, keywords))
        outputs = self.forward(*args, **keywords)
        half = run.precision.autocast_dtype is not None or any(
            p.itemsize == 2 for p in run.model.parameters()
        )
        choose = getattr(run.task, "outputs_of", lambda given: given)
        with contextlib.suppress(Exception):  # some models take only batches of one size
            factor = 10.0 if half else 1.0
            forward = lambda *args, **keywords: choose(self.forward(*args, **keywords))  # noqa: E731
            if found := unsteadiness(forward, run.model, given, choose(outputs), factor):
                what, hint = found
                run.display.warn(f"model: {name_of(run.model)} {what}. {hint}")
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)


def checking_outputs(forward: Any, run: Run) -> Any:
    """Wrap `forward` in `FirstOutputs` if the model is user code and has not been checked yet."""
    if run.outputs_checked or is_ours(run.model) or run.sharded or not run.ranks.is_first:
        return forward
    return FirstOutputs(forward, run)


def unsteadiness(
    forward: Any, model: nn.Module, given: tuple[Any, Any], outputs: Any, factor: float = 1.0
) -> tuple[str, str] | None:
    """Return the problem with `outputs` of the arguments `given`, and a hint; None if they are reproducible.

    The batch is computed again, and then its first sample alone. `factor` widens the tolerated differences.
    """
    with _untouched(model):
        args, keywords = copied(given)
        if _difference(outputs, forward(*args, **keywords)) > factor * STEADY:
            return RANDOM, RANDOM_HINT
        size = next((len(part) for part in tensors_in(given) if part.dim()), 0)
        if size < 2:
            return None

        def has_samples(value: Any) -> bool:
            return isinstance(value, Tensor) and value.dim() > 0 and len(value) == size

        args, keywords = map_tensors(lambda part: part[:1] if has_samples(part) else part, copied(given))
        # Outputs without a batch dimension, such as a loss, depend on the whole batch.
        pairs = zip(tree_leaves(outputs), tree_leaves(forward(*args, **keywords)), strict=False)
        together, alone = [], []
        for whole, single in pairs:
            if has_samples(whole):
                together.append(whole[:1])
                alone.append(single)
        return (DEPENDENT, DEPENDENT_HINT) if _difference(together, alone) > factor * ALONE else None


def _difference(one: Any, other: Any) -> float:
    """Return the largest difference between outputs of equal shapes, relative to the largest output."""
    largest = 0.0
    for left, right in zip(tree_leaves(one), tree_leaves(other), strict=False):
        both = isinstance(left, Tensor) and isinstance(right, Tensor) and left.shape == right.shape
        if both and left.is_floating_point() and left.numel():
            top = left.abs().max().clamp(min=torch.finfo(left.dtype).tiny)
            largest = max(largest, float((left - right).abs().max() / top))
    return largest


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random states at the end of this context; random draws inside it differ."""
    devices = sorted({buffer.device.index for buffer in model.parameters() if buffer.device.type == "cuda"})
    with buffers_kept(model), torch.random.fork_rng(devices), seeded(_SEED):
        yield
