"""LAMB: Adam whose step in every layer is as long as the layer's own norm says.

Written from the paper: You, Li, Reddi, Hseu, Kumar, Bhojanapalli, Song, Demmel, Keutzer, Hsieh 2020, "Large
Batch Optimization for Deep Learning: Training BERT in 76 minutes", arXiv:1904.00962, Algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ptfast.optim import layerwise
from ptfast.optim.layerwise import Group, LayerwiseOptimizer, Params, Portion, Tensors, trust_ratios


class Lamb(LayerwiseOptimizer):
    """Adam with a learning rate per layer, for batches of thousands of samples.

    At large batch sizes one global rate overshoots layers whose updates are large next to their weights. Here
    a layer `w` moves along Adam's update `r` and the weight decay by `lr * phi(|w|)`:

        w <- w - lr * phi(|w|) / |r + weight_decay * w| * (r + weight_decay * w)

    Decay is thus kept out of the moments, as in AdamW, but is part of what is rescaled: how fast weights
    decay depends on the layer.

    Args:
        params: parameters or groups of them; a group may set every keyword below for itself.
        lr: relative length of a step, dimensionless, >= 0; about 1e-3 to 1e-2.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the root of the second moment, >= 0.
        weight_decay: >= 0, within the trust ratio as above.
        norm_range: bounds that phi clamps a layer's norm to, e.g. [0, 10]; none by default: phi(x) = x.
        adapt: whether steps are scaled at all; without it a step is AdamW's.
        exclude_1d: take 1-d parameters (biases, norm weights) as Adam would, without scaling or decay.

    Cost: 2.3 of AdamW's fused steps on the CPU, since a layer's update is written out before its norm is
    known; Adam's two moments, and room for the update of the longest layer.
    """

    layer_state = ("exp_avg", "exp_avg_sq")
    scalar_state = ("step",)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        norm_range: tuple[float, float] | None = None,
        adapt: bool = True,
        exclude_1d: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "norm_range": norm_range,
            "adapt": adapt,
            "exclude_1d": exclude_1d,
        }
        self._rooms: dict[torch.dtype, Tensors] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._rooms = {}
        super().__setstate__(state)

    def _room(self, piece: Tensor, index: int) -> Tensor:
        """Where the update of a cut layer's piece is kept until the layer's norm is known.

        It stays from step to step: to have memory mapped anew takes longer than to compute what goes there.
        """
        rooms = self._rooms.setdefault(piece.dtype, [])
        if index == len(rooms):
            rooms.append(piece.new_empty(layerwise.CPU_PORTION))
        return rooms[index][: len(piece)]

    def _update(self, group: Group, portion: Portion) -> None:
        (steps,) = portion.scalars
        found_inf = portion.found_inf
        torch._foreach_add_(steps, 1 if found_inf is None else 1 - found_inf)
        excluded = group["exclude_1d"] and portion.ndim <= 1
        decay = 0.0 if excluded else group["weight_decay"]
        adam = {"beta1": group["betas"][0], "beta2": group["betas"][1], "eps": group["eps"]}
        adam |= {"amsgrad": False, "maximize": False, "found_inf": found_inf}
        if excluded or not group["adapt"]:
            for weights, grads, exp_avgs, exp_avg_sqs in portion.pieces:
                state = (portion.scaled(grads), exp_avgs, exp_avg_sqs, [], steps)
                torch._fused_adamw_(weights, *state, lr=group["lr"], weight_decay=decay, **adam)
            return
        updates: list[Tensors] = []
        weight_norms: Tensors = []
        update_norms: Tensors = []
        for index, (weights, grads, exp_avgs, exp_avg_sqs) in enumerate(portion.pieces):
            # Adam's kernel subtracts: with rate 1 it leaves minus the whole update.
            if len(portion.pieces) > 1:
                update = [torch.mul(weights[0], -decay, out=self._room(weights[0], index))]
            else:
                update = list(torch._foreach_mul(weights, -decay))
            state = (portion.scaled(grads), exp_avgs, exp_avg_sqs, [], steps)
            torch._fused_adam_(update, *state, lr=1.0, weight_decay=0.0, **adam)
            update_norms += torch._foreach_norm(update)
            weight_norms += torch._foreach_norm(weights)
            updates.append(update)
        norms = portion.norms(weight_norms)
        if group["norm_range"] is not None:
            norms = norms.clamp(*group["norm_range"])
        ratios = trust_ratios(norms, portion.norms(update_norms)) * group["lr"]
        ratios = portion.unless_found_inf(ratios, 0.0).unbind()
        # Backwards: what was written last is in the cache still.
        for (weights, *_), update in zip(reversed(portion.pieces), reversed(updates), strict=True):
            torch._foreach_addcmul_(weights, update, ratios)
