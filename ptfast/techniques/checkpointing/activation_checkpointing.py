"""Activation checkpointing: the backward pass computes again what the forward pass did not keep."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ptfast.core.errors import ConfigError
from ptfast.core.tensors.torch_internals import BatchNorm, InstanceNorm
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.repeated_blocks import find_blocks

KEPT_OPS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
"""Operations whose results `selective` keeps: those whose arithmetic outweighs their result."""

Buffers = dict[str, "Tensor | None"]

_WRITE_ONLY = (BatchNorm.forward, nn.SyncBatchNorm.forward, InstanceNorm.forward)
_checkpoint: Any = torch_checkpoint.checkpoint
_parameters = inspect.signature(_checkpoint).parameters
# torch's default, not to call hooks for what `selective` keeps, warns that it will change.
_RESPECTS_HOOKS = {name: True for name in ("respect_saved_tensors_hooks",) if name in _parameters}


def apply_checkpointing(
    model: nn.Module, checkpointing: Checkpointing, *, known: Sequence[str] | None = None
) -> dict[str, nn.Module]:
    """Have blocks of `model` drop what they compute, and compute it again in the backward pass.

    What a block's layers leave behind for the backward pass is most of the memory of a step. Kept are the
    inputs of the blocks and, for the length of one block's backward, its insides: memory that goes into a
    larger batch or model. Gradients, running statistics and random numbers are those without it, bit for bit.

    Args:
        model: in its final form but for compiling and wrapping; blocks are changed in place, names stay.
        checkpointing: `full` takes every block; `every_n` the first of every `every`; `selective` every
            block, but keeps the results of matrix products, convolutions and attention; `budget` none, which
            is the compiler's (`apply_memory_budget`). For `blocks` see `find_blocks`; a list of modules
            stands for its members.
        known: names of the blocks that were taken when the run began.

    Returns:
        The blocks by name.

    Raises:
        ConfigError: C005 when a pattern matches no module; C011 when the model has no blocks.

    Cost: the forward pass of the blocks once more, about a third of a step; on the CPU also about 0.2 ms a
    block and 20 us for every tensor that it would have kept, 3 us of them to check that shape and type come
    out as before. That check stays on: a block that computes something else the second time would train on
    wrong gradients in silence. `selective`: little arithmetic, but some 50 us more for every operation.
    torch's checkpointing loads the compiler, 1 to 3 s at start-up. None of it in evaluation.
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
        what = f"{type(model).__name__} has no blocks that recur"
        hint = "Name modules, as in checkpointing.blocks=[layers.*], or use checkpointing=none"
        raise ConfigError("C011", what, key="checkpointing", value=mode, suggestion=hint)
    if mode == "every_n" and not known:
        found = dict(list(found.items())[:: checkpointing.every])
    # Decoders of transformers would append to the keys and values of past tokens a second time.
    for part in model.modules():
        settings: Any = getattr(part, "config", None)
        if getattr(settings, "use_cache", None) is True:
            settings.use_cache = False
    for block in found.values():
        if mode == "selective":
            # An activation in place would overwrite the result that is kept.
            for part in block.modules():
                if getattr(part, "inplace", None) is True:
                    part.__dict__["inplace"] = False
        block.forward = CheckpointedForward(block, selective=mode == "selective")
    # Its first call would, within the first step.
    import torch._dynamo  # noqa: F401

    return found


def apply_memory_budget(budget: float | None) -> None:
    """Let the compiler keep only so much between forward and backward, and compute the rest again.

    It chooses what costs least to compute again for what it frees, over the whole graph and within fused
    kernels, which no list of blocks can, for a longer compilation.

    Args:
        budget: share of what a compiled model would keep otherwise, in (0, 1): near 0 keeps little more than
            the inputs. None for all of it.

    Source: PyTorch blog, March 2025, "Current and New Activation Checkpointing Techniques in PyTorch".
    """
    # Nothing to take back unless a run before this one, in the same process, has set it.
    if budget is not None or "torch._functorch.config" in sys.modules:
        import torch._functorch.config as functorch

        wanted = 1.0 if budget is None else budget
        if wanted != functorch.activation_memory_budget:
            functorch.activation_memory_budget = wanted
            # Graphs compiled under another budget would be found again.
            torch.compiler.reset()


