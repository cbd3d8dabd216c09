"""DistributedDataParallel for the loop: average gradients, and name a parameter without one."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from ptfast.core.errors import ConfigError, name_some
from ptfast.techniques.parallel import Parallel


class GradientAveraging(nn.parallel.DistributedDataParallel):
    """A model on several ranks, whose gradients are averaged during backward.

    `RunningStatistics` merges BatchNorm's buffers. On a slow network, gradients can be compressed to half the
    bytes of float32.
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
            **keywords,
        )
        if options.compression != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = getattr(default_hooks, f"{options.compression}_compress_hook")
            self.register_comm_hook(None, hook)  # type: ignore[arg-type] - it knows None

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's output; C011 names a parameter that the last step left without a gradient."""
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
        """Raise C011 for parameters without a gradient, which DDP reports only after one wrong step."""
        named = self.module.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if unused and not self.find_unused_parameters:
            raise _unused_error(unused)


def _unused_error(names: list[str]) -> ConfigError:
    hint = "Set parallel.unused_parameters=true, or freeze or remove unused parameters"
    what = f"the loss does not depend on {name_some(names)}, whose gradients the ranks wait for"
    return ConfigError("C011", what, key="parallel.unused_parameters", value="false", suggestion=hint)
