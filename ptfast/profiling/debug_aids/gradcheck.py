"""The gradient of a run's loss against finite differences, in float64 on a few samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ptfast.core.errors import NumericsError
from ptfast.core.tensors.trees import tree_map
from ptfast.run import Run

NUM_SAMPLES = 4
NUM_DIRECTIONS = 3
STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Lengths of a finite difference, relative to the weights. Short ones are exact until rounding shows; which
is best depends on what the model computes in float32 whatever it is given."""
TOLERANCE = 1e-3
"""Largest relative error of a right gradient; wrong ones differ in the first digits."""


def check_gradients(run: Run) -> float:
    """Compare the gradient of the loss with finite differences along random directions.

    It runs on a copy of the model, from the next training batch, with the dropout of one micro-batch held
    fixed: the run itself is not touched.

    Returns:
        The largest relative error of a directional derivative.

    Raises:
        NumericsError: N002 where it is larger than `TOLERANCE`, naming the parameter that is worst.

    Cost: 30 forward passes of 4 samples; where the gradient is wrong, 10 more for every parameter.
    Source: the directional form of torch.autograd.gradcheck (its fast mode).
    """
    loss, names, parameters = _float64_loss(run)
    grads = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slopes = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    draws = torch.Generator().manual_seed(run.settings.seed)
    errors = [_error(loss, parameters, slopes, _direction(parameters, draws)) for _ in range(NUM_DIRECTIONS)]
    if max(errors) <= TOLERANCE:
        return max(errors)
    worst, name = 0.0, ""
    for index, parameter in enumerate(parameters):
        only = [torch.zeros_like(p) for p in parameters]
        only[index] = _direction([parameter], draws)[0]
        error = _error(loss, parameters, slopes, only)
        if error > worst:
            worst, name = error, names[index]
    largest = f"relative error {max(errors):.1e}, worst in {name} ({worst:.1e})"
    what = f"the gradient does not match the loss: {largest}"
    hint = "Look for a custom backward, .data or .detach() in the model or the loss"
    raise NumericsError("N002", what, key="debug", value="gradcheck", suggestion=hint)


def check_by_torch(run: Run, *, twice: bool) -> None:
    """Check the derivatives of the loss by each parameter with torch's own functions, in float64.

    They hold every parameter to its derivative by itself, where directions through all of them at once may
    hide a small one; and its second derivative, which gradient penalties need. A model that computes in
    float32 whatever it is given is too coarse for their short differences.

    Args:
        twice: check second derivatives too.

    Raises:
        NumericsError: N002 with what torch says, where one is wrong or cannot be computed.

    Cost: about three forward and backward passes of 4 samples for every parameter, second derivatives twice.
    Source: torch.autograd.gradcheck and gradgradcheck, in their fast mode.
    """
    loss, _, parameters = _float64_loss(run)
    checks = {"gradcheck": torch.autograd.gradcheck, "gradgradcheck": torch.autograd.gradgradcheck}
    for name, check in list(checks.items())[: 2 if twice else 1]:
        try:
            # Parameters are perturbed in place: the loss sees it without being given them.
            check(lambda *_: loss(), parameters, fast_mode=True, check_undefined_grad=False)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            hint = "Look for a custom backward, .data or .detach() in the model or the loss"
            what = f"torch's {name} fails: {said[:300]}"
            raise NumericsError("N002", what, key="debug.torch_check", suggestion=hint) from error


def _float64_loss(run: Run) -> tuple[Callable[[], Tensor], tuple[str, ...], tuple[Tensor, ...]]:
    """The loss of a copy of the model on a few samples, and the names and parameters that it depends on."""
    step = min(run.progress.step, run.total_steps - 1)
    batches = run.train_loader.steps(step, step + 1)
    data, _ = next(micro_batch for micro_batch in next(batches).micro_batches if micro_batch.num_samples)
    device = torch.device("cpu") if run.device.type == "mps" else run.device
    data = _few(data, device)
    model = copy.deepcopy(run.model).to(device, torch.float64).train()
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    kept = [(m, name, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]

    def loss() -> Tensor:
        for module, name, before in kept:
            # New ones: an earlier forward pass, yet to be differentiated, may have kept the last.
            setattr(module, name, before.clone())
        run.seed_step(run.settings.seed, step, 0)
        return run.task.loss(model, data)[0]

    return loss, names, parameters


def _few(data: Any, device: torch.device) -> Any:
    """The first samples, in float64."""
    sizes: list[int] = []
    tree_map(
        lambda value: sizes.append(len(value)) if isinstance(value, Tensor) and value.dim() else None, data
    )

    def few(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() and len(value) == sizes[0]:
            value = value[:NUM_SAMPLES]
        return value.to(device, torch.float64 if value.is_floating_point() else None)

    return tree_map(few, data)


def _direction(parameters: Sequence[Tensor], draws: torch.Generator) -> list[Tensor]:
    """Normal numbers, of each parameter's own size."""
    drawn = (torch.randn(p.shape, generator=draws, dtype=torch.float64).to(p.device) for p in parameters)
    return [
        d * p.detach().square().mean().sqrt().clamp(min=1e-3) for d, p in zip(drawn, parameters, strict=True)
    ]


def _error(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    slopes: Sequence[Tensor],
    direction: Sequence[Tensor],
) -> float:
    """Relative error of the derivative along `direction`: of the finite difference that fits best."""
    products = [slope * d for slope, d in zip(slopes, direction, strict=True)]
    derivative = float(sum(product.sum() for product in products))
    # By chance the sum may be small; its terms tell what is small here.
    scale = max(abs(derivative), float(sum(product.square().sum() for product in products)) ** 0.5)
    start = [parameter.detach().clone() for parameter in parameters]
    errors = []
    with torch.no_grad():
        for length in STEPS:
            values = []
            for sign in (1, -1):
                for parameter, begin, d in zip(parameters, start, direction, strict=True):
                    parameter.copy_(begin + sign * length * d)
                values.append(float(loss()))
            difference = (values[0] - values[1]) / (2 * length)
            errors.append(abs(difference - derivative) / max(scale, abs(difference), 1e-300))
        for parameter, begin in zip(parameters, start, strict=True):
            parameter.copy_(begin)
    return min(errors)