@contextmanager
def naming_mismatch(mode: str) -> Iterator[None]:
    """Raise C011 where a block computes something else the second time."""
    try:
        yield
    except torch_checkpoint.CheckpointError as error:
        what = "a block computes different tensors when it is recomputed, as one that counts its calls does"
        hint = "Leave it out by checkpointing.blocks, or use checkpointing=none"
        raise ConfigError("C011", what, key="checkpointing", value=mode, suggestion=hint) from error


class CheckpointedForward:
    """Takes the place of a block's `forward`, so that no parameter or module changes its name.

    An object and not a closure: in a copy of the block it calls the copy's layers.
    """

    def __init__(self, block: nn.Module, *, selective: bool) -> None:
        self.block, self.forward, self.selective = block, block.forward, selective
        self.buffers: WrittenBuffers | None = None
        update_wrapper(self, self.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # A compiled graph writes buffers once, whatever it computes again.
            if not self.selective:
                return _checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
            contexts = partial(torch_checkpoint.create_selective_checkpoint_contexts, _policy)
            return _checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        if self.buffers is None:
            self.buffers = WrittenBuffers(self.block)
        before = self.buffers.copies()
        recomputing = Recomputing(self.buffers, before)
        keeping: AbstractContextManager[Any] = nullcontext()
        if self.selective:
            keeping, recomputing.reusing = torch_checkpoint.create_selective_checkpoint_contexts(_policy)
        # torch looks for the devices on which random numbers may be drawn among positional arguments alone.
        output = _checkpoint(
            partial(_call, self.forward, tuple(kwargs)),
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (keeping, recomputing),
            **_RESPECTS_HOOKS,
        )
        self.buffers.learn(before)
        return output


def _call(forward: Callable[..., Any], names: tuple[str, ...], *values: Any) -> Any:
    num_args = len(values) - len(names)
    return forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))


class WrittenBuffers:
    """The buffers that a block's forward pass writes, which its recomputation has to leave as they are.

    A norm in training writes its running statistics without reading them: its recomputation may write to a
    scratch copy. Which other modules write is found out in the first forward pass; what they write may have a
    say in their results (spectral norm's vectors), so their recomputation starts from what was there before.
    """

    def __init__(self, block: nn.Module) -> None:
        holders = [module for module in block.modules() if any(True for _ in module.buffers(recurse=False))]
        self.scratch = [(m, _copied(m._buffers)) for m in holders if type(m).forward in _WRITE_ONLY]
        self.writers = [m for m in holders if type(m).forward not in _WRITE_ONLY]
        self.learnt = not self.writers

    def copies(self) -> list[tuple[nn.Module, Buffers]]:
        """Buffers before a forward pass, of the modules that write and may read it."""
        return [(module, _copied(module._buffers)) for module in self.writers]

    def learn(self, before: list[tuple[nn.Module, Buffers]]) -> None:
        """After the first forward pass, which copied everything: forget modules that have only read.

        Those that are not in training then (frozen for now, or given a stand-in sample) may write later on.
        """
        if not self.learnt:
            self.writers = [m for m, buffers in before if not m.training or _differ(buffers, m._buffers)]
            self.learnt = True


class Recomputing:
    """The context of a recomputation: other buffers than its own, and the results that were kept."""

    def __init__(self, buffers: WrittenBuffers, before: list[tuple[nn.Module, Buffers]]) -> None:
        self.buffers, self.before = buffers, before
        self.reusing: AbstractContextManager[Any] = nullcontext()
        self.own: list[tuple[nn.Module, Buffers]] = []

    def __enter__(self) -> None:
        stand_ins = [(norm, scratch) for norm, scratch in self.buffers.scratch if norm.training]
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


def _copied(buffers: Buffers) -> Buffers:
    return {name: None if buffer is None else buffer.detach().clone() for name, buffer in buffers.items()}


def _differ(before: Buffers, after: Buffers) -> bool:
    # By value: batch_norm does not count its writes as versions.
    return any(
        (old is None) != (new is None) or (old is not None and new is not None and not torch.equal(old, new))
        for old, new in ((before.get(name), after.get(name)) for name in before | after)
    )


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
    policy = torch_checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if op in _kept_ops() else policy.PREFER_RECOMPUTE


@cache
def _kept_ops() -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in KEPT_OPS)


def _with_forward(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """The module by name, or its members by theirs where it is a mere list of them."""
    if type(module).forward is not nn.Module.forward:
        return {name: module}
    members = [_with_forward(member, f"{name}.{index}") for index, member in module.named_children()]
    return {key: value for found in members for key, value in found.items()}
