"""AdamW with cautious weight decay: weights decay only where the step moves them towards zero."""

from __future__ import annotations

import torch

from ptfast.core.sections.section import Fraction, NotNegative, Positive
from ptfast.optim.layer_batches import Group, LayerBatch, multiplied
from ptfast.optim.layerwise import LayerwiseOptimizer, Params, defaults_of


class CautiousAdamW(LayerwiseOptimizer):
    """AdamW that decays a weight only where that does not oppose the step.

    Decay that opposes the step trades fit for small weights; without it the minima are those of the loss
    itself. For weights `w` and Adam's update `u`, whose sign is that of the first moment:

        w <- w - lr * (u + weight_decay * [u * w >= 0] * w)

    Args:
        lr: >= 0; as for AdamW.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the root of the second moment, >= 0.
        weight_decay: >= 0; that of AdamW serves.

    Cost: 2.5 of AdamW's fused steps on the CPU: a copy of the weights, and three passes for the decay.
    Written from Chen et al. 2025, "Cautious Weight Decay", arXiv:2510.12402, Algorithm 1.
    """

    layer_state = ("exp_avg", "exp_avg_sq")
    scalar_state = ("step",)

    def __init__(
        self,
        params: Params,
        lr: Positive = 1e-3,
        betas: tuple[Fraction, Fraction] = (0.9, 0.999),
        eps: Positive = 1e-8,
        weight_decay: NotNegative = 0.01,
    ) -> None:
        super().__init__(params, defaults_of(locals()))

    def _update(self, group: Group, batch: LayerBatch) -> None:
        steps, found_inf = batch.counted_steps(), batch.found_inf
        adam = {"lr": group["lr"], "beta1": group["betas"][0], "beta2": group["betas"][1]}
        adam |= {"eps": group["eps"], "weight_decay": 0.0, "found_inf": found_inf}
        adam |= {"amsgrad": False, "maximize": False}
        decay = group["lr"] * group["weight_decay"]
        pairs = zip(batch.buffers(self._buffers), batch.pieces, strict=True)
        for (kept, passing), (weights, grads, exp_avgs, exp_avg_sqs) in pairs:
            before = multiplied(weights, 1.0, kept) if decay else []
            state = (batch.scaled(grads, passing), exp_avgs, exp_avg_sqs, [], steps)
            torch._fused_adamw_(weights, *state, **adam)
            if not decay:
                continue
            # 1 where the step moves a weight towards zero, 0 elsewhere.
            if passing is None:
                towards_zero = torch._foreach_sign(torch._foreach_mul(exp_avgs, before))
                torch._foreach_add_(towards_zero, 1)
                torch._foreach_clamp_max_(towards_zero, 1)
            else:
                towards_zero = passing
                for exp_avg, weight, product in zip(exp_avgs, before, passing, strict=True):
                    torch.ge(torch.mul(exp_avg, weight, out=product), 0, out=product)
            if found_inf is not None:
                torch._foreach_mul_(towards_zero, 1 - found_inf)
            torch._foreach_addcmul_(weights, before, towards_zero, value=-decay)
