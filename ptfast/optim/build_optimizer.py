"""Build optimizers, fused if supported, and set their learning rate in each step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ptfast.core.errors import ConfigError, MachineError, described
from ptfast.core.sections.targets import Target
from ptfast.core.tensors.dtensors import is_expanded, is_sharded, local_part, shard_like
from ptfast.core.tensors.torch_internals import hide_from_compiler, is_profiling
from ptfast.core.tensors.trees import map_tensors
from ptfast.optim.layerwise import LayerwiseOptimizer, is_dense, laid_out_as

FOREACH_DEVICES = ("cuda", "xpu")
"""Devices on which torch's optimizers choose the foreach path by themselves."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
FUSED: dict[type[Optimizer], tuple[str, ...]] = {SGD: ("momentum_buffer",), Adam: _MOMENTS, AdamW: _MOMENTS}
"""Names of the state that a fused step takes, by optimizer."""
_OF_TORCH = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
FORMULAS = {inspect.unwrap(kind.step) for kind in (*_OF_TORCH, LayerwiseOptimizer)}
"""`step` methods, torch's and ours, that may be called without their wrappers."""


def build_optimizer(
    target: Target, model: nn.Module, device: torch.device, groups: Sequence[dict[str, Any]] | None = None
) -> tuple[torch.optim.Optimizer, str]:
    """Build the optimizer of the trainable parameters, and name its kind of step.

    A fused optimizer updates all parameters in one kernel instead of several per parameter: 3 to 10 times
    faster steps on the CPU, a few percent of the training time on a GPU. Rounding may differ.

    Args:
        target: any `torch.optim.Optimizer` class; its keyword `fused` may be `auto`: on if supported.
        model: already on `device`, in its final dtype.
        groups: the parameters that train, from `Grouping.parts`; None for one group of all.

    Returns:
        The optimizer, whose groups keep their base learning rate as `initial_lr`; and `fused`, `foreach`,
        `multi-tensor` (ours) or `for-loop`, with the parameter that prevents a fused step.

    Raises:
        PtfastError: E005 if `fused=true` is not supported; C005 for a value that the optimizer rejects; C009
            for a step that needs a closure; C011 without trainable parameters, or for weight decay that the
            optimizer would ignore; C017 for an expanded parameter.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _check_trainable(target, model, parameters)
    _keep_compiler_unimported()
    takes = inspect.signature(target.resolve()).parameters
    kwargs = dict(target.kwargs)
    wanted = kwargs.pop("fused", None)
    fused = "fused" in takes and bool(wanted) and not kwargs.get("foreach")
    reason = _unfusable(model) if fused else None
    obstacle = f": {reason}" if reason else ""
    fused = fused and not reason and _runs_fused(replace(target, kwargs=kwargs), parameters, model)
    if wanted is True and not fused:
        what = f"{target.path} has no fused step for these parameters on {device.type}{obstacle}"
        hint = "Use optimizer.fused=auto"
        raise MachineError("E005", what, key="optimizer.fused", value="true", suggestion=hint)
    if fused:
        kwargs["fused"] = True
    elif wanted is not False and is_sharded(parameters[0]) and "foreach" in takes:
        # On sharded weights foreach takes a third of the time, but torch chooses it only for plain tensors.
        kwargs.setdefault("foreach", True)
    # Torch writes its defaults into the groups that it is given.
    given = [dict(group) for group in groups or ()] or parameters
    optimizer = _construct(replace(target, kwargs=kwargs), given, model)
    _check_decay(optimizer, groups or ())
    for group in optimizer.param_groups:
        group["lr"] *= group.get("lr_scale", 1.0)
        group.setdefault("initial_lr", float(group["lr"]))
    if fused:
        return optimizer, "fused"
    if isinstance(optimizer, LayerwiseOptimizer):
        return optimizer, "multi-tensor"
    foreach = optimizer.defaults.get("foreach", False)
    by_lists = foreach or (foreach is None and device.type in FOREACH_DEVICES)
    return optimizer, ("foreach" if by_lists else "for-loop") + obstacle


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a checkpoint in the memory layout of the parameters, because fused kernels index raw memory.

    ValueError for state of another shape, which such a kernel would read out of bounds.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    of_key = dict(zip(keys, parameters, strict=True))
    parts = {k: map_tensors(partial(shard_like, of_key.get(k)), kept) for k, kept in state["state"].items()}
    # This run chooses the kernels, and torch moves step counts to where they need them.
    names = ("fused", "foreach")
    own = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    groups = [group | kernels for group, kernels in zip(state["param_groups"], own, strict=True)]
    optimizer.load_state_dict({**state, "state": parts, "param_groups": groups})
    fused = {parameter for own in optimizer.param_groups if own.get("fused") for parameter in own["params"]}
    numbers = dict(zip((id(p) for p in parameters), keys, strict=True))
    for parameter, kept in optimizer.state.items():
        for name, value in kept.items():
            if not isinstance(value, torch.Tensor):
                continue
            if not value.dim():
                # Torch rounds numbers such as NAdam's `mu_product` to the type of the weights.
                kept[name] = value = parts[numbers[id(parameter)]][name].to(value.device, copy=True)
            if value.shape == parameter.shape:
                kept[name] = laid_out_as(parameter, value)
            elif parameter in fused and name != "step":
                raise ValueError(f"{name} is {described(value)}, of a parameter {tuple(parameter.shape)}")


def state_by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the state of `optimizer` by parameter name, not by torch's index; both can be loaded."""
    state = optimizer.state_dict()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_order = (p for group in optimizer.param_groups for p in group["params"])
    of_number = dict(enumerate(names[id(parameter)] for parameter in in_order))
    groups = [group | {"params": [of_number[k] for k in group["params"]]} for group in state["param_groups"]]
    parts = {of_number.get(k, k): kept for k, kept in state["state"].items()}
    return {**state, "state": parts, "param_groups": groups}


