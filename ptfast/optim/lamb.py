"""LAMB: Adam with steps in proportion to each layer's norm."""

from __future__ import annotations

import torch
from torch import Tensor

from ptfast.core.sections.section import Fraction, NotNegative, Positive
from ptfast.optim.layerwise import (
    HALF_TYPES,
    Group,
    LayerBatch,
    LayerwiseOptimizer,
    Params,
    Tensors,
    defaults_of,
)


class Lamb(LayerwiseOptimizer):
    """Adam with a learning rate per layer, for batches of thousands of samples.

    At large batch sizes, one global learning rate overshoots in layers whose updates are large relative to
    their weights. Here, a layer `w` moves along Adam's update `r` and the weight decay by `lr * phi(|w|)`:

        w <- w - lr * phi(|w|) / |r + weight_decay * w| * (r + weight_decay * w)

    Decay is kept out of the moments, as in AdamW, but is rescaled with the update, so its strength depends
    on the layer.

    Args:
        lr: relative length of a step, dimensionless, >= 0; about 1e-3 to 1e-2.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the root of the second moment, >= 0.
        weight_decay: >= 0; part of the step that the trust ratio scales.
        max_grad_norm: clip the gradients of all groups together to this norm, > 0, before the moments: large
            early gradients would shorten thousands of later steps. NVLAMB uses 1.
        norm_range: clamp a layer's norm to these bounds, such as [0, 10]; null for no bounds.
        exclude_1d: treat 1-d parameters (biases, norm weights) as Adam does, without scaling or decay.

    Cost: 2.3 times AdamW's fused step on the CPU, because a layer's update is written before its norm is
    known, and a pass over the gradients for `max_grad_norm`; memory for Adam's two moments and the update of
    the largest layer. Written from You et al. 2020, arXiv:1904.00962, Algorithm 2, and for NVLAMB from
    Sreenivas et al. 2019, NVIDIA developer blog; clipped as in apex's FusedLAMB.
    """

    layer_state = ("exp_avg", "exp_avg_sq")
    scalar_state = ("step",)

    def __init__(
        self,
        params: Params,
        lr: Positive = 1e-3,
        betas: tuple[Fraction, Fraction] = (0.9, 0.999),
        eps: Positive = 1e-6,
        weight_decay: NotNegative = 0.01,
        max_grad_norm: float | None = None,
        norm_range: tuple[float, float] | None = None,
        exclude_1d: bool = True,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, not {max_grad_norm}")
        super().__init__(params, defaults_of(locals()))

    def _grad_factor(self, device: torch.device) -> Tensor | None:
        unscale, longest = super()._grad_factor(device), self.defaults["max_grad_norm"]
        if longest is None:
            return unscale
        layers = (layer for group in self.param_groups for layer in group["params"])
        # Sparse gradients are rejected in `load_grads`; some versions of torch cannot take their norm.
        grads = [layer.grad for layer in layers if layer.grad is not None and not layer.grad.is_sparse]
        if not grads:
            return unscale
        kinds = {grad.dtype for grad in grads}
        wide = torch.float64 if torch.float64 in kinds else torch.float32
        norms = torch._foreach_norm(grads, dtype=wide if kinds.intersection(HALF_TYPES) else None)
        norm = torch.linalg.vector_norm(torch.stack([norm.to(device, non_blocking=True) for norm in norms]))
        if unscale is None:
            return (longest / norm).clamp_(max=1)
        return (longest / (norm * unscale)).clamp_(max=1) * unscale

    def _update(self, group: Group, batch: LayerBatch) -> None:
        steps, found_inf = batch.counted_steps(), batch.found_inf
        excluded = group["exclude_1d"] and batch.ndim <= 1
        adam = {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"]}
        adam |= {"amsgrad": False, "maximize": False, "found_inf": found_inf}
        updates: list[Tensors] = []
        weight_sizes: Tensors = []
        update_sizes: Tensors = []
        for weights, grads, exp_avgs, exp_avg_sqs in batch.pieces:
            state = (batch.scaled(grads), exp_avgs, exp_avg_sqs, [], steps)
            if excluded:
                torch._fused_adamw_(weights, *state, lr=group["lr"], weight_decay=0.0, **adam)
                continue
            weight_sizes += batch.sizes(weights)
            # Adam's kernel subtracts: with learning rate 1 it leaves minus the whole update.
            update = list(torch._foreach_mul(weights, -group["weight_decay"]))
            torch._fused_adam_(update, *state, lr=1.0, weight_decay=0.0, **adam)
            update_sizes += batch.sizes(update)
            updates.append(update)
        if excluded:
            return
        norms = batch.norms(weight_sizes)
        if group["norm_range"] is not None:
            norms = norms.clamp(*group["norm_range"])
        update_norms = batch.norms(update_sizes)
        ratios = torch.where(torch.minimum(norms, update_norms) > 0, norms / update_norms, 1.0) * group["lr"]
        if found_inf is not None:
            ratios = torch.where(found_inf > 0, 0.0, ratios)
        # In reverse order, because the updates written last are still in the cache.
        for (weights, *_), update in zip(reversed(batch.pieces), reversed(updates), strict=True):
            torch._foreach_addcmul_(weights, update, ratios.unbind())
