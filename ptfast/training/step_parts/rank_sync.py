"""Synchronisation of several ranks: gradients exchanged once a step, and BatchNorm's statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from ptfast.core.run import Run
from ptfast.core.tensors.torch_internals import after_backward
from ptfast.techniques.parallel.running_statistics import RunningStatistics

_nothing = nullcontext()


class RankSync:
    """Keeps the ranks of a run in step.

    Args:
        run: on every one of several ranks, its model wrapped for them and restored.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._statistics = RunningStatistics(run.model, run.ranks)
        self._exchanges = False

    @contextmanager
    def micro_batch(self, num_samples: int, *, exchanges: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch.

        Args:
            num_samples: 0 for the stand-in of an empty share, of which nothing is to be left.
            exchanges: send gradients to the other ranks: once a step, with its last micro-batch.
        """
        self._exchanges = exchanges
        with (
            _nothing if exchanges else self._run.forward.no_sync(),
            _nothing if num_samples else self._statistics.untouched(),
        ):
            yield

    def booking(self, loss_of: Callable[[Any, Any], tuple[Tensor, Any]]) -> Callable[[Any, Any], Any]:
        """`loss_of`, after whose backward pass the wait for the other ranks is booked as `gradient_sync`.

        Autograd calls what it is asked to call at the end in the order of asking, and DDP and FSDP ask for
        their wait after this. Sending beside backward is not in it; nor is the gathering of FSDP's weights,
        which is part of forward and backward.
        """

        def call_at_end(grad: Tensor) -> None:
            after_backward(partial(self._run.clock.to, "gradient_sync"))

        def booked(model: Any, data: Any) -> tuple[Tensor, Any]:
            loss, num_items = loss_of(model, data)
            if self._exchanges:
                loss.register_hook(call_at_end)
            return loss, num_items

        return booked

    def merge(self) -> None:
        """Bring BatchNorm's running statistics together, once all micro-batches of a step are done."""
        self._run.clock.to("gradient_sync")
        self._statistics.merge()
