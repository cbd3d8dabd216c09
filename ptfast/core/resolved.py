"""What `auto` became in a run, and how far the run is, as saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ptfast.core import run_directory

LEAST_STEPS, LEAST_S = 5, 2.0
"""Fewer steps or seconds after the warm-up give no throughput: a neighbour's burst would make it."""


@dataclass(kw_only=True)
class Resolved:
    """The content of `resolved.json`: what `auto` became, and other facts for a resumed run and the panel.

    Resolved once, by the first rank, and taken from the file when the run is resumed. A field at its default
    is not resolved yet.
    """

    task: str = ""
    task_reason: str = ""
    """The labels' trait that implies it; empty if the config names the task."""
    device: str = ""
    """Its type."""
    num_ranks: int = 0
    micro_batches: int = 0
    threads: int = 0
    threads_reason: str = ""
    """Why `auto` took fewer threads than there are cores; empty if it did not."""
    interop_threads: int = 0
    cudnn_benchmark: bool | None = None
    deterministic: bool = False
    holds_memory: bool = False
    """Memory that the CPU frees is kept for the next step."""
    expands_segments: bool = False
    """Segments of the GPU's memory grow."""
    cudnn_attention: bool | None = None
    """cuDNN may compute attention; None without a GPU."""
    flushes_denormals: bool = False
    """The CPU takes numbers below 1e-38 for 0."""
    precision: str = ""
    matmul_precision: str = ""
    float8: list[str] = field(default_factory=list)
    """Layers that multiply in float8."""
    channels_last: bool | None = None
    dropped_biases: dict[str, str] | None = None
    """Layers whose bias was dropped, and the BatchNorm that subtracts it."""
    fused_norms: list[str] = field(default_factory=list)
    """RMS norms that torch's kernel computes."""
    checkpointed: list[str] = field(default_factory=list)
    compile_dynamic: bool | None = None
    shards: list[str] = field(default_factory=list)
    dataloader: str = ""
    dataloader_reason: str = ""
    workers: int = 0
    worker_threads: int = 0
    side_stream: bool = False
    fused_images: bool = False
    read_ahead: bool = False
    sampling: str | None = None
    """How samples are drawn, in words; None if each comes once in an epoch."""
    padding: str | None = None
    padding_share: float | None = None
    """Of the tokens of an epoch, in [0, 1]; None if nothing is padded."""
    optimizer: str = ""
    """Which kernels take its step."""
    lr_scaling: str | None = None
    momentum: str | None = None
    """Its treatment by the schedule, in words."""
    curriculum: list[str] = field(default_factory=list)
    """A line for each thing that grows."""
    total_steps: int = 0

    @classmethod
    def read(cls, folder: Path, facts: Mapping[str, Any] | None = None) -> Resolved:
        """Read from a run directory, or from the `facts` of a state if the file is gone."""
        known = {each.name for each in fields(cls)}
        found = run_directory.read_json(folder / run_directory.RESOLVED) or (facts or {}).get("resolved", {})
        return cls(**{name: value for name, value in found.items() if name in known})

    def write(self, folder: Path) -> None:
        """Keep it in a run directory; called on the first rank."""
        run_directory.write_json(folder / run_directory.RESOLVED, asdict(self))


def resolved_or(wanted: Any, before: Any) -> Any:
    """The value in the config, or what its `auto` was resolved to before."""
    return before or wanted if wanted == "auto" else wanted


@dataclass
class Progress:
    """Where a run stands; saved with the weights and restored with them."""

    step: int = 0
    samples: int = 0
    best_value: float | None = None
    best_step: int | None = None
    best_states: list[tuple[float, int]] = field(default_factory=list)
    """Value and step of the best evaluations whose states are kept, the best first."""
    evaluations_without_gain: int = 0
    timed_steps: int = 0
    """Steps that its speed is computed from, over all attempts, without warm-up and measured steps."""
    timed_samples: int = 0
    timed_s: float = 0.0
    """Seconds that those steps took."""
    window_loss: float = 0.0
    """Sum of the item losses since the last log line, so that a resumed run logs the same figure."""
    window_items: float = 0.0
    epoch_loss: float = 0.0
    """Sum of the item losses since the last evaluation, without the open window."""
    epoch_items: float = 0.0
    evaluation_due: bool = False
    """The evaluation of this step is still to be made."""
    skipped_steps: int = 0
    """Steps that were left out because a loss or gradients were not finite, or overflowed in fp16."""
    skipped_before: int = 0
    """The same before the last step: how far the schedule of fp16 is behind in the next one."""
    skipped_logged: int = 0
    """The same at the last log line."""
    recent_losses: list[float] = field(default_factory=list)
    """Of the latest log lines, the newest last."""
    loss_spikes: int = 0
    largest_spike: dict[str, float] | None = None
    """Its `step`, its `loss`, and the `usual` one at the time."""

    @property
    def samples_per_s(self) -> float | None:
        """Training samples a second, warm-up left out; None if the run was too short."""
        enough = self.timed_steps >= LEAST_STEPS and self.timed_s >= LEAST_S
        return self.timed_samples / self.timed_s if enough else None
