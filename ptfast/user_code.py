"""What a user's model, loss, task and callbacks give or raise, told in a line that names them."""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from ptfast.distributed import is_connection_lost
from ptfast.errors import ConfigError, DataError, PtfastError, described, name_of, one_line
from ptfast.machine import is_memory_error
from ptfast.run import Run

PACKAGE = str(Path(__file__).parent)
INSTALLED = (PACKAGE, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of code that no user of ptfast has written."""
MODEL = "model._target_"
LOSS = "task.loss._target_"
TRACEBACK = "Add --traceback to see where it comes from"
SLOW_SWITCHES = {
    "anomaly": (torch.is_anomaly_enabled, r"detect_anomaly\("),
    "profiler": (torch.autograd._profiler_enabled, r"(?<!def )\bprofile\("),
}
"""What slows every step down, by the value of `debug` that is for it: whether it is on, and how code turns it
on."""


class Part(NamedTuple):
    """A part of a run that the config names by import path."""

    key: str
    made: Any

    def error(self, what: str, suggestion: str | None = None) -> ConfigError:
        """What is wrong with it, in a line that names it."""
        return ConfigError("C017", what, key=self.key, value=name_of(self.made), suggestion=suggestion)


def parts_of(run: Any, *, ours: bool = False) -> list[Part]:
    """What of a run may be of a user's making, the model first.

    Args:
        run: a run, or anything else with a `model` and a `task`.
        ours: whether ptfast's own models count, which may just not fit the data.
    """
    task, callbacks = run.task, getattr(run, "callbacks", ())
    parts = [
        Part(MODEL, run.model),
        Part(LOSS, getattr(task, "own_loss", None)),
        Part("task", task),
        Part("optimizer._target_", getattr(run, "optimizer", None)),
        *(Part(f"callbacks.{index}._target_", callback) for index, callback in enumerate(callbacks)),
    ]
    kept = [part for part in parts if part.made is not None and not name_of(part.made).startswith("ptfast.")]
    kept = [
        part
        for part in kept
        if part.key != "optimizer._target_" or not name_of(part.made).startswith("torch.")
    ]
    return [parts[0], *kept] if ours and parts[0] not in kept else kept


def failure(error: BaseException, run: Any, *, ours: bool = False, given: str = "") -> ConfigError | None:
    """What to tell of an error that came out of a part of `run`; None where it came from elsewhere.

    Args:
        run: as `parts_of` takes it.
        ours: as there.
        given: what the part was called with, to be added.
    """
    if isinstance(error, PtfastError) or is_memory_error(error) or is_connection_lost(error):
        return None
    parts = parts_of(run, ours=ours)
    learners = [part for part in parts if part.key in (MODEL, LOSS)]
    stack = list(traceback.walk_tb(error.__traceback__))
    # The innermost part, and the outermost of its methods: it is that which the run has called.
    found: tuple[Part, str, int] | None = None
    for depth, (frame, _) in enumerate(stack):
        for part in parts:
            at_work = frame.f_locals.get("self") is part.made or frame.f_code is _code(part.made)
            if at_work and (found is None or found[0] is not part):
                found = part, _method(part, frame.f_code), depth
        if learners and frame.f_code is Tensor.backward.__code__:
            found = learners[0], "the backward pass ", depth
    if found is None:
        return None
    part, method, depth = found
    return part.error(f"{method}raises {_told(error, depth)}{given if part.key == MODEL else ''}", TRACEBACK)


@contextlib.contextmanager
def naming_user_code(run: Any) -> Iterator[None]:
    """Have errors that come out of a user's part inside name it.

    Args:
        run: as `parts_of` takes it.
    """
    try:
        yield
    except Exception as error:
        if (told := failure(error, run)) is None:
            raise
        raise told from error


@contextlib.contextmanager
def constructing(key: str, path: str) -> Iterator[None]:
    """Have what the constructor `path`, of no part of ptfast, raises inside be an error of the key.

    Raises:
        ConfigError: C017.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, PtfastError) or is_memory_error(error) or path.startswith("ptfast."):
            raise
        what = f"its constructor raises {_told(error)}"
        raise ConfigError("C017", what, key=f"{key}._target_", value=path, suggestion=TRACEBACK) from error


def _told(error: BaseException, depth: int = 0) -> str:
    """An error's type and text, and where in a user's code it came up below `depth`, if in any."""
    stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [
        f" ({Path(file).name}:{line})" for file, line in stack[depth:] if not file.startswith(INSTALLED)
    ]
    text = one_line(str(error)).rstrip(". ")
    return type(error).__name__ + (places[-1] if places else "") + (f": {text}" if text else "")


