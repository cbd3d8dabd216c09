"""What ranks hold and send in a step, counted while they train: to hold predictions against."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from ptfast.core.distributed import Ranks
from ptfast.core.tensors.torch_internals import TorchDispatchMode
from ptfast.run import Run
from ptfast.training.step import Trainer

RESNET = ("model=resnet_digits", "model.depth=8", "model.width=4", "batch_size=32", "steps=4")
MLP = ("model.hidden=[47]", "batch_size=64", "steps=4", "ema.decay=0.9", "optimizer=adamw")
LARGE = ("model.hidden=[300]", "batch_size=64", "steps=4", "optimizer=sgd")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "resnet": ("ddp", (*RESNET, "optimizer=sgd")),
    "synced": ("ddp", (*RESNET, "optimizer=lamb", "parallel.sync_batchnorm=true", "micro_batches=4")),
    "accumulated": ("ddp", (*MLP, "gradients.accumulate=2", "parallel.gradient_as_bucket_view=false")),
    "bf16 gradients": ("ddp", (*MLP, "parallel.compression=bf16")),
    "powersgd": ("ddp", (*LARGE, "parallel.compression=powersgd", "parallel.powersgd_start=2")),
    "sharded": ("fsdp", MLP),
    "sharded bf16": ("fsdp", (*LARGE, "precision=bf16", "gradients.accumulate=2")),
    "sharded resnet": ("fsdp", (*RESNET, "optimizer=sgd", "precision=bf16")),
}
"""Strategy and words."""
QUICK = ("resnet", "accumulated", "powersgd", "sharded bf16")


class Sent(TorchDispatchMode):
    """Counts the bytes of the collective operations that run inside, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_").replace("_", "").removesuffix("base")
            # Whole tensors: what is summed, gathered, or shared out.
            whole = args[1] if name == "reducescatter" else args[0]
            tensors = whole if isinstance(whole, list) else [whole]
            self.found[name] += sum(num_bytes(tensor) for tensor in tensors if tensor.numel() > 1)
        return func(*args, **(kwargs or {}))


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, of one that is shared out this rank's."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()


def counted(run: Run) -> dict[str, int]:
    """Bytes that this rank holds, and that all send in the step after the third, by kind."""
    trainer, batches = Trainer(run), run.train_loader.steps(0, 4)
    trainer.train(batches, 3)
    with Sent() as sent, pytest.MonkeyPatch.context() as patch:
        # Hooks of DDP go on in threads that no mode sees.
        original = torch.distributed.all_reduce

        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                sent.found["allreduce"] += num_bytes(tensor)
            return original(tensor, *args, **kwargs)

        patch.setattr(torch.distributed, "all_reduce", all_reduce)
        step = trainer.take_step
        gradients: list[int] = []

        def noted() -> Any:
            gradients.append(sum(num_bytes(p.grad) for p in trainer.parameters if p.grad is not None))
            return step()

        trainer.take_step = noted
        trainer.train(batches, 4)
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(map(num_bytes, (*run.model.parameters(), *run.model.buffers()))),
        "gradients": gradients[0],
        "optimizer state": sum(num_bytes(value) for value in states if isinstance(value, Tensor)),
        **sent.found,
    }


def cases(ranks: Ranks, names: Iterable[str] = CASES) -> dict[str, Any]:
    """What is counted, by the name of the case."""
    from rank_cases import Cases  # which imports this

    on = Cases(ranks)
    return {
        name: counted(on.build(f"sent-{name}", *CASES[name][1], strategy=CASES[name][0])) for name in names
    }
