"""Activation checkpointing: the backward pass recomputes activations that the forward pass dropped."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ptfast.core.errors import ConfigError
from ptfast.core.tensors.torch_internals import BatchNorm, InstanceNorm
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.repeated_blocks import find_blocks

KEPT_OPS = [
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
]
"""Operations whose results `selective` keeps: they are costly to compute but take little memory."""
Policy = torch_checkpoint.CheckpointPolicy

Buffers = list[tuple[nn.Module, dict[str, "Tensor | None"]]]
"""Buffers of modules by name."""

_WRITE_ONLY = (BatchNorm.forward, nn.SyncBatchNorm.forward, InstanceNorm.forward)
_checkpoint: Any = torch_checkpoint.checkpoint
_parameters = inspect.signature(_checkpoint).parameters
# Torch warns that its default, which skips hooks for tensors that `selective` keeps, will change.
_RESPECTS_HOOKS = {name: True for name in ("respect_saved_tensors_hooks",) if name in _parameters}


def apply_checkpointing(
    model: nn.Module, checkpointing: Checkpointing, *, known: Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Let blocks of `model` drop their activations, and recompute them in the backward pass.

    Activations take most of a step's memory. Checkpointing keeps only the inputs of blocks, plus the
    activations of one block during its backward pass. Gradients, running statistics and random numbers stay
    the same bit for bit.

    Args:
        model: in its final form except for compiling and wrapping; changed in place, but keeps its names.
        checkpointing: `selective` keeps the results of matrix products, convolutions and attention; `budget`
            is left to the compiler (`apply_memory_budget`). For `blocks` see `find_blocks`; a list of modules
            selects its members.
        known: names of the blocks selected when the run began.

    Returns the blocks by name; C005 if a pattern matches no module, C011 if the model has no blocks.

    Cost: another forward pass of the blocks, about a third of a step; on the CPU also about 0.2 ms per block
    and 20 us per dropped tensor; `selective` costs 50 us per operation; 1 to 3 s to import.
    Source: Chen, Xu, Zhang, Guestrin 2016, arXiv:1604.06174; torch.utils.checkpoint.
    """
    mode, blocks = checkpointing.mode, known or checkpointing.blocks
    apply_memory_budget(checkpointing.memory_budget if mode == "budget" else None)
    if mode in ("none", "budget"):
        return {}
    found: dict[str, nn.Module] = {}
    for name, block in find_blocks(model, blocks, key="checkpointing.blocks").items():
        found |= _with_forward(block, name)
    if not found:
        what = f"{type(model).__name__} has no repeated blocks"
        hint = "Name modules, as in checkpointing.blocks=[layers.*], or use checkpointing=none"
        raise ConfigError("C011", what, key="checkpointing", value=mode, suggestion=hint)
    if mode == "every_n" and not known:
        found = dict(list(found.items())[:: checkpointing.every])
    # Recomputed decoders of transformers would append to their cached keys and values a second time.
    for part in model.modules():
        settings: Any = getattr(part, "config", None)
        if getattr(settings, "use_cache", None) is True:
            settings.use_cache = False
    for block in found.values():
        if mode == "selective":
            # An in-place activation would overwrite a result that is kept.
            for part in block.modules():
                if getattr(part, "inplace", None) is True:
                    part.__dict__["inplace"] = False
        block.forward = CheckpointedForward(block, selective=mode == "selective")
    # Import it before training; otherwise the first step would.
    import torch._dynamo  # noqa: F401

    return found


def apply_memory_budget(budget: float | None) -> None:
    """Let the compiler keep the fraction `budget`, in (0, 1), of its saved activations; None keeps all.

    It first recomputes where little work frees much memory, also within fused kernels. Source: PyTorch
    blog, March 2025, "Current and New Activation Checkpointing Techniques in PyTorch".
    """
    # None only needs to undo the budget of an earlier run in this process.
    if budget is not None or "torch._functorch.config" in sys.modules:
        import torch._functorch.config as functorch

        wanted = 1.0 if budget is None else budget
        if wanted != functorch.activation_memory_budget:
            functorch.activation_memory_budget = wanted
            # Otherwise graphs compiled under another budget would be reused.
            torch.compiler.reset()


@contextmanager
def naming_mismatch(mode: str) -> Iterator[None]:
    """Raise C011 if the recomputation of a block differs from its first forward pass."""
    try:
        yield
    except torch_checkpoint.CheckpointError as error:
        what = "a block computes other tensors when recomputed, for example because it counts its calls"
        hint = "Exclude it with checkpointing.blocks, or use checkpointing=none"
        raise ConfigError("C011", what, key="checkpointing", value=mode, suggestion=hint) from error