def _code(made: Any) -> Any:
    function = made.func if isinstance(made, functools.partial) else made
    return getattr(function, "__code__", None)


def _method(part: Part, code: CodeType) -> str:
    if _code(part.made) is not None:
        return ""
    # Torch calls a module's forward by way of functions of its own.
    torchs = isinstance(part.made, nn.Module) and code.co_filename.startswith(INSTALLED)
    return "forward " if torchs else f"{code.co_name} "


class Fitting:
    """A model whose outputs are held against what the task can compare with the targets.

    Args:
        forward: what is called.
        model: what it is of.
        task: with a `misfit`.
        data: the batch.
        where: a word on when this is.

    Raises:
        ConfigError: C017 for outputs that do not fit, on calling it.
    """

    def __init__(self, forward: Any, model: Any, task: Any, data: Any, where: str) -> None:
        self.forward, self._model, self._task, self._data, self._where = forward, model, task, data, where
        self.outputs: Any = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.outputs = outputs = self.forward(*args, **keywords)
        if (wanted := self._task.misfit(outputs, self._data)) is not None:
            task = type(self._task).__name__
            what = f"forward gives {described(outputs)}{self._where}, and {task} takes {wanted}"
            hint = "Have it give that, or name a task that fits, by name or import path: task=..."
            raise Part(MODEL, self._model).error(what, hint)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)


def fitting(forward: Any, model: Any, task: Any, data: Any, where: str = "") -> Any:
    """`forward` as `Fitting`, where the task can say what fits; else itself."""
    misfit = getattr(task, "misfit", None)
    return forward if misfit is None else Fitting(forward, model, task, data, where)


class FirstStep:
    """Looks over what model and loss give in the first step of a process, where looking costs little.

    What is wrong there is told before anything is saved, and in the user's terms: later it would be an error
    deep inside torch, or none at all.

    Args:
        run: about to be trained, on every rank.

    Cost: some tiny kernels in the first step. For a model from elsewhere, that begins to train and is
    evaluated later, a forward pass more.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._fresh = run, run.progress.step == 0
        self._data: Any = None
        self._finite: list[tuple[str, Tensor]] = []
        self.switches = SlowSwitches(run)

    def loss(self, model: Any, data: Any) -> tuple[Tensor, Any]:
        """What the task's `loss` gives, if that is a loss.

        Raises:
            ConfigError: C017 for outputs that the task cannot compare with the targets, for what is no loss
                or has no gradient, and for what a user's part raises.
        """
        run, self._data = self._run, data
        seen: Any = fitting(model, run.model, run.task, data)
        try:
            with self.switches.in_forward():
                given = run.task.loss(seen, data)
        except Exception as error:
            shape = f", given {described(data[0])}" if isinstance(data, (tuple, list)) else ""
            if (told := failure(error, run, ours=True, given=shape)) is None:
                raise
            raise told from error
        outputs = seen.outputs if isinstance(seen, Fitting) else None
        self._check_loss(given, outputs)
        self._note_finite("data", data)
        self._note_finite("model", outputs)
        self._note_finite("loss", given[0])
        return given

    def look_at_evaluation(self) -> None:
        """Evaluate the first batch with a model that may do otherwise then, once the first step is taken.

        Raises:
            ConfigError: C017 as `loss`.
        """
        run, data, self._data = self._run, self._data, None
        seen: Any = fitting(run.model, run.model, run.task, data, " in evaluation")
        theirs = not name_of(run.model).startswith("ptfast.")
        if not (self._fresh and theirs and run.eval_loaders and isinstance(seen, Fitting)):
            return
        run.forward.eval()
        # What a model keeps from one pass to the next has to stay good for training: no inference mode.
        with run.uncompiled(), torch.no_grad(), run.precision.autocast(), naming_user_code(run):
            run.task.loss(seen, data)
        run.forward.train()

    def not_finite(self) -> PtfastError | None:
        """What made the first loss not finite; None where that cannot be told. Waits for the device."""
        if not self._fresh:
            return None
        source = next((name for name, finite in self._finite if not finite), None)
        model, *others = parts_of(self._run, ours=True)
        if source == "data":
            what = "the first batch holds numbers that are not finite"
            return DataError("D005", what, key="data", suggestion="Leave such samples out, or clean them")
        if source == "model":
            hint = "Look for logarithms, roots and divisions in its forward pass, or try precision=fp32"
            return model.error("gives outputs that are not finite in the first step", hint)
        loss = next((part for part in others if part.key.startswith("task")), None)
        if source == "loss" and loss is not None:
            return loss.error("gives a loss that is not finite, of outputs and targets that are")
        return None

    def _check_loss(self, given: Any, outputs: Any) -> None:
        run = self._run
        model, *others = parts_of(run, ours=True)
        culprit = next((part for part in others if part.key.startswith("task")), model)
        if not isinstance(given, tuple) or len(given) != 2:
            what = f"loss gives {described(given)}, where the sum of the losses and their number are due"
            raise culprit.error(what)
        loss = given[0]
        if not isinstance(loss, Tensor) or loss.dim():
            raise culprit.error(f"gives {described(loss)}, where a loss is a Tensor without dimensions")
        if not loss.requires_grad:
            tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            if tensors and not any(tensor.requires_grad for tensor in tensors):
                culprit = model
            what = f"gives {described(outputs if culprit is model else loss)} without a gradient"
            hint = "Leave out .detach(), .item(), .numpy(), torch.no_grad() and argmax on the way to the loss"
            raise culprit.error(f"{what}, from which nothing can be learnt", hint)

    def _note_finite(self, name: str, values: Any) -> None:
        leaves = [leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        self._finite += [(name, leaf.isfinite().all()) for leaf in leaves if leaf.is_floating_point()]


class SlowSwitches:
    """Warns, once, of debugging aids of torch that a user's own code has left on.

    Args:
        run: whose `debug` is known to the user.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._told = run, {run.debug}

    def look(self, *_: object) -> None:
        """Warn of what is on now. Cost: two calls."""
        for name, (is_on, pattern) in SLOW_SWITCHES.items():
            if name not in self._told and is_on():
                self._told.add(name)
                place = f" ({', '.join(places)})" if (places := _places_of(pattern, self._run)) else ""
                what = {"anomaly": "anomaly detection is", "profiler": "a profiler is"}[name]
                hint = f"leave it out and ask for debug={name} where it is wanted"
                self._run.display.warn(f"{what} on{place}, which slows every step down: {hint}")

    @contextlib.contextmanager
    def in_forward(self) -> Iterator[None]:
        """Look whenever a module is called inside; not where it is compiled, which would begin anew."""
        if self._run.compilation is not None:
            yield
            return
        handle = register_module_forward_pre_hook(self.look)
        try:
            yield
        finally:
            handle.remove()