def start_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Start fused SGD's momentum at zero, because a skipped first step would leave it uninitialized."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def apply_lr(
    optimizer: torch.optim.Optimizer, base_lrs: Sequence[float], factor: float, momentum: float | None = None
) -> None:
    """Set every group's learning rate to `factor` times its base, and momentum (or beta1) if given."""
    for group, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
        group["lr"] = base_lr * factor
        if momentum is not None:
            if "momentum" in group:
                group["momentum"] = momentum
            elif "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])


def has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `optimizer` has a momentum or a beta1 above 0, which a schedule may cycle."""
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups)


def _check_trainable(target: Target, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Reject models without trainable parameters or with expanded ones, and steps that need a closure."""
    if not parameters:
        what = "the model has no parameter to train"
        raise ConfigError("C011", what, key="model", value=type(model).__name__)
    closure = inspect.signature(target.resolve().step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        what = "its step runs forward and backward itself (it takes a closure)"
        hint = "Choose one that needs no closure, such as torch.optim.AdamW"
        raise ConfigError("C009", what, key="optimizer._target_", value=target.path, suggestion=hint)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and is_expanded(parameter):
            what = f"the parameter {name} is expanded: several of its entries are one number in memory"
            hint = "Make it of a copy: nn.Parameter(value.expand(...).clone())"
            raise ConfigError("C017", what, key="model", value=type(model).__name__, suggestion=hint)


def _unfusable(model: nn.Module) -> str | None:
    """Return the first parameter that fused kernels would update wrongly, and the reason."""
    if sparse := sparse_parameter(model):
        return f"{sparse} has sparse gradients"
    trained = ((name, p.detach()) for name, p in model.named_parameters() if p.requires_grad)
    return next((f"{name} has gaps in memory" for name, p in trained if not is_dense(local_part(p))), None)


def sparse_parameter(model: nn.Module) -> str | None:
    """Return the name of the first parameter that trains with sparse gradients, as some embeddings do."""
    embeddings = (each for each in model.modules() if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
    return next((name for name, p in model.named_parameters() if p.requires_grad and id(p) in sparse), None)


def _runs_fused(target: Target, parameters: Sequence[nn.Parameter], model: nn.Module) -> bool:
    """Return True if fused steps run and match plain ones; on a CPU, SGD's may not in half precision."""
    kinds = {(p.device, p.dtype): torch.zeros(64, device=p.device, dtype=p.dtype) for p in parameters}
    # Not every torch accepts sharded parameters.
    kinds |= {(p.device, p.dtype): torch.zeros_like(p) for p in parameters if is_sharded(p)}
    ends: list[list[torch.Tensor]] = []
    try:
        for fused in (True, False):
            probes = [nn.Parameter(value.detach().clone()) for value in kinds.values()]
            optimizer = _construct(replace(target, kwargs={**target.kwargs, "fused": fused}), probes, model)
            for probe in probes:
                probe.grad = torch.full_like(probe, 0.5)
            for _ in range(3):
                build_step(optimizer)()
            ends.append([local_part(probe.detach()) for probe in probes])
    except (RuntimeError, AssertionError):
        # Torch 2.9 raises AssertionError for an operator that does not support sharded weights.
        return False
    return all(torch.allclose(one, other, rtol=0.1) for one, other in zip(*ends, strict=True))


def _construct(target: Target, parameters: Sequence[Any], model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer, with the keyword `model` if it takes one."""
    try:
        return target.build(list(parameters), model=model)
    except (TypeError, ValueError) as error:
        raise ConfigError("C005", str(error), key="optimizer", value=target.path) from error


def _check_decay(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Reject a group's weight decay if the optimizer would ignore it."""
    for group in groups:
        decay = group.get("weight_decay")
        if decay is not None and "weight_decay" not in optimizer.defaults:
            what = f"{type(optimizer).__name__} has no weight decay"
            hint = "Set optimizer.decay_1d=true, and no weight_decay in optimizer.groups"
        elif decay and optimizer.defaults.get("exclude_1d") and all(p.ndim <= 1 for p in group["params"]):
            what = f"weight decay {decay:g} for parameters that optimizer.exclude_1d exempts from it"
            hint = "Set optimizer.exclude_1d=false optimizer.decay_1d=false"
        else:
            continue
        raise ConfigError("C011", what, key="optimizer.groups", suggestion=hint)


def _keep_compiler_unimported() -> None:
    """Hide methods from torch's compiler without importing it; torch would take 2 s to import it for them."""
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if method is not None:
            hide_from_compiler(method)


def build_step(
    optimizer: Optimizer, found_inf: torch.Tensor | None = None, *, own_grads: bool = False
) -> Callable[[], object]:
    """Return a function that steps `optimizer` by its bare formula (`FORMULAS`), which is 20 us faster.

    The public method, which imports the compiler, is called if the optimizer has hooks or comes from
    another package, and under a profiler. A fused step calls its kernel with lists that are built once.

    `found_inf`, for an optimizer that takes it from a gradient scaler, is 1 on the device to skip a step.
    With `own_grads`, gradients may have another memory layout than those of a backward pass.
    """
    if found_inf is not None:
        optimizer.grad_scale, optimizer.found_inf = None, found_inf  # pyright: ignore[reportAttributeAccessIssue]
    public = type(optimizer).step
    formula = inspect.unwrap(public)
    if formula not in FORMULAS or formula is public:
        return optimizer.step
    pre_hooks, post_hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks

    kernels: Callable[[], bool] | None = None

    def update() -> None:
        nonlocal kernels
        if own_grads:
            for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
                if weight.grad is not None and not weight.grad.is_sparse:
                    weight.grad = laid_out_as(weight, weight.grad)
        if pre_hooks or post_hooks or is_profiling():
            optimizer.step()
        elif kernels is None or not kernels():
            formula(optimizer)
            kernels = _fused_kernels(optimizer, found_inf)

    def step() -> None:
        # Like `torch.no_grad`, but 2 us faster.
        was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        try:
            update()
        finally:
            torch.set_grad_enabled(was_enabled)

    return step


def _fused_kernels(optimizer: Optimizer, found_inf: torch.Tensor | None = None) -> Callable[[], bool] | None:
    """Return a fused step with prebuilt lists, if all groups have a kernel; it returns False if stale."""
    parts: list[tuple[dict[str, Any], list[Any], list[Any], dict[str, list[Any]]]] = []
    for group in optimizer.param_groups:
        weights, grads = group["params"], [weight.grad for weight in group["params"]]
        odd = not weights or is_sharded(weights[0]) or len({(w.device, w.dtype) for w in weights}) > 1
        odd = odd or any(grad is None or grad.is_sparse for grad in grads)
        if type(optimizer) not in FUSED or odd or not group["fused"] or group.get("amsgrad"):
            return None
        names = FUSED[type(optimizer)] if group.get("momentum", 1) else ()
        states = [optimizer.state[weight] for weight in weights]
        parts.append((group, weights, states, {name: [state[name] for state in states] for name in names}))

    def step() -> bool:
        every = [[weight.grad for weight in weights] for _, weights, *_ in parts]
        if any(grad is None for grads in every for grad in grads):
            return False
        for _, weights, states, kept in parts:
            same = optimizer.state.get(weights[0]) is states[0]
            for name, values in kept.items():
                same = same and all(state[name] is value for state, value in zip(states, values, strict=True))
            if not same:
                return False
        for (group, weights, _, kept), grads in zip(parts, every, strict=True):
            shared = {name: group[name] for name in ("lr", "weight_decay", "maximize")}
            if found_inf is not None:
                shared["found_inf"] = found_inf
            if "betas" not in group:
                own = {name: group[name] for name in ("momentum", "dampening", "nesterov")}
                torch._fused_sgd_(
                    weights, grads, kept.get("momentum_buffer", []), **shared, **own, is_first_step=False
                )
                continue
            (beta1, beta2), (*moments, steps) = group["betas"], kept.values()
            torch._foreach_add_(steps, 1)
            kernel: Any = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            own = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "amsgrad": False}
            kernel(weights, grads, *moments, [], steps, **shared, **own)
            if found_inf is not None:
                torch._foreach_sub_(steps, [found_inf] * len(steps))
        return True

    return step
