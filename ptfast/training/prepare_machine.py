"""From a config to what a run computes on: device, threads, kernels, number format, parts of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ptfast.config.checks.rules import check_batch
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError, name_some
from ptfast.core.run import Display, Resolved
from ptfast.core.saved_state import State
from ptfast.techniques.backend.torch_settings import apply_backend
from ptfast.techniques.parallel import check_ranks
from ptfast.techniques.precision.number_formats import Precision, build_precision


@dataclass(kw_only=True)
class BuildContext:
    """Where a run is built, for every stage: config, ranks, device, and what `auto` becomes."""

    config: Config
    ranks: Ranks
    device: torch.device
    precision: Precision
    display: Display
    before: Resolved
    """As resolved when the run was begun; nothing for a new one."""
    resolved: Resolved = field(default_factory=Resolved)
    """As resolved now: each stage adds its own."""
    state: State | None = None
    """The saved state that the run resumes."""

    @property
    def micro_batches(self) -> int:
        """Parts of a step's batch, over all ranks."""
        return self.resolved.micro_batches

    @property
    def micro_batch_size(self) -> int:
        """Samples of each part, where it is a whole one."""
        return self.config.batch_size // self.micro_batches


def prepare_machine(
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

    Args:
        before: as in `BuildContext`.
        trains: False leaves cuDNN's search for kernels off, which a single evaluation does not repay.

    Raises:
        MachineError: E005 for what this machine cannot run.
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
            precision=precision.describe(),
            matmul_precision=precision.matmul,
            **switches,
        ),
        state=state,
    )
    if trains:
        _cut_batch(context)
    return context


def _cut_batch(context: BuildContext) -> None:
    """Resolve the parts of a batch; a resumed run keeps its own, whatever its ranks would give now.

    Raises:
        ConfigError: C010 or C011 for parts that cannot be, or that the ranks or the precision rule out.
    """
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
