"""What a run computes on (threads, kernels, number format, micro-batches), and what is built so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ptfast.config.checks.rules import check_batch
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError, name_some
from ptfast.core.plain_display import Display
from ptfast.core.protocols import DataInfo, Task
from ptfast.core.resolved import Resolved
from ptfast.core.saved_state import State
from ptfast.data.build_data import Data
from ptfast.data.loaders.build_loaders import EvaluationLoader, Loader
from ptfast.data.loaders.loading import ReaderOptions
from ptfast.optim.parameter_groups import Grouping
from ptfast.techniques.backend.torch_settings import apply_backend
from ptfast.techniques.compile.compilation import Compilation
from ptfast.techniques.ema.weight_averages import Average
from ptfast.techniques.parallel import check_ranks
from ptfast.techniques.precision.number_formats import NumberFormats, build_precision
from ptfast.techniques.schedule.scheduled_run import LrSchedule
from ptfast.training.stages.training_plan import TrainingPlan


@dataclass(kw_only=True)
class BuildContext:
    """What a run is built from, and what the stages have built so far, in the order of the stages."""

    config: Config
    ranks: Ranks
    device: torch.device
    precision: NumberFormats
    display: Display
    before: Resolved
    """As resolved when the run was begun; nothing for a new one."""
    resolved: Resolved = field(default_factory=Resolved)
    """As resolved now: each stage adds its own."""
    state: State | None = None
    """The saved state that the run resumes."""
    data: Data | None = None
    """The splits; None where a saved model is loaded without any."""
    info: DataInfo = field(init=False)
    task: Task = field(init=False)
    model: nn.Module = field(init=False)
    plan: TrainingPlan = field(init=False)
    grouping: Grouping = field(init=False)
    """The config's demands on the model's parameters."""
    compilation: Compilation | None = None
    wrap: Callable[[], Any] = field(init=False)
    """Makes of the model what the loop calls; again where freezing changes what ranks exchange."""
    forward: Any = None
    """What it has made."""
    reading: ReaderOptions = field(init=False)
    """How samples are made ready."""
    train_loader: Loader = field(init=False)
    eval_loaders: dict[str, EvaluationLoader] = field(default_factory=dict)
    """By split."""
    optimizer: torch.optim.Optimizer = field(init=False)
    schedule: LrSchedule = field(init=False)
    average: Average | None = None

    @property
    def micro_batches(self) -> int:
        """Parts of a step's batch, over all ranks."""
        return self.resolved.micro_batches

    @property
    def micro_batch_size(self) -> int:
        """Samples of each part, where it is a whole one."""
        return self.config.batch_size // self.micro_batches

    @property
    def splits(self) -> Data:
        """The splits, where there must be some."""
        assert self.data is not None
        return self.data

    @property
    def is_sharded(self) -> bool:
        """True if ranks share the weights out."""
        return self.config.parallel.strategy == "fsdp" and self.ranks.distributed


def set_up_machine(
    config: Config,
    device: torch.device,
    *,
    ranks: Ranks,
    display: Display,
    before: Resolved,
    state: State | None = None,
    trains: bool = True,
) -> BuildContext:
    """Set torch's process-wide switches, before anything runs on the device.

    Without `trains`, cuDNN's search for kernels stays off, which a single evaluation does not repay.
    """
    if trains and before.num_ranks != ranks.num_ranks:
        # On other ranks the bits differ anyway; what is meant for one rank's cores would crowd several.
        before = replace(before, threads=0, threads_reason="", workers=0)
    backend = config.backend if trains else config.backend.model_copy(update={"cudnn_benchmark": False})
    switches = apply_backend(
        backend,
        device=device,
        num_local_ranks=ranks.num_local_ranks,
        before=before,
        reads_ahead=config.dataloader.read_ahead,
    )
    precision = build_precision(config.precision, device, ranks, before=before)
    context = BuildContext(
        config=config,
        ranks=ranks,
        device=device,
        precision=precision,
        display=display,
        before=before,
        resolved=Resolved(
            device=str(device.type),
            num_ranks=ranks.num_ranks,
            micro_batches=before.micro_batches or config.micro_batches or config.gradients.accumulate,
            precision=precision.note,
            matmul_precision=precision.matmul,
            **switches,
        ),
        state=state,
    )
    if trains:
        _cut_batch(context)
    return context


def _cut_batch(context: BuildContext) -> None:
    """Resolve the parts of a batch; a resumed run keeps its own, whatever its ranks would give now."""
    config, ranks, known = context.config, context.ranks, context.before.micro_batches
    if known % ranks.num_ranks:
        what = f"the saved run has so many, which {ranks.num_ranks} ranks cannot share evenly"
        fitting = [str(number) for number in range(1, known + 1) if known % number == 0]
        hint = f"Resume it on {name_some(fitting)} ranks: only a new run may cut its batches otherwise"
        raise ConfigError("C010", what, key="micro_batches", value=known, suggestion=hint)
    context.resolved.micro_batches = check_batch(
        config.batch_size,
        known or config.micro_batches,
        ranks.num_ranks,
        1 if known else config.gradients.accumulate,
        config.curriculum.batch_size_from,
    )
    check_ranks(
        config.parallel, ranks.num_ranks, context.micro_batches, scales=context.precision.scaler is not None
    )
