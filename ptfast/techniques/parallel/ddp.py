"""DistributedDataParallel as the loop needs it: gradients averaged, a parameter without one named."""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from ptfast.core.errors import ConfigError, name_some
from ptfast.techniques.parallel import Parallel
from ptfast.techniques.parallel.gradient_compression import apply_compression


class Averaged(nn.parallel.DistributedDataParallel):
    """A model on several ranks, whose gradients are averaged while backward still runs.

    Batches are on the rank's device already, and `RunningStatistics` sees to BatchNorm: neither inputs nor
    buffers are DDP's to move.

    Args:
        model: the plain model, on its device.
        options: the section `parallel` of the config.
    """

    def __init__(self, model: nn.Module, options: Parallel) -> None:
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        keywords: dict[str, Any] = {buffers: False}
        super().__init__(
            model,
            bucket_cap_mb=options.bucket_mb,  # type: ignore[arg-type] - a fraction will do
            find_unused_parameters=options.unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
            **keywords,
        )
        self.finds_unused = options.unused_parameters or options.static_graph
        self.compression = apply_compression(
            self, options.compression, options.powersgd_rank, options.powersgd_start
        )

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's output; a parameter that the step before has left out is named."""
        try:
            return super().forward(*inputs, **keywords)
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            names = [name for name, p in self.module.named_parameters() if p.requires_grad]
            unused = [names[int(index)] for index in found[1].split()]
            raise _unused_error(unused) from error

    def check_gradients(self) -> None:
        """Refuse parameters that a backward pass has left without a gradient.

        DDP would notice it only in the next forward pass, one wrong step later: the gradients that share a
        bucket with a missing one are not averaged.

        Raises:
            ConfigError: C011, naming them.
        """
        named = self.module.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if unused and not self.finds_unused:
            raise _unused_error(unused)

    def rehearsing(self) -> AbstractContextManager[None]:
        """Let a backward pass leave no trace in what compression remembers."""
        return nullcontext() if self.compression is None else self.compression.rehearsing()


def _unused_error(names: list[str]) -> ConfigError:
    hint = "Set parallel.unused_parameters=true, or freeze or remove what the model does not use"
    what = f"the loss does not depend on {name_some(names)}, whose gradients the ranks wait for"
    return ConfigError("C011", what, key="parallel.unused_parameters", value="false", suggestion=hint)
