"""DistributedDataParallel as the loop needs it: gradients averaged, a parameter without one named."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError, name_some
from ptfast.techniques.parallel import Parallel


class PowerSgd:
    """Ranks exchange the gradient of a matrix as the product of two thin matrices.

    The error of one step is added to the next. It differs between ranks, so that of each is saved. The first
    `start_steps` send whole gradients.

    Cost: a copy of the gradients on every rank, here and in every saved state; two small matrix products and
    an orthogonalisation per matrix. Source: Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727.
    """

    def __init__(self, rank: int, start_steps: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._state = PowerSGDState(None, rank, start_steps)
        self.forgets = False
        """Send whole gradients, and keep no error of them."""

    def __call__(self, bucket: Any) -> Any:
        """The future of the bucket averaged over the ranks, as of any hook of DDP."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self.forgets:
            return default_hooks.allreduce_hook(torch.distributed.group.WORLD, bucket)  # type: ignore[arg-type]
        return powerSGD_hook.powerSGD_hook(self._state, bucket)

    def gather_state(self, ranks: Ranks) -> dict[str, Any] | None:
        """The error feedback of all ranks, on the first; None on the others. A collective."""
        state = self._state
        own: dict[str, Any] = {
            name: {index: tensor.cpu() for index, tensor in getattr(state, name).items()}
            for name in ("error_dict", "p_memory_dict", "q_memory_dict")
        }
        of_ranks: list[Any] | None = [None] * ranks.num_ranks if ranks.is_first else None
        torch.distributed.gather_object(own, of_ranks)
        return None if of_ranks is None else {"iter": state.iter, "ranks": of_ranks}

    def load_state(self, saved: dict[str, Any], ranks: Ranks, device: torch.device) -> bool:
        """Load this rank's part; for another number of ranks return False and load only the step count."""
        self._state.iter = int(saved["iter"])
        if len(saved["ranks"]) != ranks.num_ranks:
            return False
        for name, tensors in saved["ranks"][ranks.rank].items():
            setattr(self._state, name, {index: tensor.to(device) for index, tensor in tensors.items()})
        return True


class GradientAveraging(nn.parallel.DistributedDataParallel):
    """A model on several ranks, whose gradients are averaged while backward still runs.

    `RunningStatistics` merges the buffers of BatchNorm. Compressed gradients take fewer bytes, for ranks that
    wait for the network: `bf16` and `fp16` half of float32's, `powersgd` those of two thin matrices.
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
        self.compression: PowerSgd | None = None
        if options.compression == "powersgd":
            self.compression = PowerSgd(options.powersgd_rank, options.powersgd_start)
            self.register_comm_hook(self.compression, lambda state, bucket: state(bucket))
        elif options.compression != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hook = getattr(default_hooks, f"{options.compression}_compress_hook")
            self.register_comm_hook(None, hook)  # type: ignore[arg-type] - it knows None

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """The model's output; C011 names a parameter that the step before left without a gradient."""
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
        """Refuse, with C011, parameters without a gradient, which DDP notices one wrong step later."""
        named = self.module.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if unused and not self.finds_unused:
            raise _unused_error(unused)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Keep a backward pass out of the error feedback of compression."""
        if self.compression is None:
            yield
            return
        self.compression.forgets = True
        try:
            yield
        finally:
            self.compression.forgets = False


def _unused_error(names: list[str]) -> ConfigError:
    hint = "Set parallel.unused_parameters=true, or freeze or remove what the model does not use"
    what = f"the loss does not depend on {name_some(names)}, whose gradients the ranks wait for"
    return ConfigError("C011", what, key="parallel.unused_parameters", value="false", suggestion=hint)
