"""The next switch to try: what each could save of a step at most, by the figures of the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ptfast.config.catalogue import CATALOGUE, Need, Technique
from ptfast.config.checks.rules import across_keys
from ptfast.config.schema import Config
from ptfast.profiling.limits.roofline import Step

WORTH = 1.05
"""Least gain that is worth a change; in two digits less would read as no gain."""
_MOST = 0.9
"""The largest part of a step that anything is said to save."""
_LOOSE = 4
"""Products in practice take at most about so many times what they would at the peak."""
_NAMED = {technique.name: technique for technique in CATALOGUE}


@dataclass(frozen=True)
class Situation:
    """Properties of a run that decide which switches apply to it."""

    step: Step
    config: Config
    device: str
    data_kind: str
    loader: str
    """The kind of loader that trained."""
    stepping: str
    """Implementation of the optimizer's step: `fused`, `foreach`, ..."""
    lacks: Callable[[Need], str | None]
    """The reason why the machine lacks what a technique needs; None where it does not."""
    num_ranks: int = 1
    padding_share: float | None = None
    has_documents: bool = False
    """A text to model comes in documents, which could be packed."""


@dataclass(frozen=True)
class Suggestion:
    """A switch, and what it could gain."""

    technique: Technique | None
    """Its record in the catalogue; None for what is no switch."""
    words: str
    """Arguments to add to the command line, or another command."""
    saved_s: float
    """Of a step, at most."""
    why: str
    changes: dict[str, dict[str, Any]]
    """The keys that it sets, by section."""

    def up_to(self, step_s: float) -> float:
        """Speed-up of a step if all of it came true (Amdahl's law)."""
        return 1 / (1 - min(max(self.saved_s, 0.0) / step_s, _MOST))


def suggest(situation: Situation) -> list[Suggestion]:
    """Switches that are off, apply, and could gain more than 5 %, the largest gain first.

    A debugging aid spoils the figures: then there are none.
    """
    if situation.config.debug.mode != "none":
        return []
    found = [suggestion for rule in _RULES for suggestion in rule(situation)]
    good = [
        suggestion
        for suggestion in found
        if suggestion.up_to(situation.step.seconds) > WORTH and _applies(suggestion, situation)
    ]
    return sorted(good, key=lambda suggestion: -suggestion.saved_s)


def describe(suggestions: list[Suggestion], step_s: float) -> dict[str, Any]:
    """The entries of summary.json, with a line on the first."""
    rows = [
        {
            "switch": suggestion.words,
            "technique": suggestion.technique.name if suggestion.technique else None,
            "class": suggestion.technique.kind if suggestion.technique else "training",
            "up_to": round(suggestion.up_to(step_s), 3),
            "why": suggestion.why,
        }
        for suggestion in suggestions
    ]
    line = "none: no switch promises more than 5 %"
    if rows:
        first = rows[0]
        line = f"{first['switch']}, up to {first['up_to']:.2g}x: {first['why']}"
        if first["class"] in ("reduced", "training"):
            promise = {"reduced": "at lower precision", "training": "it changes what is learnt"}
            line += f" ({promise[first['class']]})"
    return {"next": line, "suggestions": rows}


def _applies(suggestion: Suggestion, situation: Situation) -> bool:
    """Return True if it is off, and neither the machine nor another switch rules it out."""
    config, technique = situation.config, suggestion.technique
    if technique is not None and any(situation.lacks(need) for need in technique.needs if need != "ranks"):
        return False
    changed = config
    for section, keys in suggestion.changes.items():
        part = getattr(config, section)
        changed = changed.model_copy(update={section: part.model_copy(update=keys)})
    if suggestion.changes and changed == config:
        return False
    _, problems = across_keys(changed, lambda key: "")
    return not problems


def _switch(
    name: str, words: str, saved_s: float, why: str, **changes: dict[str, Any]
) -> Iterator[Suggestion]:
    yield Suggestion(_NAMED[name], words, saved_s, why, changes)


def _data(run: Situation) -> Iterator[Suggestion]:
    """A step that waits for its batch: let others load it, or have it loaded already."""
    wait, loader = run.step.rows["data"], run.config.dataloader
    why = f"{wait / run.step.seconds:.0%} of a step waits for data"
    if loader.kind != "auto" and run.data_kind == "image":
        # It takes the memory or the device where the data fits.
        name = "data on the device" if run.device == "cuda" else "data in memory"
        yield from _switch(name, "dataloader=auto", wait, why, dataloader={"kind": "auto"})
    if run.loader == "plain":
        yield from _switch(
            *("worker processes", "dataloader=workers", wait, why), dataloader={"kind": "workers"}
        )
    if run.loader != "workers" and run.device == "cpu":
        # The loading still takes its time, beside the training.
        beside = min(wait, run.step.seconds - wait)
        yield from _switch(
            *("reading ahead in a thread", "dataloader.read_ahead=true", beside, why),
            dataloader={"read_ahead": True},
        )


