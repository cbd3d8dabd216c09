"""Steps of optimizers as plain tensor operations, which a compiler fuses with the pass that makes gradients.

What changes from step to step (rates, momenta, bias corrections) is worked out by the host and read from a
tensor, so that nothing is compiled again for it. The formulas are those of torch's optimizers and of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ptfast.optim.lamb import Lamb
from ptfast.optim.layer_batches import HALF_TYPES, Group, Tensors, laid_out_as
from ptfast.optim.muon import Muon, as_matrix, step_matrices

Numbers = tuple[float, float, float, float]
"""What the host works out for the step of a group."""
_MOMENTUM, _MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")


class Formula(NamedTuple):
    """The step of a group: names of its state, its numbers (the first step is 1), and what moves weights."""

    state: tuple[str, ...]
    numbers: Callable[[Group, int], Numbers]
    update: Callable[[Group, Tensors, Tensors, list[Tensors], Tensor], None]


class Part(NamedTuple):
    """Parameters of one group that have taken equally many steps, `start`; `steps` are the saved counts."""

    formula: Formula
    group: Group
    weights: Tensors
    states: list[Tensors]
    steps: Tensors
    start: int


class PlainStep:
    """The step of `optimizer` for the parameters `reached`, those that get a gradient.

    Its state is the optimizer's, which saves and restores it; what is missing starts at zero. Step counts are
    written by `settle`, before the state is saved.
    """

    def __init__(self, optimizer: Optimizer, reached: Iterable[Tensor]) -> None:
        self.parts: list[Part] = []
        self.taken = self._settled = 0
        ids = {id(parameter) for parameter in reached}
        formula_of_rest = FORMULAS[type(optimizer._rest if isinstance(optimizer, Muon) else optimizer)]
        for group in optimizer.param_groups:
            formula, alike = MATRICES if group.get("muon") else formula_of_rest, dict[int, Tensors]()
            names = () if formula.update is _sgd and not group["momentum"] else formula.state
            # Torch's loops over parameters count on the host.
            on_host = "fused" in group and not group["fused"] and not group.get("capturable")
            for weight in group["params"]:
                if id(weight) not in ids:
                    continue
                state = optimizer.state[weight]
                for name in names:
                    kept = state.get(name)
                    state[name] = torch.zeros_like(weight) if kept is None else laid_out_as(weight, kept)
                if names == _MOMENTS and "step" not in state:
                    state["step"] = torch.zeros((), device="cpu" if on_host else weight.device)
                alike.setdefault(int(state.get("step", 0)), []).append(weight)
            for start, weights in alike.items():
                kept_all = [optimizer.state[weight] for weight in weights]
                states = [[kept[name] for kept in kept_all] for name in names]
                steps = [kept["step"] for kept in kept_all if "step" in kept]
                self.parts.append(Part(formula, group, weights, states, steps, start))

    def numbers(self, ahead: int) -> list[float]:
        """The numbers of a step at the present rates of the groups; the next one is `ahead` by 0."""
        step = self.taken + ahead + 1
        return [n for part in self.parts for n in part.formula.numbers(part.group, part.start + step)]

    @torch.no_grad()
    def take(self, numbers: Tensor) -> None:
        """Move weights and state by the gradients that are there."""
        for (formula, group, weights, states, *_), own in zip(self.parts, numbers.view(-1, 4), strict=True):
            formula.update(group, weights, [weight.grad for weight in weights], states, own)  # type: ignore[misc]

    @torch.no_grad()
    def settle(self) -> None:
        """Bring the saved step counts up to date."""
        for part in self.parts:
            if part.steps and self.taken > self._settled:
                torch._foreach_add_(part.steps, self.taken - self._settled)
        self._settled = self.taken


def obstacle(optimizer: Optimizer) -> str | None:
    """Why `optimizer` has no plain step; None if it has one."""
    what = f"the step of {type(optimizer).__name__} is not written for it"
    if type(optimizer) not in FORMULAS and not isinstance(optimizer, Muon):
        return what
    for group in optimizer.param_groups:
        # Groups of an old state may lack a setting.
        settings = optimizer.defaults | group
        for setting in ("amsgrad", "maximize", "dampening", "max_grad_norm"):
            if settings.get(setting):
                return f"{what} with {setting}"
        if isinstance(optimizer, Lamb) and any(p.dtype in HALF_TYPES for p in group["params"]):
            return f"{what} in half width"
    return None


def _rates(group: Group, _: int) -> Numbers:
    return group["lr"], group["momentum"], 0.0, 0.0


def _sgd(group: Group, weights: Tensors, grads: Tensors, states: list[Tensors], numbers: Tensor) -> None:
    lr, momentum, *_ = numbers
    if group["weight_decay"]:
        grads = list(torch._foreach_add(grads, weights, alpha=group["weight_decay"]))
    for velocities in states:
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, grads)
        ahead = torch._foreach_mul(velocities, momentum) if group["nesterov"] else None
        grads = velocities if ahead is None else list(torch._foreach_add(grads, ahead))
    torch._foreach_sub_(weights, torch._foreach_mul(grads, lr))


def _muon(group: Group, weights: Tensors, grads: Tensors, states: list[Tensors], numbers: Tensor) -> None:
    matrices = [as_matrix(weight, weight.detach()) for weight in weights]
    momenta = [*map(as_matrix, weights, states[0])]
    grads = [
        as_matrix(weight, laid_out_as(weight, grad)) for weight, grad in zip(weights, grads, strict=True)
    ]
    step_matrices(matrices, grads, momenta, group, numbers[0], numbers[1])


def _adam_numbers(group: Group, step: int) -> Numbers:
    """Rate over the first bias correction, the gradient's share, the second correction's root, the decay."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    return lr / (1 - beta1**step), 1 - beta1, (1 - beta2**step) ** -0.5, lr * group["weight_decay"]


