"""What can be set without changing what is learned: each dimension of the search, and its other settings."""

from __future__ import annotations

from collections.abc import Iterator

from ptfast.config.applicability import ThisMachine
from ptfast.config.schema import Config
from ptfast.core.machine import spare_cores, usable_cores
from ptfast.core.run import Resolved

Words = tuple[str, ...]
MOST_WORKERS = 8


def dimensions(
    config: Config, resolved: Resolved, machine: ThisMachine, *, compiles: bool
) -> dict[str, list[Words]]:
    """What can be set in a run, each in other ways than the run has, by overrides that this machine can run.

    Args:
        resolved: what `auto` became in it.
        compiles: try compiling, which takes long to begin.
    """
    found = {
        "precision": list(_precisions(config, machine)),
        "matrix products": _matmul(config),
        "layout": _other("rewrites.channels_last", resolved.channels_last),
        "optimizer step": _fused(config, resolved),
        "threads": list(_threads(resolved)),
        "loader": list(_loaders(resolved)),
        "checkpointing": [("checkpointing=none",)] if resolved.checkpointed else [],
        "compile": list(_compilations(config, machine)) if compiles else [],
    }
    return {name: settings for name, settings in found.items() if settings}


def _precisions(config: Config, machine: ThisMachine) -> Iterator[Words]:
    chosen = config.precision.mode
    if chosen != "fp32":
        yield ("precision=fp32",)
    if chosen == "fp32" and machine.lacks("half") is None:
        yield ("precision=amp",)
    if chosen != "tf32" and machine.lacks("nvidia_tf32") is None:
        yield ("precision=tf32",)


def _matmul(config: Config) -> list[Words]:
    if config.precision.mode != "fp32" or config.precision.matmul_precision != "highest":
        return []
    return [("precision.matmul_precision=auto",)]


def _fused(config: Config, resolved: Resolved) -> list[Words]:
    if "fused" not in config.optimizer.target.kwargs:
        return []
    return _other("optimizer.fused", resolved.optimizer == "fused")


def _threads(resolved: Resolved) -> Iterator[Words]:
    if resolved.device != "cpu":
        return
    most = max(1, usable_cores() // max(1, resolved.num_ranks))
    for count in sorted({1, max(1, most // 2), most} - {resolved.threads}):
        yield (f"backend.threads={count}",)


def _loaders(resolved: Resolved) -> Iterator[Words]:
    kind, spare = resolved.dataloader, spare_cores()
    if kind == "packed":
        return
    if kind != "memory":
        yield ("dataloader=memory",)
    if kind != "device" and resolved.device == "cuda":
        yield ("dataloader=device",)
    if kind != "plain" or resolved.read_ahead:
        yield ("dataloader=plain", "dataloader.read_ahead=false")
    if spare > 1 and resolved.device == "cpu" and not resolved.read_ahead and kind in ("plain", "memory"):
        yield (f"dataloader={kind}", "dataloader.read_ahead=true")
    for count in sorted({1, spare, 2 * spare}):
        if count <= MOST_WORKERS and (kind, resolved.workers) != ("workers", count):
            yield ("dataloader=workers", f"dataloader.workers={count}")


def _compilations(config: Config, machine: ThisMachine) -> Iterator[Words]:
    if machine.lacks("compiler") is None:
        for mode in ("blocks", "model"):
            if config.compile.mode != mode:
                yield (f"compile={mode}",)


def _other(key: str, chosen: bool | None) -> list[Words]:
    """The other of two settings; none where there is no choice."""
    return [] if chosen is None else [(f"{key}={str(not chosen).lower()}",)]
