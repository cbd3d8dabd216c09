"""Metrics that a config adds to those of its task: from torchmetrics or the user's code, by import path."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ptfast.core import run_directory
from ptfast.core.errors import ConfigError, PtfastError, described, name_of, shorten, summary_of
from ptfast.core.protocols import DataInfo, Metrics, Task
from ptfast.core.sections.targets import Target, built, is_metric_function
from ptfast.core.tensors.trees import tree_leaves
from ptfast.tasks.ratios import Ratios, RatioTerms, update_metrics

_TASKS = {"classification": "multiclass", "multilabel": "multilabel", "token_classification": "multiclass"}


class MetricTable(NamedTuple):
    """The value of a metric that is not a single number, such as a matrix or a curve."""

    kind: str
    """Name of the metric's class."""
    value: Any
    """A tensor, or a nested structure of tensors."""


class Added:
    """The metrics of a task, combined with added ones.

    Args:
        added: metrics and collections of metrics, by the key of the config.
        labels: whether targets are 0/1 labels, which metrics accept only as integers.
    """

    def __init__(self, own: Metrics, added: Mapping[str, Any], *, labels: bool = False) -> None:
        self._own, self._added, self._labels = own, added, labels
        self.kinds: dict[str, dict[str, str]] = {}
        """For each added metric, by its key: the name of each value, and the class that computes it."""
        for name, metric in added.items():
            parts = metric.items() if hasattr(metric, "items") else [(name, metric)]
            self.kinds[name] = {each: type(part).__name__ for each, part in parts}
        if (keys := getattr(own, "keys", None)) is not None:
            self.keys = lambda: (*keys(), *itertools.chain(*self.kinds.values()))

    def to(self, device: Any) -> Added:
        added = {name: metric.to(device) for name, metric in self._added.items()}
        return Added(self._own.to(device), added, labels=self._labels)

    def modules(self) -> Iterator[Any]:
        """Yield the modules of torchmetrics."""
        for metric in (self._own, *self._added.values()):
            yield from getattr(metric, "modules", tuple)()

    def update(self, *given: Any, **named: Any) -> None:
        """Add a batch.

        Raises:
            ConfigError: C017 if an added metric does not accept it.
        """
        update_metrics(self._own, *given, **named)
        as_metrics_take = _laid_out(*given, labels=self._labels) if len(given) == 2 else given
        for name, metric in self._added.items():
            try:
                update_metrics(metric, *as_metrics_take, **named)
            except Exception as error:
                raise _failure(name, metric, "update", error, as_metrics_take) from error

    def compute(self) -> dict[str, Any]:
        """Return the values of all metrics: a number or a `MetricTable` each."""
        values = with_tables(self._own)
        for name, metric in self._added.items():
            try:
                given = metric.compute()
            except Exception as error:
                raise _failure(name, metric, "compute", error) from error
            for each, kind in self.kinds[name].items():
                value = given.get(each, given) if isinstance(given, dict) else given
                values[each] = _number_or_table(value, kind, f"metrics.{name}._target_", name_of(metric))
        return values


def with_tables(metrics: Metrics) -> dict[str, Any]:
    """Return the values of `metrics`: a number or a `MetricTable` each; C017 if a value has no numbers."""
    given, kinds = dict(metrics.compute()), dict(getattr(metrics, "items", dict)())
    for name, value in given.items():
        kind = type(kinds.get(name, metrics)).__name__
        given[name] = _number_or_table(value, kind, "task.metrics", name_of(metrics))
    return given


def _number_or_table(value: Any, kind: str, key: str, path: str) -> Any:
    if isinstance(value, MetricTable) or is_number(value):
        return value
    if not all(is_number(leaf) or hasattr(leaf, "tolist") for leaf in tree_leaves(value)):
        what = f"compute gives {described(value)}, where numbers are expected"
        raise ConfigError("C017", what, key=key, value=path)
    return MetricTable(kind, value)