def _transfer(run: Situation) -> Iterator[Suggestion]:
    row = run.step.rows["transfer"]
    why = f"{row / run.step.seconds:.0%} of a step waits for copies to the device"
    yield from _switch(
        *("transfers on a side stream", "dataloader.side_stream=true", row, why),
        dataloader={"side_stream": True},
    )


def _padding(run: Situation) -> Iterator[Suggestion]:
    share = run.padding_share or 0.0
    saved, why = share * _computing(run), f"{share:.0%} of all tokens are padding"
    if run.config.batching.padding == "fixed":
        yield from _switch(
            *("dynamic padding", "batching=longest", saved, why), batching={"padding": "longest"}
        )
    if run.config.batching.pack:
        return
    if run.has_documents:
        yield from _switch("sequence packing", "batching=pack", saved, why, batching={"pack": True})
    if not run.config.batching.buckets:
        yield from _switch(
            *("uniform-length batches", "batching=buckets", saved, why), batching={"buckets": True}
        )


def _precision(run: Situation) -> Iterator[Suggestion]:
    """Products in a type of which the machine was seen to do more in a second."""
    peaks, now = run.step.peaks.flops_per_s, run.step.work.format
    if now not in ("fp32", "fp32_high", "fp32_medium", "tf32") or run.config.precision.mode == "bf16_true":
        return
    # What calls operators and moves memory stays as it is.
    heavy = min(_LOOSE * run.step.floors["compute"], _computing(run))
    half = "fp16" if run.device == "cuda" else "bf16"
    for name, words, to, share, changes in (
        ("mixed precision", "precision=amp", half, 1.0, {"mode": "amp"}),
        ("TF32", "precision=tf32", "tf32", 1.0, {"mode": "tf32", "matmul_precision": "high"}),
        (
            *("measured matrix products", "precision.matmul_precision=auto", "fp32_medium"),
            run.step.work.matmul_share,
            {"matmul_precision": "auto"},
        ),
    ):
        if to not in peaks or (to == "tf32" and run.config.precision.mode != "fp32"):
            continue
        faster = peaks[to] / peaks[now]
        why = f"{to.partition('_')[0]} products {faster:.1f}x as fast here"
        if to == "fp32_medium":
            if now != "fp32" or run.device != "cpu":
                continue
            why = f"another library's products {faster:.1f}x as fast here"
        yield from _switch(name, words, share * heavy * (1 - 1 / faster), why, precision=changes)


def _optimizer(run: Situation) -> Iterator[Suggestion]:
    row = run.step.rows["optimizer"]
    target = run.config.optimizer.target
    if run.stepping == "fused" or target.kwargs.get("fused") is not False or target.kwargs.get("foreach"):
        return
    if "fused" not in inspect.signature(target.resolve()).parameters:
        return
    floor = run.step.work.update_bytes / run.step.peaks.bytes_per_s
    why = f"{row / run.step.seconds:.0%} of a step is the optimizer's"
    changed = replace(target, kwargs={**target.kwargs, "fused": "auto"})
    yield from _switch(
        *("fused optimizer step", "optimizer.fused=auto", row - floor, why), optimizer={"target": changed}
    )


def _launches(run: Situation) -> Iterator[Suggestion]:
    """Operators so small that calling them is what takes the time."""
    calling = min(run.step.floors["overhead"], run.step.seconds)
    why = f"{run.step.work.calls:,.0f} small operators a step"
    if run.config.compile.mode != "none":
        return
    if run.device == "cuda":
        yield from _switch(
            *("compiled into CUDA graphs", "compile=reduce_overhead", calling, why),
            compile={"mode": "reduce_overhead"},
        )
    yield from _switch("compiled model", "compile=model", calling, why, compile={"mode": "model"})
    if run.step.bound in ("overhead", "operators"):
        yield Suggestion(None, "ptfast find batch", calling / 2, f"{why}, for twice the samples", {})


def _pointwise(run: Situation) -> Iterator[Suggestion]:
    """Elementwise operators, each of which reads and writes memory: the shortest chain that is one is two."""
    moving = run.step.work.pointwise_bytes / run.step.peaks.bytes_per_s
    if run.config.compile.mode == "none":
        why = f"elementwise operators move memory for {min(moving / run.step.seconds, 1):.0%} of a step"
        yield from _switch(
            *("compiled elementwise chains", "compile=pointwise", moving / 2, why),
            compile={"mode": "pointwise"},
        )


def _sync(run: Situation) -> Iterator[Suggestion]:
    row, parallel = run.step.rows["gradient_sync"], run.config.parallel
    if run.num_ranks > 1 and parallel.strategy == "ddp" and parallel.compression == "none":
        why = f"{row / run.step.seconds:.0%} of a step waits for gradients"
        yield from _switch(
            *("bf16 gradients over the network", "parallel.compression=bf16", row / 2, why),
            parallel={"compression": "bf16"},
        )


def _computing(run: Situation) -> float:
    """Seconds of a step in forward and backward."""
    return run.step.rows["forward"] + run.step.rows["backward"]


_RULES = (_data, _transfer, _padding, _precision, _optimizer, _launches, _pointwise, _sync)