def callback_states(run: Run) -> list[Any]:
    """What the callbacks want to have saved, of which each has to be such that it can be read again.

    Raises:
        ConfigError: C017 for anything but tensors and plain values.
    """
    states: list[Any] = []
    callbacks: list[Any] = run.callbacks
    for index, callback in enumerate(callbacks):
        states.append(callback.state_dict() if hasattr(callback, "state_dict") else None)
        if (odd := _unsavable(states[-1])) is not None:
            what = f"state_dict gives {described(odd)}, where tensors and plain values are saved"
            raise Part(f"callbacks.{index}._target_", callback).error(what)
    return states


def _unsavable(value: Any) -> Any:
    """What in a nest is neither a tensor nor a plain value; None where all is."""
    if isinstance(value, (dict, list, tuple)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return next((odd for item in inner if (odd := _unsavable(item)) is not None), None)
    plain = isinstance(value, Tensor) or type(value) in (type(None), bool, int, float, str, bytes)
    return None if plain else value


def check_figures(figures: dict[str, Any], run: Run) -> dict[str, float]:
    """Figures that callbacks have added to, as plain numbers.

    Raises:
        ConfigError: C017 for what is no number.
    """
    for name, value in figures.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            part = next(part for part in parts_of(run) if hasattr(part.made, "on_evaluation"))
            what = f"on_evaluation adds {described(value)} as the figure {name}, which is no number"
            raise part.error(what, "Add float(value)")
    return {
        name: value if isinstance(value, (int, float)) else float(value) for name, value in figures.items()
    }


def _places_of(pattern: str, run: Run) -> list[str]:
    """Where `pattern` stands in a file that is not installed, one of the run's parts if it is in any."""
    first = {type(part.made).__module__: None for part in parts_of(run)}
    for name in [*first, *sys.modules]:
        file = getattr(sys.modules.get(name), "__file__", None)
        if not file or file.startswith(INSTALLED):
            continue
        lines = [line.partition("#")[0] for line in linecache.getlines(file)]
        if numbers := [number for number, line in enumerate(lines, 1) if re.search(pattern, line)]:
            return [f"{Path(file).name}:{number}" for number in numbers]
    return []
