"""Change a model without changing its results: memory layout, cancelled biases, chunked loss, RMS norms."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ptfast.core.auto_choices import AutoChoices
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import LinearLogits
from ptfast.core.tensors.dtensors import local_part
from ptfast.core.tensors.kept_buffers import buffers_kept
from ptfast.core.tensors.torch_internals import DispatchMode
from ptfast.core.tensors.trees import tree_leaves
from ptfast.techniques.rewrites import Rewrites

_BIASED = (
    nn.Linear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def apply_rewrites(
    model: nn.Module,
    rewrites: Rewrites,
    *,
    kind: str,
    device: torch.device,
    cancelled_biases: Callable[[], dict[str, str]] | None,
    task: Any = None,
    sharded: bool = False,
    choices: AutoChoices,
) -> None:
    """Rewrite `model` in place, before saved weights are loaded, and record the rewrites in `choices`.

    `cancelled_biases` finds biases that a BatchNorm subtracts, unless a resumed run has recorded them; with
    None, only recorded biases are dropped. `sharded` weights are split by rows, which must be contiguous.
    """

    def choose_layout() -> tuple[bool, str]:
        ungrouped = [module.groups == 1 for module in model.modules() if isinstance(module, nn.Conv2d)]
        # It usually pays if most convolutions are ungrouped.
        if kind != "image" or device.type not in ("cpu", "cuda") or 2 * sum(ungrouped) <= len(ungrouped):
            return False, ""
        return True, f"{sum(ungrouped)} of {len(ungrouped)} convolutions have one group"

    wanted = False if sharded else rewrites.channels_last
    if choices.resolve("rewrites.channels_last", wanted, bool, choose_layout):
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    dropped = choices.began_with("dropped_biases", dict[str, str])
    if dropped is None and cancelled_biases is not None and not rewrites.bias_before_norm:
        dropped = cancelled_biases()
    dropped = dropped or {}
    choices.note("dropped_biases", dropped, f"{len(dropped)} before a BatchNorm" if dropped else None)
    drop_biases(model, dropped)
    if rewrites.chunked_loss:
        apply_chunked_head(model, task)
    if rewrites.fused_rms_norm:
        names = apply_fused_rms_norm(model)
        choices.note("fused_norms", names, f"{len(names)} RMS norms by torch's kernel")


def find_cancelled_biases(model: nn.Module, forward: Callable[[], object]) -> dict[str, str]:
    """Find biases of convolutions and linear layers that the following BatchNorm subtracts again.

    `forward` is run in training and in evaluation mode while every tensor operation is watched. A bias
    qualifies if only one operation uses it, and its layer's output goes unchanged to a single BatchNorm that
    uses the statistics of the batch, and nowhere else. Subclasses of these layers and layers with hooks are
    skipped.

    Returns the names of BatchNorms by the names of the layers before them. Buffers of `model` are restored.

    Cost: two forward passes of two or more samples, unless no layer with a bias is as wide as a BatchNorm.
    """
    # Hooks may read or change an output.
    bare = [(n, m) for n, m in model.named_modules() if not (m._forward_hooks or m._forward_pre_hooks)]
    norms = {module: name for name, module in bare if type(module) in _NORMS}
    widths: set[int] = {norm.num_features for norm in norms}  # pyright: ignore[reportAssignmentType]
    layers = {
        module: name
        for name, module in bare
        if type(module) in _BIASED and isinstance(module.bias, nn.Parameter) and len(module.bias) in widths
    }
    if not layers:
        return {}
    with undisturbed(model):
        of_batches = {n: name for n, name in norms.items() if n.training or n.running_mean is None}
        cancelled, _ = _watch(layers, of_batches, forward)
        model.eval()
        in_evaluation, called = _watch(layers, norms, forward)
    return {k: norm for k, norm in cancelled.items() if k not in called or in_evaluation.get(k) == norm}


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run forward passes in training mode inside this context, without changing `model` or generators."""
    was_training = model.training
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        with buffers_kept(model), torch.no_grad(), torch.random.fork_rng(devices):
            model.train()
            yield
    finally:
        model.train(was_training)


