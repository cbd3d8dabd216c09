"""Where a step stands, told to whoever watches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ptfast.run import Callback, Run

PHASES = ("data", "forward", "backward", "optimizer")


class Phases(Callback):
    """Where a step stands: in `data`, `forward`, `backward` or `optimizer`, or (None) between steps.

    Args:
        enter: called with the name of a phase as it begins.
        leave: called with its name as it ends.
    """

    def __init__(self, enter: Callable[[str], Any], leave: Callable[[str], Any]) -> None:
        self.enter, self.leave = enter, leave
        self.name: str | None = None

    def to(self, name: str | None) -> None:
        """End the phase that is open, and begin `name`."""
        if self.name is not None:
            self.leave(self.name)
        self.name = name
        if name is not None:
            self.enter(name)

    def on_step(self, run: Any, step: int) -> None:
        self.to(None)


@contextmanager
def watched(run: Run, phases: Phases) -> Iterator[None]:
    """Have `phases` told of every step of `run`; the loop itself has no line for it."""
    loader, task = run.train_loader, run.task
    steps, loss, backward = loader.steps, task.loss, Tensor.backward

    def steps_told(first_step: int, last_step: int) -> Iterator[Any]:
        batches = steps(first_step, last_step)
        while True:
            phases.to("data")
            batch = next(batches, None)
            phases.to(None)
            if batch is None:
                return
            yield batch

    def loss_told(model: Any, data: Any) -> Any:
        phases.to("forward")
        try:
            return loss(model, data)
        finally:
            phases.to(None)

    def backward_told(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        phases.to("backward")
        backward(tensor, *args, **kwargs)
        # Or the next micro-batch, if there is one, which says so.
        phases.to("optimizer")

    vars(loader)["steps"], vars(task)["loss"] = steps_told, loss_told
    setattr(Tensor, "backward", backward_told)  # noqa: B010 - pyright takes the method for constant
    run.watchers.append(phases)
    try:
        yield
    finally:
        phases.to(None)
        run.watchers.remove(phases)
        del vars(loader)["steps"], vars(task)["loss"]
        setattr(Tensor, "backward", backward)  # noqa: B010