class CheckpointedForward:
    """Replaces a block's `forward`, so that no parameter or module changes its name.

    Recomputation must not change the block's buffers. Norms, which write running statistics without reading
    them, write to a scratch copy instead. Other modules that write (spectral norm's vectors) are detected in
    the first forward pass, and are recomputed from copies of their earlier buffers.

    It is an object, not a closure, so that in a copy of the block it calls the layers of the copy.
    """

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self.block, self.forward, self.selective = block, block.forward, selective
        self.scratch: Buffers | None = None
        self.writers: list[nn.Module] = []
        update_wrapper(self, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # This operator exists only after a model has loaded it.
        varlen = getattr(torch.ops.torch_attn, "_varlen_attn", None)
        kept = KEPT_OPS if varlen is None else [*KEPT_OPS, varlen.default]
        contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, partial(choose, kept))
        if torch.compiler.is_compiling():
            # A compiled graph writes buffers once, whatever it recomputes.
            if not self.selective:
                return _checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
            return _checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        is_first = self.scratch is None
        if self.scratch is None:
            holders = [each for each in self.block.modules() if list(each.buffers(recurse=False))]
            self.writers = [each for each in holders if type(each).forward not in _WRITE_ONLY]
            norms = [each for each in holders if type(each).forward in _WRITE_ONLY]
            self.scratch = [(norm, _copied(norm._buffers)) for norm in norms]
        before = [(writer, _copied(writer._buffers)) for writer in self.writers]
        keeping, reusing = contexts() if self.selective else (nullcontext(), nullcontext())
        recomputing = Recomputing(self.scratch, before, reusing)

        # `call` keeps no reference to inputs, because torch releases them during the backward pass.
        num_args, names = len(args), tuple(kwargs)

        def call(*values: Any) -> Any:
            named = dict(zip(names, values[num_args:], strict=True))
            return self.forward(*values[:num_args], **named)

        # Torch looks for the devices of random numbers only among positional arguments.
        output = _checkpoint(
            call,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (keeping, recomputing),
            **_RESPECTS_HOOKS,
        )
        if is_first:
            # A module not in training now (frozen, or given a dummy batch) may write later.
            self.writers = [m for m, old in before if not m.training or _differ(old, m._buffers)]
        return output


def choose(kept: Sequence[Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Return whether `selective` saves or recomputes the result of `op`, given the operations it keeps."""
    if op not in kept:
        return Policy.PREFER_RECOMPUTE
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Attention with dropout is recomputed; otherwise the dropout after it would draw other numbers.
    return Policy.PREFER_RECOMPUTE if given.get("dropout_p") else Policy.MUST_SAVE


@dataclass
class Recomputing:
    """The context of a recomputation, with copies of the block's buffers and the saved results."""

    scratch: Buffers
    before: Buffers
    reusing: AbstractContextManager[Any]
    own: Buffers = field(default_factory=list)

    def __enter__(self) -> None:
        stand_ins = [(norm, buffers) for norm, buffers in self.scratch if norm.training]
        stand_ins += [(module, _copied(buffers)) for module, buffers in self.before]
        self.own = [(module, module._buffers) for module, _ in stand_ins]
        for module, buffers in stand_ins:
            module.__dict__["_buffers"] = buffers
        self.reusing.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for module, buffers in self.own:
            module.__dict__["_buffers"] = buffers
        self.reusing.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            what = "a block overwrites, in place, the result of a convolution or matrix product"
            hint = "Use checkpointing=full, or an operation that is not in place"
            raise ConfigError(
                "C011", what, key="checkpointing", value="selective", suggestion=hint
            ) from error


def _copied(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def _differ(before: dict[str, Tensor | None], after: dict[str, Tensor | None]) -> bool:
    # Compare values, because batch_norm does not count its writes as versions.
    return any(
        (old is None) != (new is None) or (old is not None and new is not None and not torch.equal(old, new))
        for old, new in ((before.get(name), after.get(name)) for name in before | after)
    )


def _with_forward(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return the module by name, or the members of a plain list of modules by their names."""
    if type(module).forward is not nn.Module.forward:
        return {name: module}
    members = [_with_forward(member, f"{name}.{index}") for index, member in module.named_children()]
    return {key: value for found in members for key, value in found.items()}
