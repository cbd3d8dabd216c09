"""Several ranks as one: gradients averaged, weights shared out, statistics as one process would have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ptfast.core.distributed import Ranks
from ptfast.techniques.parallel import Parallel


def wrap_for_ranks(
    model: nn.Module,
    ranks: Ranks,
    options: Parallel,
    device: torch.device,
    *,
    blocks: Mapping[str, nn.Module] | None = None,
    half_type: torch.dtype | None = None,
) -> Any:
    """The model as the loop calls it: by itself on one rank, else averaged (`ddp`) or shared out (`fsdp`).

    Args:
        model: the plain model, on `device`; for `fsdp` on the CPU.
        options: the section `parallel` of the config.
        blocks: for `fsdp`, by name, the parts whose weights are gathered and let go of together.
        half_type: for `fsdp`, what autocast computes in; None for float32.
    """
    if not ranks.distributed:
        return model
    if options.strategy == "fsdp":
        from ptfast.techniques.parallel.fsdp import Sharded

        return Sharded(model, ranks, device, blocks=list((blocks or {}).values()), half_type=half_type)
    from ptfast.techniques.parallel.ddp import Averaged

    return Averaged(model, options)


def unwrap(forward: Any) -> None:
    """Take a model out of its wrapping, whose hooks would keep averaging beside those of a new one."""
    if isinstance(forward, nn.parallel.DistributedDataParallel):
        forward._remove_autograd_hooks()
