"""Gradient clipping on the device: by global norm, by value, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

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
        return clip_grad_norm_(trained, clip_norm)

    def by_both() -> Tensor:
        by_value()
        return by_norm()

    if clip_value is None:
        return None if clip_norm is None else by_norm
    return by_value if clip_norm is None else by_both