def drop_biases(model: nn.Module, norm_of: dict[str, str]) -> None:
    """Remove biases of layers whose BatchNorm subtracts them again, in place, before the optimizer is built.

    Such a bias has no effect, but costs a pass over its layer's output and one over the gradient. The state
    dict keeps the plain model's names: a bias is saved as zeros, and a loaded bias is subtracted from the
    running mean. `norm_of` comes from `find_cancelled_biases`.

    Source: NVIDIA, "PyTorch Performance Tuning Guide"; Ioffe, Szegedy 2015, arXiv:1502.03167, section 3.2.
    """
    for name, norm_name in norm_of.items():
        layer: Any = model.get_submodule(name)
        norm: Any = model.get_submodule(norm_name)
        bias = layer.bias.detach()
        if norm.running_mean is not None:
            norm.running_mean -= bias.to(norm.running_mean)
        layer.bias = None
        layer.register_state_dict_post_hook(partial(_save_zeros, size=len(bias)))
    if norm_of:
        model.register_load_state_dict_pre_hook(partial(_load_into_mean, norm_of=dict(norm_of)))


def _save_zeros(layer: Any, state: dict[str, Tensor], prefix: str, metadata: Any, *, size: int) -> None:
    state[f"{prefix}bias"] = local_part(layer.weight.detach()).new_zeros(size)


def _load_into_mean(
    model: nn.Module,
    state: dict[str, Tensor],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    *others: Any,
    norm_of: dict[str, str],
) -> None:
    for name, norm_name in norm_of.items():
        bias, mean = state.pop(f"{prefix}{name}.bias", None), f"{prefix}{norm_name}.running_mean"
        if bias is None:
            missing.append(f"{prefix}{name}.bias")
        elif mean in state:
            state[mean] = state[mean] - bias.to(state[mean])


