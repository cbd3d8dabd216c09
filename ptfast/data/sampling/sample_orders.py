"""Orders of samples other than a plain shuffle: drawn by weight, or by a user's function or sampler."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ptfast.core.errors import ConfigError, DataError, PtfastError, described, summary_of
from ptfast.core.sections.targets import Target, keywords
from ptfast.data.dataset import Data
from ptfast.data.map_source import MapSource
from ptfast.data.sampling import Sampling, counter_draws
from ptfast.data.sampling.counter_draws import seeded
from ptfast.data.sampling.sampler import Indices

Weights = NDArray[np.float64]


def weighted(
    seed: int,
    epoch: int,
    num_samples: int,
    labels: NDArray[np.int64] | None = None,
    weights: Weights | None = None,
    by: Literal["auto", "classes", "weights"] = "auto",
) -> Indices:
    """Draw the `num_samples` samples of an epoch in proportion to their weights, with replacement.

    Args:
        labels: class of each sample; samples with labels below 0 are never drawn.
        weights: weight of each sample, finite and at least 0, with a sum above 0.
        by: `classes`: every class equally often; `weights`: the dataset's attribute `weights`; `auto`:
            `weights` if the dataset has that attribute, else `classes`.

    Cost: one binary search per sample and epoch, about 0.2 s for a million samples.
    """
    if _goes_by(by, weights) == "classes":
        assert labels is not None
        classes, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
        weights = np.where(classes >= 0, 1 / counts, 0.0)[places]
    assert weights is not None
    rising = np.cumsum(weights)
    draws = counter_draws.uniform(seed, epoch, np.arange(num_samples), counter_draws.ORDER)
    # Rounding may move the last draw past the last sample.
    last = int(np.flatnonzero(weights)[-1])
    return np.minimum(np.searchsorted(rising, draws * rising[-1], side="right"), last)


def build_order(sampling: Sampling, data: Data, seed: int) -> Callable[[int, int], Indices | None]:
    """Return the function of (seed, epoch) that orders the training samples of an epoch.

    A user's function is called for each epoch with the arguments that it takes among `seed`, `epoch`,
    `num_samples`, `labels` and `weights`; a torch sampler is built once and iterated for each epoch. Both run
    with global generators seeded by (seed, epoch). The first epoch is drawn twice, to check repeatability.

    Raises:
        ConfigError: C011 for data that is read in its own order or has no classes, C017 for a function that
            does not return an order of all samples, or not the same one for the same epoch.
        DataError: D008 for invalid weights.
    """
    target, train = sampling.target, data.train
    if target is None:
        return data.order
    if not isinstance(train, MapSource):
        what, hint = "a stream is read in the order that it comes in", "Use sampling=shuffle"
        raise ConfigError("C011", what, key="sampling", value=target.path, suggestion=hint)
    function = target.resolve()
    facts: dict[str, Any] = {"num_samples": len(train), "data_source": range(len(train))}
    takes = keywords(function).keys() - target.kwargs.keys()
    if "weights" in takes and target.kwargs.get("by") != "classes":
        facts["weights"] = data.weights()
    if "labels" in takes and data.info.task == "classification" and data.info.target_kind == "whole":
        labels = train.known_labels()
        facts["labels"] = None if labels is None else labels.numpy()
    if function is weighted:
        by = target.kwargs.get("by", "auto")
        wanted, lack = "weights", "has no attribute `weights`"
        if _goes_by(by, facts.get("weights")) == "classes":
            wanted, lack = "labels", "has no classes that are known beforehand"
        if facts.get(wanted) is None:
            hint = "Give the dataset an attribute `weights`, one number per sample, or use sampling=shuffle"
            raise ConfigError("C011", f"this data {lack}", key="sampling.by", value=by, suggestion=hint)
        return partial(target.build, **facts)
    order = OwnOrder(target, function, facts)
    if not np.array_equal(order(seed, 0), order(seed, 0)):
        order.reject(
            "gives another order for the same seed and epoch, so that no run could be resumed",
            "Draw from numpy.random.default_rng((seed, epoch))",
        )
    return order


def describe_sampling(sampling: Sampling, data: Data) -> str | None:
    """Describe the order for the panel; None if each sample is used once."""
    target = sampling.target
    if target is None or target.resolve() is not weighted:
        return target and target.path
    by = _goes_by(target.kwargs.get("by", "auto"), data.weights())
    return "each class as often as any other" if by == "classes" else "by the weights of the dataset"


def checked_weights(dataset: Any, kept: Indices | None = None) -> Weights | None:
    """Return a dataset's `weights` for the samples `kept` (None for all), checked; None if it has none."""
    stated = getattr(dataset, "weights", None)
    if stated is None:
        return None
    try:
        weights = np.asarray(stated, np.float64)
    except (TypeError, ValueError):
        _reject_weights(dataset, f"are {described(stated)}, where a number for each sample is due")
    if weights.shape != (len(dataset),):
        shape = "x".join(map(str, weights.shape)) or "no"
        _reject_weights(dataset, f"are {shape} numbers, and it has {len(dataset):,} samples")
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        first = int(wrong.argmax())
        _reject_weights(dataset, f"contain {weights[first]:g} for sample {first}, where 0 or more is due")
    weights = weights if kept is None else weights[kept]
    if not weights.sum() > 0:
        _reject_weights(dataset, "sum to zero over the training samples")
    return weights


def _reject_weights(dataset: Any, what: str) -> NoReturn:
    hint = "Fix them, or use sampling.by=classes or sampling=shuffle"
    raise DataError("D008", f"the weights of {type(dataset).__name__} {what}", key="data", suggestion=hint)


def _goes_by(by: str, weights: Weights | None) -> str:
    return ("classes" if weights is None else "weights") if by == "auto" else by


class OwnOrder:
    """An order of samples from a user's function or a torch sampler, checked in every epoch."""

    def __init__(self, target: Target, function: Any, facts: dict[str, Any]) -> None:
        self._target, self._size = target, facts["num_samples"]
        self._facts, self._sampler = facts, None
        if inspect.isclass(function):
            with self._calling("its constructor"):
                self._sampler: Any = target.build(**facts)

    def __call__(self, seed: int, epoch: int) -> Indices:
        draws = seeded(counter_draws.key(seed, epoch, counter_draws.ORDER))
        with draws, self._calling(f"in epoch {epoch} it"):
            if self._sampler is None:
                given = self._target.build(seed=seed, epoch=epoch, **self._facts)
            else:
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(epoch)
                given = list(self._sampler)
        try:
            order = np.asarray(given)
        except ValueError:
            order = np.empty(0, object)
        if order.ndim != 1 or order.dtype.kind not in "iu":
            self.reject(f"gives {described(given)}, where the numbers of samples are due, in their order")
        if len(order) != self._size:
            self.reject(f"gives {len(order):,} places, and an epoch has {self._size:,} samples")
        if (strange := order[(order < 0) | (order >= self._size)]).size:
            self.reject(f"names sample {strange[0]}, and they are numbered from 0 to {self._size - 1:,}")
        return order.astype(np.int64)

    @contextlib.contextmanager
    def _calling(self, when: str) -> Iterator[None]:
        """Reject the function or sampler if it raises."""
        try:
            yield
        except PtfastError:
            raise
        except Exception as error:
            self.reject(f"{when} raises {summary_of(error)}", cause=error)

    def reject(self, what: str, hint: str | None = None, cause: Exception | None = None) -> NoReturn:
        raise ConfigError(
            "C017", what, key="sampling._target_", value=self._target.path, suggestion=hint
        ) from cause