def _adam(group: Group, weights: Tensors, grads: Tensors, states: list[Tensors], numbers: Tensor) -> None:
    lr, *_, decay = numbers
    if group["weight_decay"] and group["decoupled_weight_decay"]:
        torch._foreach_mul_(weights, 1 - decay)
    elif group["weight_decay"]:
        grads = list(torch._foreach_add(grads, weights, alpha=group["weight_decay"]))
    torch._foreach_sub_(weights, torch._foreach_mul(_direction(group, grads, states, numbers), lr))


def _direction(group: Group, grads: Tensors, states: list[Tensors], numbers: Tensor) -> tuple[Tensor, ...]:
    """Adam's step at the rate 1, but for the first bias correction; moves the moments."""
    (exp_avgs, exp_avg_sqs), beta2, (_, share, root, _) = states, group["betas"][1], numbers
    torch._foreach_mul_(exp_avgs, 1 - share)
    torch._foreach_add_(exp_avgs, torch._foreach_mul(grads, share))
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    roots = torch._foreach_mul(torch._foreach_sqrt(exp_avg_sqs), root)
    return torch._foreach_div(exp_avgs, torch._foreach_add(roots, group["eps"]))


def _lamb_numbers(group: Group, step: int) -> Numbers:
    corrections = _adam_numbers({**group, "lr": 1.0}, step)
    return (*corrections[:3], group["lr"])


def _lamb(group: Group, weights: Tensors, grads: Tensors, states: list[Tensors], numbers: Tensor) -> None:
    updates = torch._foreach_mul(_direction(group, grads, states, numbers), numbers[0])
    for weight, update in zip(weights, updates, strict=True):
        excluded, ratio = group["exclude_1d"] and weight.ndim <= 1, numbers[3]
        if group["weight_decay"] and not excluded:
            update = update + group["weight_decay"] * weight
        if not excluded:
            norm, length = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
            if group["norm_range"] is not None:
                norm = norm.clamp(*group["norm_range"])
            ratio = ratio * torch.where(torch.minimum(norm, length) > 0, norm / length, 1.0)
        weight.sub_(update * ratio)


MATRICES = Formula(_MOMENTUM, _rates, _muon)
FORMULAS: dict[type[Optimizer], Formula] = {
    SGD: Formula(_MOMENTUM, _rates, _sgd),
    Adam: Formula(_MOMENTS, _adam_numbers, _adam),
    AdamW: Formula(_MOMENTS, _adam_numbers, _adam),
    Lamb: Formula(_MOMENTS, _lamb_numbers, _lamb),
}
"""By the class of the optimizer, of which no subclass is meant."""
