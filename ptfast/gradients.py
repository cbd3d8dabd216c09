"""Gradient clipping on the device: by global norm, by value, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_

Clipper = Callable[[], Tensor | None]


def build_clipper(
    clip_norm: float | None, clip_value: float | None, parameters: Iterable[Tensor]
) -> Clipper | None:
    """What clips the gradients between backward and the optimizer's step, or None where nothing does.

    Args:
        clip_norm: longest allowed norm of all gradients taken as one vector; longer ones are rescaled.
        clip_value: largest allowed magnitude of a single entry; clamped first where both are given.
        parameters: those being trained; gradients must be unscaled and, with several ranks, averaged.

    Returns:
        A function that clips in place and returns the norm before rescaling: 0-d, on the device, not read by
        the host, so that it can be summed and logged later. None with `clip_value` alone.

    Cost: one pass over the gradients for the norm and one to rescale, a few kernels in all.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def by_value() -> None:
        assert clip_value is not None
        clip_grad_value_(trained, clip_value)

    def by_norm() -> Tensor:
        assert clip_norm is not None
        return clip_to_norm(trained, clip_norm)

    def by_both() -> Tensor:
        by_value()
        return by_norm()

    if clip_value is None:
        return None if clip_norm is None else by_norm
    return by_value if clip_norm is None else by_both


@torch.no_grad()
def clip_to_norm(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for one device: the same bits, in half its time on small nets.

    Args:
        parameters: those whose gradients are rescaled in place; ones without a gradient are passed over.
        max_norm: longest allowed norm.

    Returns:
        The norm before rescaling: 0-d, on the device.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    # Always multiplied, by 1 at most: to ask the norm whether it is too long would make the host wait for it.
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm
