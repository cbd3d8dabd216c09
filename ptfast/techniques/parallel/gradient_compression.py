"""Gradients exchanged in fewer bytes than they have: communication hooks for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ptfast.core.distributed import Ranks

Mode = Literal["none", "bf16", "fp16", "powersgd"]


def apply_compression(
    ddp: nn.parallel.DistributedDataParallel, mode: Mode, rank: int, start_steps: int
) -> PowerSgd | None:
    """Let `ddp` send its buckets of gradients in fewer bytes.

    Between machines the network is often slower than the gradients are made: fewer bytes make the steps
    shorter wherever the ranks wait for it, and nowhere else.

    Args:
        mode: `bf16` and `fp16` send half the bytes of float32; `powersgd` sends two thin matrices for each.
        rank: how thin: columns of PowerSGD's matrices.
        start_steps: steps before PowerSGD begins, at least 2.

    Returns:
        What is remembered from step to step, for whoever saves it; None where nothing is.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if mode == "powersgd":
        powersgd = PowerSgd(rank, start_steps)
        ddp.register_comm_hook(powersgd, lambda state, bucket: state(bucket))
        return powersgd
    if mode != "none":
        half = mode == "bf16"
        hook = default_hooks.bf16_compress_hook if half else default_hooks.fp16_compress_hook
        ddp.register_comm_hook(None, hook)  # type: ignore[arg-type] - it knows None
    return None


class PowerSgd:
    """Gradients of matrices cross the ranks as products of two thin ones.

    What is lost of them in one step is added to the next. It differs between ranks: that of each is saved.

    Args:
        rank: columns of the thin matrices.
        start_steps: steps in which whole gradients are sent before.

    Cost: a copy of the gradients on every rank, here and in every saved state; two small matrix products and
    an orthogonalisation per matrix. Source: Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727.
    """

    def __init__(self, rank: int, start_steps: int) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._state = PowerSGDState(None, rank, start_steps)
        self._rehearsing = False

    def __call__(self, bucket: Any) -> Any:
        """The bucket averaged over the ranks, as DDP's hooks give it back."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        if self._rehearsing:
            return default_hooks.allreduce_hook(torch.distributed.group.WORLD, bucket)  # type: ignore[arg-type]
        return powerSGD_hook.powerSGD_hook(self._state, bucket)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Let gradients be sent whole and nothing be remembered of them."""
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False

    def gather_state(self, ranks: Ranks) -> dict[str, Any] | None:
        """The error feedback of all ranks, on the first; None on the others. All have to call it."""
        state = self._state
        own: dict[str, Any] = {name: _to_cpu(getattr(state, name)) for name in _REMEMBERED}
        of_ranks: list[Any] | None = [None] * ranks.num_ranks if ranks.is_first else None
        torch.distributed.gather_object(own, of_ranks)
        return None if of_ranks is None else {"iter": state.iter, "ranks": of_ranks}

    def load_state(self, saved: dict[str, Any], ranks: Ranks, device: torch.device) -> bool:
        """Take over this rank's part; False, and nothing done but the count, for another number of ranks."""
        self._state.iter = int(saved["iter"])
        if len(saved["ranks"]) != ranks.num_ranks:
            return False
        for name, tensors in saved["ranks"][ranks.rank].items():
            setattr(self._state, name, {index: tensor.to(device) for index, tensor in tensors.items()})
        return True


_REMEMBERED = ("error_dict", "p_memory_dict", "q_memory_dict")


def _to_cpu(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    return {index: tensor.cpu() for index, tensor in tensors.items()}
