"""The step compiled whole: forward, backward, clipping and optimizer as one function (`compile=step`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ptfast.core.protocols import takes_own_steps
from ptfast.optim import plain_steps
from ptfast.optim.build_optimizer import apply_lr
from ptfast.optim.plain_steps import PlainStep
from ptfast.run import Run
from ptfast.techniques.compile.compilation import NotCompiledError
from ptfast.techniques.gradients.clipping import global_norm

Rate = tuple[float, float | None]
Taken = tuple[Tensor, Tensor | int, Tensor | None]


class WholeStep:
    """Takes the steps of a run by one compiled function.

    On a CPU one call takes the place of hundreds of operators; on CUDA it is one graph, whose launch costs as
    much as a kernel's, as long as shapes stay. Rates, momenta and bias corrections are uploaded for many
    steps at once. A run has the same bits however often it is resumed, but others than without the compiler.

    Cost: compiling, in the first step and for each new shape.
    """

    def __init__(self, run: Run, dtype: torch.dtype) -> None:
        self._run, self._dtype = run, dtype
        self._base_lrs = [group["initial_lr"] for group in run.optimizer.param_groups]
        self._plain: PlainStep | None = None
        self._take: Callable[[Any, Tensor, Tensor], Taken]
        self._rows: Iterator[Tensor] = iter(())
        run.optimizer.register_state_dict_pre_hook(lambda _: self.settle())

    def prepare(self) -> None:
        """Make the function, for the parameters that have a gradient now."""
        self.settle()
        run = self._run
        assert run.compilation is not None
        parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        reached = [p for p in parameters if p.grad is not None]
        others = [p for p in parameters if p.grad is None and p.requires_grad]
        self._plain = plain = PlainStep(run.optimizer, reached)
        task, model, clip, logs_norm = run.task, run.model, run.clip, run.log_norm
        kind, half = run.device.type, run.precision.half_type

        def take(data: Any, weight: Tensor, numbers: Tensor) -> Taken:
            with torch.autocast(kind, dtype=half, enabled=half is not None):
                loss, num_items = task.loss(model, data)
            loss.backward(weight)
            if any(parameter.grad is not None for parameter in others):
                raise RuntimeError("a parameter gets a gradient that had none in the first step")
            norm = global_norm([p.grad for p in reached if p.grad is not None]) if logs_norm else None
            if clip is not None:
                clip()
            plain.take(numbers)
            for parameter in reached:
                parameter.grad = None
            return loss.detach(), num_items, norm

        lasting = [*model.buffers(), *reached, *(t for part in plain.parts for ts in part.states for t in ts)]
        self._take = run.compilation.compile_step(take, lasting)

    def load(self, rates: Iterator[Rate]) -> Iterator[Rate]:
        """Upload the numbers of the steps to come, given their rates, which are returned."""
        listed, rows = [*rates], list[list[float]]()
        if self._plain is not None:
            for ahead, rate in enumerate(listed):
                apply_lr(self._run.optimizer, self._base_lrs, *rate)
                rows.append(self._plain.numbers(ahead))
            table = torch.tensor(rows, dtype=self._dtype)
            if self._run.device.type == "cuda":
                table = table.pin_memory().to(self._run.device, non_blocking=True)
            self._rows = iter(table.unbind())
        return iter(listed)

    def take(self, data: Any, weight: Tensor) -> Taken:
        """Take the next step, which may overwrite what the last one returned, or raise `NotCompiledError`."""
        if self._plain is None:
            raise NotCompiledError("no first step was rehearsed")
        taken = self._take(data, weight, next(self._rows))
        self._plain.taken += 1
        return taken

    def settle(self) -> None:
        """Bring the optimizer's step counts up to date."""
        if self._plain is not None:
            self._plain.settle()


def build_whole_step(run: Run, dtype: torch.dtype, *, plain: bool) -> WholeStep | None:
    """Build the step of a run that asks for it, or have the model compiled in its place and say why.

    `plain`: nobody looks at gradients between backward and the optimizer.
    """
    if run.compilation is None or run.compilation.mode != "step":
        return None
    why = obstacle(run) if plain else "gradients are looked at in the middle of a step"
    return WholeStep(run, dtype) if why is None else run.compilation.fall_back(run, why)


def obstacle(run: Run) -> str | None:
    """Why the steps of a run cannot be compiled whole; None if they can be tried."""
    from torch._dynamo import config

    if not hasattr(config, "trace_autograd_ops"):
        return f"torch {torch.__version__} cannot compile a backward pass, as 2.11 does"
    if takes_own_steps(run.task):
        return "the task takes its own steps"
    if run.ranks.distributed:
        return "ranks exchange gradients in the middle of a step"
    if run.micro_batches > 1:
        return f"a step has {run.micro_batches} micro-batches"
    if run.precision.scaler is not None:
        return "fp16 skips steps whose gradients overflow"
    if run.resolved.checkpointed:
        return "activation checkpointing needs a backward pass of its own"
    return plain_steps.obstacle(run.optimizer)
