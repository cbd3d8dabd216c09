"""NovoGrad: momentum over gradients that are normalized per layer by their running norm."""

from __future__ import annotations

import torch

from ptfast.core.sections.section import Fraction, NotNegative, Positive
from ptfast.optim.layerwise import (
    Group,
    LayerBatch,
    LayerwiseOptimizer,
    Params,
    defaults_of,
    step_by_momentum,
)


class Novograd(LayerwiseOptimizer):
    """Adam with one second moment per layer, and half of Adam's memory.

    The second moment is one number per layer: a running average of the gradient's squared norm, which starts
    with the first gradient's. For a layer `w` with gradient `g`:

        v <- beta2 * v + (1 - beta2) * |g|^2
        m <- beta1 * m + g / (sqrt(v) + eps) + weight_decay * w;    w <- w - lr * m

    Weight decay is added after the normalization but before the momentum: with AdamW's rate and decay it
    is 1 / (1 - beta1) times as strong, unless gradients are averaged.

    Args:
        lr: >= 0; about the norm of a layer's step, times 1 / (1 - beta1); about 1e-3 to 1e-2.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the root of the second moment, >= 0.
        weight_decay: weight decay, >= 0.
        grad_averaging: scale each new gradient in the momentum by 1 - beta1, as Adam does.
        exclude_1d: no weight decay on 1-d parameters (biases, norm weights).

    Cost: 1.2 times AdamW's fused step on the CPU, with half its state. Written from Ginsburg et al. 2019,
    arXiv:1905.11286, Algorithm 1.
    """

    layer_state = ("exp_avg",)
    scalar_state = ("exp_avg_sq",)

    def __init__(
        self,
        params: Params,
        lr: Positive = 1e-3,
        betas: tuple[Fraction, Fraction] = (0.95, 0.98),
        eps: Positive = 1e-8,
        weight_decay: NotNegative = 0.0,
        grad_averaging: bool = False,
        exclude_1d: bool = True,
    ) -> None:
        super().__init__(params, defaults_of(locals()))

    def _update(self, group: Group, batch: LayerBatch) -> None:
        (exp_avg_sqs,) = batch.scalars
        beta1, beta2 = group["betas"]
        norms = batch.norms([size for _, grads, _ in batch.pieces for size in batch.sizes(grads)])
        if batch.grad_factor is not None:
            norms = norms * batch.grad_factor
        squares, before = norms.square(), torch.stack(exp_avg_sqs)
        after = torch.where(before == 0, squares, torch.lerp(squares, before, beta2))
        if batch.found_inf is not None:
            after = torch.where(batch.found_inf > 0, before, after)
        torch._foreach_copy_(exp_avg_sqs, after.unbind())
        factors = (after.sqrt() + group["eps"]).reciprocal()
        decay = 0.0 if group["exclude_1d"] and batch.ndim <= 1 else group["weight_decay"]
        if group["grad_averaging"]:
            factors, decay = factors * (1 - beta1), decay * (1 - beta1)
        step_by_momentum(batch, factors, lr=group["lr"], momentum=beta1, decay_beside=decay)
