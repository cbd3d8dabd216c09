"""Check the first step of a process: outputs of model and loss, and slow debugging aids left on."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, DataError, PtfastError, described
from ptfast.core.protocols import Mixed
from ptfast.core.sections.origins import is_ours
from ptfast.core.tensors.trees import copied, tree_leaves
from ptfast.run import Run
from ptfast.tasks.added_metrics import MetricTable, with_tables
from ptfast.tasks.loss_functions import CLOSE
from ptfast.tasks.ratios import placed
from ptfast.tasks.supervised import SupervisedTask
from ptfast.training.user_code import LOSS, MODEL, UserPart, failure, misfit, naming_user_code, parts_of

SWITCHES: dict[str, tuple[str, Callable[[], bool]]] = {
    "anomaly": ("anomaly detection", torch.is_anomaly_enabled),
    "profiler": ("a profiler", torch.autograd._profiler_enabled),
}
"""Debugging aids of torch that slow down every step, by the value of `debug` that turns them on."""


@dataclass(eq=False, repr=False)
class OutputCheck:
    """The `forward` of `model`; it raises if `task.misfit` finds that its outputs do not fit the targets."""

    forward: Any
    _model: Any
    _task: Any
    _data: Any
    _where: str
    outputs: Any = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.outputs = outputs = self.forward(*args, **keywords)
        if error := misfit(self._model, self._task, outputs, self._data, self._where):
            raise error
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)


def with_output_check(forward: Any, model: Any, task: Any, data: Any, where: str = "") -> Any:
    """Return `forward` as an `OutputCheck` if the task can check outputs, else unchanged."""
    misfit = getattr(task, "misfit", None)
    return forward if misfit is None else OutputCheck(forward, model, task, data, where)


class FirstStep:
    """Checks the outputs of model and loss in the first step of a process, before anything is saved.

    Cost: some tiny kernels in the first step; for a user's model at the start of training, a forward pass.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._fresh = run, run.progress.step == 0
        theirs = not is_ours(run.model)
        checks = getattr(run.task, "misfit", None) is not None
        self._follows = run.plan.followed[1] not in (run.task.metric, "loss")
        self._measures = self._follows or getattr(run.task, "adds_metrics", False)
        checks_evaluation = (theirs and checks) or self._measures
        self._evaluates = self._fresh and checks_evaluation and bool(run.eval_loaders)
        self._data: Any = None
        self._finite: list[tuple[str, Tensor]] = []
        self.switches = SlowSwitches(run)

    def loss(self, model: Any, data: Any, num_samples: int) -> tuple[Tensor, Any]:
        """Return the result of the task's `loss`; C017 for outputs that do not fit or errors in user code."""
        run, self._data = self._run, copied(data) if self._evaluates else None
        seen: Any = with_output_check(model, run.model, run.task, data)
        try:
            given = run.task.loss(seen, data)
        except Exception as error:
            inputs = data[0] if isinstance(data, (tuple, list)) else data
            given = {MODEL: f", given {described(inputs)}", "task": f", given {described(data)}"}
            if (named := failure(error, run, ours=True, given=given)) is None:
                raise
            if self._fresh and named.key == MODEL and (hint := run.remedy()):
                named = named.changed(suggestion=hint)
            raise named from error
        outputs = seen.outputs if isinstance(seen, OutputCheck) else None
        if isinstance(run.task, SupervisedTask) and (chosen := run.task.outputs_of(outputs)) is not outputs:
            if self._fresh:
                what = f"forward returns {described(outputs)}; the output is {described(chosen)}"
                run.display.note(f"model: {what}; set task=... for a task that uses the rest")
            outputs = chosen
        self._check_loss(given, outputs)
        if self._fresh and num_samples:
            self._check_count(given[1], data, num_samples)
            self._check_parts(outputs, data)
        for name, values in (("data", data), ("model", outputs), ("loss", given[0])):
            for leaf in tree_leaves(values):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                    # Unlike `isfinite` of each number, this needs no memory.
                    finite = torch.stack(leaf.detach().aminmax()).isfinite().all()
                    self._finite.append((name, finite))
        return given

    def check_evaluation(self) -> None:
        """Evaluate the first batch after the first step: a model may return other types in evaluation.

        Raises the errors of `loss`, and C005 if the metric to follow is not a single number.
        """
        run, data, self._data = self._run, self._data, None
        if data is None:
            return
        seen = with_output_check(run.model, run.model, run.task, data, " in evaluation")
        run.forward.eval()
        given: dict[str, Any] = {}
        # No inference mode: tensors that a model keeps from this pass must be usable in training.
        with run.uncompiled(), torch.no_grad(), run.precision.autocast, naming_user_code(run):
            # Evaluations have no mixed targets.
            mixed = isinstance(data, (tuple, list)) and any(isinstance(part, Mixed) for part in data)
            if self._measures and not mixed:
                metrics = placed(run.task.metrics(), run.device)
                run.task.evaluate(seen, data, metrics)
                # Some metrics need more than one batch: the first evaluation checks those.
                with contextlib.suppress(PtfastError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    given = with_tables(metrics) if self._follows else {}
            else:
                run.task.loss(seen, data)
        if isinstance(table := given.get(run.plan.followed[1]), MetricTable):
            what = f"is not a single number: {table.kind} returns {described(table.value)}"
            numbers = [name for name, value in given.items() if not isinstance(value, MetricTable)]
            hint = f"Follow {' or '.join(['loss', *numbers])}, or make the metric average"
            raise ConfigError("C005", what, key="stop.metric", value=run.plan.best_metric, suggestion=hint)
        run.forward.train()

    def not_finite(self) -> PtfastError | None:
        """Return the cause of a first loss that is not finite, if known. The host waits for the device."""
        if not self._fresh:
            return None
        source = next((name for name, finite in self._finite if not finite), None)
        model, *others = parts_of(self._run, ours=True)
        if source == "data":
            what = "the first batch contains numbers that are not finite"
            return DataError("D005", what, key="data", suggestion="Remove these samples, or clean them")
        if source == "model":
            hint = "Look for logarithms, roots and divisions in its forward pass, or try precision=fp32"
            return model.error("returns outputs that are not finite in the first step", hint)
        loss = next((part for part in others if part.key.startswith("task")), None)
        if source == "loss" and loss is not None:
            return loss.error("returns a loss that is not finite, although outputs and targets are")
        return None

    def _check_loss(self, given: Any, outputs: Any) -> None:
        run = self._run
        model, *others = parts_of(run, ours=True)
        culprit = next((part for part in others if part.key.startswith("task")), model)
        if not isinstance(given, tuple) or len(given) != 2:
            what = f"loss returns {described(given)}, but must return the sum of the losses and their number"
            raise culprit.error(what)
        loss = given[0]
        if not isinstance(loss, Tensor) or loss.dim():
            raise culprit.error(f"returns {described(loss)}, but a loss must be a 0-d Tensor")
        if not loss.requires_grad:
            tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            if tensors and not any(tensor.requires_grad for tensor in tensors):
                culprit = model
            what = f"returns {described(outputs if culprit is model else loss)} without a gradient"
            hint = "Leave out .detach(), .item(), .numpy(), torch.no_grad() and argmax on the way to the loss"
            raise culprit.error(f"{what}, so it cannot learn", hint)

    def _check_count(self, counted: Any, data: Any, num_samples: int) -> None:
        """Raise C017 if a user's task divides the gradient and the logged loss by different counts."""
        task: Any = self._run.task
        if is_ours(task):
            return
        stated = num_samples if getattr(task, "counts_samples", False) else task.count(data, num_samples)
        if stated is not None and not math.isclose(float(stated), float(counted), rel_tol=CLOSE):
            name = "counts_samples" if getattr(task, "counts_samples", False) else "count"
            what = f"loss returns a count of {float(counted):g}, but {name} returns {float(stated):g}"
            hint = "Make both agree, or make count return None to use the count of loss"
            raise UserPart("task", task).error(what, hint)

    def _check_parts(self, outputs: Any, data: Any) -> None:
        """Raise C017 if the losses of a step's parts do not add up to the loss of the whole."""
        run, task = self._run, self._run.task
        mixed = isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Mixed)
        if outputs is None or not (mixed or run.micro_batches > 1):
            return
        adapted, made = getattr(task, "adapted", None), getattr(task, "own_loss", None)
        targets = data[1].targets if mixed else data[1]
        if adapted is not None and (found := adapted.difference_of_parts(outputs, targets)):
            parts = "samples are mixed" if mixed else f"a step has {run.micro_batches} micro-batches"
            off = "augment.mixup=0 augment.cutmix=0" if mixed else "gradients.accumulate=1 parallel=single"
            hint = f"Have it return (sum, weight) or the loss of each sample, or set {off}"
            raise UserPart(LOSS, made).error(f"{found}, but {parts}", hint)


@dataclass
class SlowSwitches:
    """Warns once about torch's debugging aids that a user's code leaves on, except the run's own `debug`."""

    run: Run
    found: dict[str, str] = field(default_factory=dict)
    """Names of the aids that are on, by the value of `debug` for them."""

    def check(self) -> None:
        """Warn once about each aid that is on now. Cost: two calls."""
        for debug, (what, is_on) in SWITCHES.items():
            if debug not in self.found and debug != self.run.plan.debug and is_on():
                self.found[debug] = what
                advice = f"remove it, and use debug={debug} when you need it"
                self.run.display.warn(f"{what} is on, which slows down every step: {advice}")
