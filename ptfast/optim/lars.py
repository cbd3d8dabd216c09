"""LARS: SGD with momentum and steps in proportion to each layer's norm."""

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


class Lars(LayerwiseOptimizer):
    """SGD with a learning rate per layer, for batches of thousands of images.

    At large batch sizes, one global learning rate overshoots in layers whose gradients are large relative to
    their weights. Here, the gradient `g` of a layer `w` is scaled before it enters the momentum:

        ratio = trust * |w| / (|g| + weight_decay * |w| + eps), or 1 where |w| or |g| is 0
        v <- momentum * v + ratio * (g + weight_decay * w);    w <- w - lr * v

    As in torch's SGD, weight decay is L2, here rescaled with the gradient, and the learning rate is applied
    after the momentum. The paper applies it before, which is equivalent while it is constant.

    Args:
        lr: >= 0; `lr * trust` is the relative length of a step. 1-d parameters use `lr` alone
            and diverge above 1: raise `trust` instead.
        momentum: decay of the velocity, in [0, 1).
        nesterov: step along the gradient after the momentum.
        weight_decay: L2 coefficient, >= 0.
        trust: trust coefficient, > 0, about 1e-3 to 2e-2.
        eps: added to the denominator, >= 0.
        exclude_1d: treat 1-d parameters (biases, norm weights) as SGD does, without scaling or decay.

    Cost: 1.3 to 1.5 times AdamW's fused step on the CPU, with half its state. Written from You, Gitman,
    Ginsburg 2017, arXiv:1708.03888, Algorithm 1.
    """

    layer_state = ("momentum_buffer",)

    def __init__(
        self,
        params: Params,
        lr: Positive = 1.0,
        momentum: Fraction = 0.9,
        nesterov: bool = False,
        weight_decay: NotNegative = 0.0,
        trust: float = 1e-3,
        eps: Positive = 1e-8,
        exclude_1d: bool = True,
    ) -> None:
        if not trust > 0:
            raise ValueError(f"trust must be above 0, not {trust}")
        super().__init__(params, defaults_of(locals()))

    def _update(self, group: Group, batch: LayerBatch) -> None:
        excluded = group["exclude_1d"] and batch.ndim <= 1
        decay = 0.0 if excluded else group["weight_decay"]
        ratios = None
        if not excluded:
            layer_norms, grad_norms = (
                batch.norms([size for piece in batch.pieces for size in batch.sizes(piece[column])])
                for column in (0, 1)
            )
            if batch.grad_factor is not None:
                grad_norms = grad_norms * batch.grad_factor
            ratios = group["trust"] * layer_norms / (grad_norms + decay * layer_norms + group["eps"])
            ratios = torch.where(torch.minimum(layer_norms, grad_norms) > 0, ratios, 1.0)
        keywords = {name: group[name] for name in ("lr", "momentum", "nesterov")}
        step_by_momentum(batch, ratios, decay_within=decay, **keywords)
