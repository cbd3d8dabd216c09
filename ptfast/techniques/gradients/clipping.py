"""Gradient clipping on the device: by global norm, by unit or by value; and the norm itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_

from ptfast.core.tensors.dtensors import is_sharded, local_parts
from ptfast.techniques.gradients import Gradients

Clipper = Callable[[], Tensor | None]


def build_clipper(
    gradients: Gradients, parameters: Iterable[Tensor], *, head: Iterable[Tensor] = ()
) -> GradientSteps | None:
    """Build the function that clips gradients between backward and the optimizer's step, or return None.

    It clips in place and, with `clip_norm`, returns the norm before clipping: 0-d, on the device. Gradients
    must be unscaled and, with several ranks, averaged.

    Args:
        head: parameters that adaptive clipping skips.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    steps: list[Clipper] = []
    if gradients.clip_value is not None:
        steps.append(partial(clip_grad_value_, trained, gradients.clip_value))
    if gradients.clip_adaptive is not None:
        spared = {id(parameter) for parameter in head}
        rest = [parameter for parameter in trained if id(parameter) not in spared]
        vectors_first = sorted(rest, key=lambda parameter: parameter.ndim > 1)
        steps.append(partial(clip_adaptively, vectors_first, gradients.clip_adaptive))
    if gradients.clip_norm is not None:
        steps.append(partial(clip_to_norm, trained, gradients.clip_norm))
    return GradientSteps(steps) if steps else None


class GradientSteps(list[Clipper]):
    """A list of functions that are called in order; the call returns the last result.

    Functions with `state_dict` and `load_state_dict` are saved with the run, by class name and in order. An
    optional method `log_values()` returns numbers for a log line.
    """

    def __call__(self) -> Tensor | None:
        return [step() for step in self][-1]


@torch.no_grad()
def clip_to_norm(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip like `torch.nn.utils.clip_grad_norm_` on one device: same bits, half the time on small nets."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = global_norm(grads)
    if grads:
        # Always multiply, by at most 1: to check the norm, the host would have to wait.
        torch._foreach_mul_(local_parts(grads), (max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm


def global_norm(grads: list[Tensor]) -> Tensor:
    """Return the norm of tensors on one device, as one vector: 0-d, on that device; 0 without tensors."""
    if not grads:
        return torch.zeros(())
    # In half precision, norms would have only two digits. (Norm layers of such models stay in float32.)
    half = grads[0].element_size() < 4 or grads[-1].element_size() < 4
    dtype, parts = torch.float32 if half else None, local_parts(grads)
    norm = torch.linalg.vector_norm(torch.stack([*torch._foreach_norm(parts, dtype=dtype)]))
    if is_sharded(grads[0]):
        # So far this covers only this rank's shards.
        square = norm.square()
        torch.distributed.all_reduce(square)
        norm = square.sqrt()
    return norm


@torch.no_grad()
def clip_adaptively(parameters: Sequence[Tensor], factor: float, eps: float = 1e-3) -> None:
    """Rescale the gradient of every unit whose gradient is long relative to its weights (AGC).

    A global norm would also shorten all other gradients. A unit is a row: an output of a linear layer or a
    convolution, or an entry of an embedding; a one-dimensional parameter is one unit.

    Args:
        parameters: with those of at most one dimension first; parameters without a gradient are skipped.
        factor: maximum norm of the gradient relative to the weights', about 0.01; less for larger batches.
        eps: lower bound of the weights' norm, so that weights at zero can grow.

    Cost: a pass over weights and gradients for the norms, and one over gradients to rescale.
    Source: Brock, De, Smith, Simonyan 2021, "High-Performance Large-Scale Image Recognition Without
        Normalization", arXiv:2102.06171, equation 3; the last layer is exempt, as there.
    """
    layers = [parameter for parameter in parameters if parameter.grad is not None]
    if not layers:
        return
    grads = [layer.grad for layer in layers if layer.grad is not None]
    ratios = _unit_norms([layer.detach() for layer in layers])
    torch._foreach_clamp_min_(ratios, eps)
    torch._foreach_mul_(ratios, factor)
    # A division by zero gives infinity, which is clamped to 1 next.
    torch._foreach_div_(ratios, _unit_norms(grads))
    torch._foreach_clamp_max_(ratios, 1.0)
    torch._foreach_mul_(grads, ratios)


def head_of(model: nn.Module) -> list[Tensor]:
    """Return the parameters of the last module with a matrix, in the order of modules."""
    matrices = [n for n, p in model.named_parameters(remove_duplicate=False) if p.ndim >= 2]
    if not matrices:
        return []
    return list(model.get_submodule(matrices[-1].rpartition(".")[0]).parameters(recurse=False))


def _unit_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return norms of rows, in shapes that broadcast over them; tensors of up to one dimension come first."""
    whole = [tensor for tensor in tensors if tensor.ndim <= 1]
    norms = list(torch._foreach_norm(whole)) if whole else []
    for tensor in tensors[len(whole) :]:
        norms.append(torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True))
    return norms