def write_tables(
    run_dir: Path,
    split: str,
    step: int,
    tables: Mapping[str, MetricTable],
    class_names: Sequence[str] | None,
) -> None:
    """Write RUN_DIR/metrics/<split>.json for report.html, replacing the file of an earlier step.

    Raises:
        MachineError: E001 if it cannot be written.
    """
    folder = run_dir / run_directory.METRICS
    run_directory.create_folder(folder)
    metrics = {name: {"kind": kind, "values": as_lists(value)} for name, (kind, value) in tables.items()}
    content = {"step": step, "split": split, "class_names": class_names, "metrics": metrics}
    run_directory.write_json(folder / f"{split}.json", content)


def as_lists(value: Any) -> Any:
    """Return the value of a table as nested lists of numbers."""
    if isinstance(value, (list, tuple)):
        return [as_lists(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_lists(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def is_number(value: Any) -> bool:
    """Return True for a single real number from Python, NumPy or torch."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        float(value)
        return not isinstance(value, str)
    return False


def add_metrics(task: Task, targets: Mapping[str, Target], info: DataInfo) -> Task:
    """Add the config's metrics to those of `task`, with unset keywords filled from the data."""
    if not targets:
        return task
    facts = {
        "num_classes": info.num_classes or info.vocab_size,
        "num_labels": info.num_classes,
        "task": _TASKS.get(info.task),
        "ignore_index": info.ignore_index if info.ignores_labels else None,
    }
    own = task.metrics

    def metrics() -> Added:
        added: dict[str, Any] = {}
        for name, target in targets.items():
            try:
                if is_metric_function(target.resolve(), target.kwargs):
                    added[name] = _OfFunction(name, built(replace(target, partial=True), **facts))
                else:
                    added[name] = built(target, **facts)
            except Exception as error:
                raise _failure(name, target.resolve(), "its constructor", error) from error
        return Added(own(), added, labels=info.task == "multilabel")

    own_names = {*getattr(own(), "keys", tuple)()}
    for name, kinds in metrics().kinds.items():
        if taken := own_names & kinds.keys():
            what = f"the task has a metric {min(taken)} itself, which this one would replace"
            hint = f"Give it another name, such as metrics.own_{name}"
            raise ConfigError("C011", what, key=f"metrics.{name}", value=targets[name].path, suggestion=hint)
    task.metrics = metrics  # pyright: ignore[reportAttributeAccessIssue] # of this object alone
    task.adds_metrics = True  # pyright: ignore[reportAttributeAccessIssue]
    return task


class _OfFunction(Ratios):
    """A metric computed by a function of outputs and targets.

    The function may return a numerator and a denominator, a value per sample, or the mean of a batch.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        def parts(outputs: Tensor, targets: Tensor) -> RatioTerms:
            given = function(outputs, targets)
            if isinstance(given, tuple):
                return given
            if isinstance(given, Tensor) and given.dim():
                return given.sum(), given.numel()
            if not is_number(given):
                raise TypeError(f"gives {described(given)}, where numbers are expected")
            return given * len(targets), len(targets)

        super().__init__(**{name: parts})
        self.func = getattr(function, "func", function)


def _laid_out(outputs: Any, targets: Any, *, labels: bool) -> tuple[Any, Any]:
    """Return outputs in at least float32, and both in the shapes that metrics compare: (samples, classes)."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        return outputs, targets
    if outputs.is_floating_point():
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if labels:
        targets = targets.long()
    if outputs.dim() > 2 and outputs.shape[:-1] == targets.shape:
        return outputs.flatten(0, -2), targets.flatten()
    if outputs.shape != targets.shape and outputs.numel() == targets.numel():
        return outputs.reshape(targets.shape), targets
    return outputs, targets


def _failure(
    name: str, made: Any, doing: str, error: Exception, given: tuple[Any, ...] = ()
) -> ConfigError | PtfastError:
    if isinstance(error, PtfastError):
        return error
    of = f", of {' and '.join(map(described, given))}" if given else ""
    what = f"{doing} raises {shorten(summary_of(error), 300)}{of}"
    return ConfigError("C017", what, key=f"metrics.{name}._target_", value=name_of(made))
