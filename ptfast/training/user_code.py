"""Report errors of a user's model, loss, task and callbacks in one line that names the part."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator, Mapping
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ptfast.core.distributed import is_connection_lost
from ptfast.core.errors import INSTALLED, ConfigError, DataError, PtfastError, described, name_of, summary_of
from ptfast.core.machine import is_memory_error
from ptfast.core.sections.origins import comes_from, is_ours
from ptfast.core.tensors.torch_internals import backward
from ptfast.optim.layerwise import no_sparse
from ptfast.run import Run
from ptfast.tasks.added_metrics import is_number

MODEL = "model._target_"
LOSS = "task.loss._target_"
OPTIMIZER = "optimizer._target_"
TRACEBACK = "Add --traceback to see where it comes from"


class UserPart(NamedTuple):
    """A part of a run that the config names by import path."""

    key: str
    made: Any
    """An object or a function."""

    @property
    def code(self) -> CodeType | None:
        """The code of a function; None for an object."""
        function = self.made.func if isinstance(self.made, functools.partial) else self.made
        return getattr(function, "__code__", None)

    def error(self, what: str, suggestion: str | None = None) -> ConfigError:
        """Build the error that names this part."""
        return ConfigError("C017", what, key=self.key, value=name_of(self.made), suggestion=suggestion)


def parts_of(run: Any, *, ours: bool = False) -> list[UserPart]:
    """Return the user's parts of a run, the model first; with `ours`, the model even if it is ptfast's."""
    task, callbacks = run.task, getattr(run, "callbacks", ())
    parts = [
        UserPart(MODEL, run.model),
        UserPart(LOSS, getattr(task, "own_loss", None)),
        UserPart("task", task),
        UserPart(OPTIMIZER, getattr(run, "optimizer", None)),
        *(UserPart(f"callbacks.{index}._target_", callback) for index, callback in enumerate(callbacks)),
    ]
    kept = [part for part in parts if part.made is not None and not is_ours(part.made)]
    return [parts[0], *kept[kept[:1] == parts[:1] :]] if ours else kept


def failure(
    error: BaseException, run: Any, *, ours: bool = False, given: Mapping[str, str] = MappingProxyType({})
) -> PtfastError | None:
    """Return the error that names the part of `run` which raised `error`; None if it came from elsewhere.

    If a ptfast task could not compare outputs with targets, the cause is the model, or else the data. `given`
    describes the arguments of parts by their keys, to be added to the message.
    """
    if isinstance(error, PtfastError) or is_memory_error(error) or is_connection_lost(error):
        return None
    parts = parts_of(run, ours=ours)
    learners = [part for part in parts if part.key in (MODEL, LOSS)]
    stack = list(traceback.walk_tb(error.__traceback__))
    # Find the innermost part, and the outermost of its methods: the one that the run called.
    found: tuple[UserPart, str, int] | None = None
    for depth, (frame, _) in enumerate(stack):
        code = frame.f_code
        for part in parts:
            at_work = frame.f_locals.get("self") is part.made or code is part.code
            if at_work and (found is None or found[0] is not part):
                # Torch calls a module's forward through functions of its own.
                torchs = isinstance(part.made, nn.Module) and code.co_filename.startswith(INSTALLED)
                method = "forward " if torchs else f"{code.co_name} "
                found = part, "" if part.code is not None else method, depth
        if learners and code in (backward.__code__, Tensor.backward.__code__):
            found = learners[0], "the backward pass ", depth
    if found is not None:
        part, method, depth = found
        if part.key == OPTIMIZER and "sparse" in str(error):
            return no_sparse(f"{type(part.made).__name__} does")
        if comes_from(part.made, "torch.optim"):
            # Kernel errors arrive late, and methods other than `step` are called by ptfast.
            if isinstance(error, torch.AcceleratorError) or method not in ("step ", "wrapper "):
                return None
            method = "step "
        return part.error(f"{method}raises {summary_of(error, depth)}{given.get(part.key, '')}", TRACEBACK)
    frames = (frame.f_locals for frame, _ in stack if frame.f_locals.get("self") is run.task)
    compared = next((names for names in frames if {"outputs", "targets"} <= names.keys()), None)
    if compared is None:
        return None
    if mismatch := misfit(run.model, run.task, compared["outputs"], (None, compared["targets"])):
        return mismatch
    # Torch's losses are called without their reduction, through a copy.
    if loss := next((part for part in learners if part.key == LOSS), None):
        return loss.error(f"raises {summary_of(error)}", TRACEBACK)
    return DataError(
        "D004",
        f"targets of a batch are {described(compared['targets'])}: {summary_of(error)}",
        key="data",
        suggestion=f"Provide {type(run.task).__name__} with targets of one type and shape, or set task=...",
    )


def misfit(model: Any, task: Any, outputs: Any, data: Any, where: str = "") -> ConfigError | None:
    """Return the error for a model whose outputs `task` cannot compare with its targets; None if it can."""
    try:
        chosen = task.outputs_of(outputs) if hasattr(task, "outputs_of") else outputs
        wanted = task.misfit(chosen, data)
    except Exception:
        return None  # the targets are not of the kind that the task needs
    if wanted is None:
        return None
    what = f"forward returns {described(outputs)}{where}, but {type(task).__name__} needs {wanted}"
    hint = "Make it return that, or name a task that fits, by name or import path: task=..."
    return UserPart(MODEL, model).error(what, hint)


@contextlib.contextmanager
def naming_user_code(run: Any) -> Iterator[None]:
    """Make errors raised by a user's part inside this context name that part."""
    try:
        yield
    except Exception as error:
        if (named := failure(error, run)) is None:
            raise
        raise named from error


@contextlib.contextmanager
def constructing(key: str, path: str, doing: str = "its constructor") -> Iterator[None]:
    """Report errors of the user's constructor `path` as C017 of `key`; ptfast's own errors pass."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, PtfastError) or is_memory_error(error) or is_ours(path):
            raise
        what = f"{doing} raises {summary_of(error)}"
        raise ConfigError("C017", what, key=f"{key}._target_", value=path, suggestion=TRACEBACK) from error


def check_metrics(metrics: dict[str, Any], run: Run) -> dict[str, float]:
    """Return metrics as plain numbers; C017 for a callback's value that is not a number."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_number(value):
            part = next(part for part in parts_of(run) if hasattr(part.made, "on_evaluation"))
            what = f"on_evaluation adds {described(value)} as the metric {name}, which is not a number"
            raise part.error(what, "Add float(value)")
    return {
        name: value if isinstance(value, (int, float)) else float(value) for name, value in metrics.items()
    }
