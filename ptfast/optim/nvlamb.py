"""NVLAMB: LAMB after dividing all gradients by their global norm where that is too long.

Written from the description: Sreenivas et al. 2019, "Pretraining BERT with Layer-wise Adaptive Learning
Rates", NVIDIA developer blog; clipped as in apex's FusedLAMB, to norm 1, not always divided by the norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ptfast.core.sections.section import Fraction, NotNegative, Positive
from ptfast.optim.lamb import Lamb
from ptfast.optim.layer_batches import HALF_TYPES
from ptfast.optim.layerwise import Params


class Nvlamb(Lamb):
    """`Lamb` with gradients clipped to a global norm before their moments are taken.

    Large early gradients would fill the second moment and shorten thousands of later steps. Clipping happens
    in the same pass and leaves the gradients themselves as they are.

    Args:
        params: as for `Lamb`, like all others that are not listed.
        max_grad_norm: longest norm of all gradients taken as one vector, > 0; null leaves them as they are.

    Cost: that of `Lamb` and one more pass over the gradients.
    """

    def __init__(
        self,
        params: Params,
        lr: Positive = 1e-3,
        betas: tuple[Fraction, Fraction] = (0.9, 0.999),
        eps: Positive = 1e-6,
        weight_decay: NotNegative = 0.01,
        max_grad_norm: float | None = 1.0,
        norm_range: tuple[float, float] | None = None,
        adapt: bool = True,
        exclude_1d: bool = True,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, not {max_grad_norm}")
        super().__init__(params, lr, betas, eps, weight_decay, norm_range, adapt, exclude_1d)
        self.defaults["max_grad_norm"] = max_grad_norm

    def _grad_factor(self, device: torch.device) -> Tensor | None:
        unscale, longest = super()._grad_factor(device), self.defaults["max_grad_norm"]
        layers = (layer for group in self.param_groups for layer in group["params"])
        # Sparse ones are refused where layers are stepped; some versions of torch have no norm of them.
        grads = [layer.grad for layer in layers if layer.grad is not None and not layer.grad.is_sparse]
        if longest is None or not grads:
            return unscale
        norms = torch._foreach_norm(grads, dtype=torch.float32 if grads[0].dtype in HALF_TYPES else None)
        norm = torch.linalg.vector_norm(torch.stack([norm.to(device, non_blocking=True) for norm in norms]))
        if unscale is None:
            return (longest / norm).clamp_(max=1)
        return (longest / (norm * unscale)).clamp_(max=1) * unscale
