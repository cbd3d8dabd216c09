"""Apply torch.compile in place, so that parameters keep the plain model's names, and report on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from ptfast.core.clock import Clock
from ptfast.core.errors import ConfigError
from ptfast.core.sections.origins import comes_from
from ptfast.core.units import counted
from ptfast.techniques.compile import Compile, accumulating_in_graphs, compiler
from ptfast.techniques.repeated_blocks import find_blocks

Mode = Literal["blocks", "model", "reduce_overhead", "max_autotune"]

MANY_SHAPES = 3
"""Number of recompilations per graph that is too many; an epoch's last batch usually causes one."""


class Compilation:
    """The compiled parts of a run, and the number of compilations.

    Fewer, fused kernels touch memory less often and need less Python to launch. Only training is compiled:
    evaluations use the plain model, which saves a minute, and `ptfast eval` reproduces their metrics.

    Each shape has its own graph, or (`dynamic`) all shapes share one from the start. A resumed run therefore
    gives the same bits as an uninterrupted one. Dropout draws different masks than without a compiler.

    If a step `accumulates` several micro-batches on a rank, a CUDA graph would silently overwrite the
    gradients of the previous one: C011 for `reduce_overhead`. E005 if a tool or device is missing.

    Cost: seconds to minutes, and memory, before the first step and again for every new shape.
    Source: torch.compile; for gradients in CUDA graphs pytorch/pytorch issue 169545.
    """

    def __init__(self, mode: Mode, device: str, *, dynamic: bool = False, accumulates: bool = False) -> None:
        problem = compiler(Compile(mode=mode), device)
        if problem is None and mode == "reduce_overhead" and accumulates:
            problem = accumulating_in_graphs()
        if problem is not None:
            raise problem
        self.mode: Mode = mode
        self.blocks: dict[str, nn.Module] = {}
        self.options: dict[str, Any] = {"dynamic": dynamic}
        # Otherwise a fused kernel compares float32 values with values that the plain step rounds to bf16,
        # and the gradient of `amax` is wrong or NaN.
        from torch._inductor import config as settings

        settings.emulate_precision_casts = True  # pyright: ignore[reportAttributeAccessIssue]
        if mode == "reduce_overhead":
            self.options["mode"] = "reduce-overhead"
        elif mode == "max_autotune":
            self.options["mode"] = "max-autotune" + "-no-cudagraphs" * accumulates
        self._before = num_compiled()
        self._at_start: int | None = None
        self._start_s = 0.0
        self._warned_of: set[str] = set()

    def apply(self, model: nn.Module, blocks: str | Sequence[str] = "auto") -> None:
        """Compile `model` in place, before it is wrapped for ranks; C011 if `find_blocks` finds none."""
        parts = [model]
        if self.mode == "blocks":
            from torch._dynamo import config as settings

            self.blocks = find_blocks(model, blocks, key="compile.blocks")
            if not self.blocks:
                what = f"{type(model).__name__} has no repeated blocks"
                hint = "Name modules, as in compile.blocks=[layers.*], or use compile=model"
                raise ConfigError("C011", what, key="compile", value=self.mode, suggestion=hint)
            # Torch stops compiling after too many graphs; blocks of one class share that limit.
            config: Any = settings
            config.recompile_limit = max(config.recompile_limit, 4 * len(self.blocks))
            parts = list(self.blocks.values())
        for part in parts:
            if not comes_from(f"{type(part).__module__}.", "torch.nn"):
                part.compile(**self.options)
                continue
            # Torch 2.9 to 2.11 do not compile methods that are defined in torch's own files.
            from torch._dynamo.external_utils import wrap_inline

            part._compiled_call_impl = torch.compile(wrap_inline(part._call_impl), **self.options)

    @contextmanager
    def booking(self, clock: Clock) -> Iterator[None]:
        """Count compilation inside this context as `warm_up` on `clock`, in whichever step it happens."""
        from torch._dynamo.callback import callback_handler

        before: list[str | None] = []

        def begin(*_: Any) -> None:
            before.append(clock.cause)
            clock.to("warm_up")

        def end(*_: Any) -> None:
            clock.to(before.pop())

        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)

    def start(self, seconds: float) -> str:
        """Record that the first step is compiled, and report it."""
        self._at_start, self._start_s = num_compiled(), seconds
        return f"compiled {counted(self.num_graphs, 'graph')} in {seconds:.1f} s"

    @property
    def num_graphs(self) -> int:
        """Number of graphs compiled for the first step."""
        return (num_compiled() if self._at_start is None else self._at_start) - self._before

    @property
    def num_recompiled(self) -> int:
        """Number of graphs compiled after the first step."""
        return 0 if self._at_start is None else num_compiled() - self._at_start

    def complaint(self, step_s: float, num_steps: int) -> str | None:
        """Return advice, each once, on shapes that change often or a run too short to repay compilation."""
        advice = {"shapes": self._advice(), "length": ""}
        trained_s = step_s * num_steps
        if self._start_s > trained_s:
            advice["length"] = (
                f"compiling took {self._start_s:.0f} s, and all {num_steps:,} steps take about "
                f"{trained_s:.0f} s: unless steps become twice as fast, compiling takes longer than it "
                "saves; use compile=none for runs this short"
            )
        for name, text in advice.items():
            if text and name not in self._warned_of:
                self._warned_of.add(name)
                return text
        return None

    def _advice(self) -> str:
        """Return advice if shapes change too often."""
        if self.num_recompiled < MANY_SHAPES * max(self.num_graphs, 1):
            return ""
        hint = "pad inputs to few shapes" if self.options["dynamic"] else "set compile.dynamic=true"
        return (
            f"{counted(self.num_recompiled, 'graph')} compiled again while training: shapes or settings "
            f"change; {hint}, or use compile=none"
        )

    def describe(self) -> str:
        """Describe the compiled parts for the panel."""
        what = f"blocks, {len(self.blocks)} of them" if self.blocks else self.mode
        return what + (", any length" if self.options["dynamic"] else "")

    def report(self) -> dict[str, Any]:
        """Return the entry in summary.json."""
        report = {"mode": self.mode, "graphs": self.num_graphs, "recompiled": self.num_recompiled}
        return report | ({"advice": advice} if (advice := self._advice()) else {})


def num_compiled() -> int:
    """Return the number of graphs compiled by this process so far, without importing the compiler."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return 0 if dynamo is None else dynamo.utils.counters["stats"]["unique_graphs"]