class _Uses(DispatchMode):
    """Counts the operations that use a watched tensor, including those in C++ and of autograd."""

    def __init__(self) -> None:
        super().__init__()
        # Weak: an output that still exists after the forward pass was kept or returned.
        self.watched = WeakIdKeyDictionary()
        self.counts: Counter[tuple[nn.Module, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and (whose := self.watched.get(tensor)) is not None:
                self.counts[whose] += 1
        return func(*args, **kwargs)


def _watch(
    layers: dict[Any, str], norms: dict[Any, str], forward: Callable[[], object]
) -> tuple[dict[str, str], set[str]]:
    """Run `forward` once; return the norms of layers whose output goes only there, and the layers called."""
    uses, norm_of = _Uses(), {}
    uses.watched.update({layer.bias: (layer, "bias") for layer in layers})

    def after_layer(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        uses.counts[layer, "call"] += 1
        uses.watched[output] = layer, "output"

    def before_norm(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        uses.counts[norm, "call"] += 1
        whose: Any = uses.watched.get(inputs[0]) if inputs else None
        if whose is not None and whose[1] == "output":
            norm_of[whose[0]] = norm

    hooks = [layer.register_forward_hook(after_layer) for layer in layers]
    hooks += [norm.register_forward_pre_hook(before_norm) for norm in norms]
    try:
        with uses:
            result = forward()
        kept = {layer for layer, what in uses.watched.values() if what == "output"}
        del result
    finally:
        for hook in hooks:
            hook.remove()
    cancelled = {
        layers[layer]: norms[norm]
        for layer, norm in norm_of.items()
        if layer not in kept
        and uses.counts[norm, "call"] == 1
        and all(uses.counts[layer, what] == 1 for what in ("call", "bias", "output"))
    }
    return cancelled, {name for layer, name in layers.items() if uses.counts[layer, "call"]}


class ChunkedHead(nn.Linear):
    """A linear layer that leaves its product to the loss in training, and computes it in evaluation."""

    def forward(self, input: Tensor) -> Any:
        if not self.training:
            return super().forward(input)
        half = torch.is_autocast_enabled(input.device.type)
        # Autocast converts the inputs of a linear layer, but not those of the loss.
        hidden = input.to(torch.get_autocast_dtype(input.device.type)) if half else input
        return LinearLogits(hidden, self.weight)


def apply_chunked_head(model: nn.Module, task: Any) -> None:
    """Let the last layer of `model` and the loss of `task` be computed in chunks in training, in place.

    The logits of all tokens, their softmax and their gradient, the largest tensors of a model with a large
    vocabulary, then never exist at once. The output of `model` must be the output of its layer `head`.

    Source: Wijmans et al. 2024, arXiv:2411.09009.
    """
    what, head = None, getattr(model, "head", None)
    if not getattr(task, "takes_linear_logits", False):
        what = f"{type(task).__name__} needs the logits of all tokens at once"
    elif type(head) is not nn.Linear or head.bias is not None:
        what = f"{type(model).__name__} has no last layer `head` that is an nn.Linear without a bias"
    if what is not None:
        hint = "Set rewrites.chunked_loss=false"
        raise ConfigError("C011", what, key="rewrites.chunked_loss", value="true", suggestion=hint)
    assert head is not None
    head.__class__ = ChunkedHead


class FusedRMSNorm(nn.Module):
    """An RMS norm over the last dimension, as one kernel on a GPU, in the wider type of input and weight."""

    weight: Tensor
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, self.weight.dtype)
        return F.rms_norm(input.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)


def find_rms_norms(model: nn.Module) -> dict[str, float]:
    """Return the eps of each module of `model` that computes an RMS norm in single operators, by name.

    A module qualifies if its class has `norm` in its name, its only tensor is a one-dimensional `weight`, and
    its results for random inputs and weights, large and small, equal those of `F.rms_norm` in float32.
    Modules with hooks may do more, and are skipped.

    Cost: a few dozen small operations on the CPU per module.
    """
    found = {}
    for name, module in model.named_modules():
        own = type(module)
        hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if own in (FusedRMSNorm, nn.RMSNorm) or hooked:
            continue
        tensors = [key for key, _ in (*module.named_parameters(), *module.named_buffers())]
        weight: Any = getattr(module, "weight", None)
        fits = "norm" in own.__name__.lower() and tensors == ["weight"] and weight.dim() == 1
        if fits and (eps := _eps_of(module, len(weight))) is not None:
            found[name] = eps
    return found


def _eps_of(module: Any, width: int) -> float | None:
    """Return the eps for which `F.rms_norm` reproduces the results of `module`, or None."""
    eps = next(
        (value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None
    )
    if eps is None:
        return None
    draws = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module).to("cpu", torch.float32)
    weight = torch.randn(width, generator=draws)
    # eps matters only for small inputs.
    inputs = torch.randn(2, 3, width, generator=draws) * torch.tensor([1.0, eps**0.5]).view(2, 1, 1)
    try:
        with torch.no_grad():
            probe.weight.copy_(weight)
            outputs, half = probe(inputs), probe(inputs.bfloat16())
    except Exception:
        return None  # the module needs other inputs
    alike = isinstance(outputs, Tensor) and outputs.shape == inputs.shape
    if not alike or outputs.dtype != torch.float32 or half.dtype != torch.float32:
        return None
    same = torch.allclose(outputs, F.rms_norm(inputs, (width,), weight, eps), rtol=1e-4, atol=1e-5)
    return eps if same else None


def apply_fused_rms_norm(model: nn.Module) -> list[str]:
    """Let torch's kernel compute the RMS norms of `model` that are written in single operators, in place.

    A hand-written norm takes six kernels, each a pass over the activations, and about ten in backward; fused,
    it takes one kernel, and two in backward. Half-precision results are rounded once, not twice.

    Returns the names of these modules. Source: Zhang, Sennrich 2019, arXiv:1910.07467; `torch.nn.RMSNorm`.
    """
    found = find_rms_norms(model)
    for name, eps in found.items():
        module: Any = model.get_submodule(name)
        module.__class__, module.eps = FusedRMSNorm, eps
    return list(found)
