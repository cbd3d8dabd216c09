"""A user's map-style dataset as a source of batches: read, seeded and collated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from ptfast.core.errors import DataError, described, name_of, summary_of
from ptfast.core.protocols import IGNORE_INDEX
from ptfast.core.tensors.trees import map_tensors
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.loaders.sample_form import SampleForm, as_inputs, check_labelled
from ptfast.data.loaders.worker_processes import RAISED, as_data_errors
from ptfast.data.map_source import MapSource
from ptfast.data.sampling import counter_draws
from ptfast.data.sampling.counter_draws import DatasetState, seeded
from ptfast.data.sampling.sampler import Indices


class Collate:
    """Collates samples by torch's `default_collate` or by the user's function at `key` of the config."""

    def __init__(self, function: Callable[[list[Any]], Any] | None, *, key: str, value: str) -> None:
        self.is_own = function is not None
        self._function, self.key, self._value = function or default_collate, key, value
        self.name = name_of(self._function)
        self.form: SampleForm | None = None
        """How samples are read as `(input, target)`; None if they already are, or are left to the task."""
        self.casts = False
        """Whether inputs are cast to types that models accept."""

    def pairs(self, samples: list[Any], numbers: Sequence[int]) -> list[Any]:
        """Return the samples `numbers` of a dataset in the form that the collate function expects."""
        form = self.form
        return samples if form is None else [form(*each) for each in zip(samples, numbers, strict=True)]

    def __call__(self, samples: list[Any]) -> Any:
        try:
            batch = self._function(samples)
        except RAISED as error:
            if self.is_own:
                given = f"given a list of {len(samples):,}, the first {described(samples[0])}"
                raise self._error(f"raises {summary_of(error)}, {given}") from error
            what = f"torch's default_collate cannot batch its samples: {summary_of(error)}"
            hint = "Name a function that does: data.collate=mine.collate"
            if "equal size" in str(error):
                hint = f"Bring images to one size with data.image_size=64, say. {hint}"
            raise self._error(what, hint) from error
        tensors: list[Any] = []
        map_tensors(tensors.append, batch)
        if self.is_own and not tensors:
            raise self._error(f"gives {described(batch)}, in which there is no tensor", "Return tensors")
        return (as_inputs(batch[0]), *batch[1:]) if self.casts else batch

    def _error(self, what: str, hint: str | None = None) -> DataError:
        method = "" if self.key == "data.collate" or not self.is_own else "its collate function "
        return DataError("D008", method + what, key=self.key, value=self._value, suggestion=hint)


def collate_of(dataset: Any, named: Collate | None = None) -> Collate:
    """Return the function that collates a dataset: `named`, its own `collate_fn`, or torch's."""
    own = getattr(dataset, "collate_fn", None)
    return named or Collate(own if callable(own) else None, key="data._target_", value=name_of(dataset))


class DatasetSource(MapSource):
    """A map-style dataset, collated as by torch's DataLoader or by a user's function.

    If the dataset has `lengths`, token sequences are padded with its `pad_id` (default 0), and targets with
    one label per token with -100. Global generators (torch, numpy, random) are seeded by epoch and batch,
    the dataset's own generators by epoch and sample: draws depend neither on resuming nor on the number of
    workers. If the dataset has `set_epoch`, it is called with the epoch in every process that reads it.
    """

    columns = ("_numbers", "lengths", "all_labels")
    crops_originals = False

    def __init__(
        self, dataset: Any, seed: int, *, images: bool = False, collate: Collate | None = None
    ) -> None:
        self.dataset, self.seed, self.images = dataset, seed, images
        self.collate = collate_of(dataset, collate)
        # True until every label has been seen.
        self.ignores_labels = True
        self.all_labels: Tensor | None = None
        self.seen_labels: Tensor | None = None
        """Labels of the samples that were read to find the classes."""
        self.state = DatasetState(dataset)
        stated = getattr(dataset, "lengths", None)
        self.lengths = None if stated is None else np.asarray(stated, np.int64)
        if self.lengths is not None and self.lengths.shape != (len(dataset),):
            what = f"its lengths are of {len(self.lengths):,} samples, and it has {len(dataset):,}"
            raise DataError("D008", what, key="data")
        self._longest = 0 if self.lengths is None else int(self.lengths.max(initial=0))
        self._numbers = np.arange(len(dataset))
        self.pad_id = int(getattr(dataset, "pad_id", None) or 0)

    def known_labels(self) -> Tensor | None:
        return self.all_labels

    def contents(self) -> list[Any]:
        labels = getattr(self.dataset, "targets", None)
        with contextlib.suppress(Exception):
            labels = np.asarray(labels)
        known = [array for array in (labels, self.lengths) if isinstance(array, np.ndarray)]
        return describe_part(len(self), "samples", getattr(self.dataset, "fingerprint", None), *known)

    def fetch(self, indices: Indices, epoch: int = 0) -> Any:
        wanted = self._numbers[indices].tolist()
        with seeded(counter_draws.key(self.seed, epoch, counter_draws.GLOBAL, *wanted[:1])):
            samples = self.collate.pairs(self._read(wanted, epoch), wanted)
            if self.lengths is not None and not self.collate.is_own:
                samples = self._filled(samples)
            try:
                raw = self.collate(samples)
            except DataError:
                check_labelled(samples, wanted)
                raise
        raw = self.label_check(raw, wanted)
        if self.images:
            return (raw[0].permute(0, 2, 3, 1).contiguous(), *raw[1:])
        return raw

    def read(self, wanted: list[int]) -> list[Any]:
        """Return the samples `wanted` as the dataset returns them, without advancing global generators."""
        with seeded(counter_draws.key(self.seed, 0, counter_draws.GLOBAL, *wanted[:1])):
            return self._read(wanted, 0)

    def _read(self, wanted: list[int], epoch: int) -> list[Any]:
        with as_data_errors(self.dataset):
            has_generators = self.state.begin(epoch)
            if hasattr(self.dataset, "__getitems__"):
                self.state.seed(self.seed, epoch, *wanted[:1])
                return self.dataset.__getitems__(wanted)
            if not has_generators:
                return [self.dataset[i] for i in wanted]
            samples: list[Any] = []
            for number in wanted:
                self.state.seed(self.seed, epoch, number)
                samples.append(self.dataset[number])
            return samples

    def _filled(self, samples: list[Any]) -> list[Any]:
        """Pad samples to one length if they are `(tokens, target)` pairs."""
        first = samples[0]
        is_pair = isinstance(first, (tuple, list)) and len(first) == 2
        if not is_pair or not is_tokens(torch.as_tensor(first[0])):
            return samples
        longest = max(len(tokens) for tokens, _ in samples)
        if longest > self._longest:
            what = f"a sample has {longest} tokens, where the longest of its lengths is {self._longest}"
            raise DataError("D008", what, key="data")
        width = self.padding.width(longest, self._longest)
        filled: list[Any] = []
        for tokens, target in samples:
            missing = (0, width - len(tokens))
            if np.shape(target) == np.shape(tokens):
                target = F.pad(torch.as_tensor(target), missing, value=IGNORE_INDEX)
            filled.append((F.pad(torch.as_tensor(tokens), missing, value=self.pad_id), target))
        return filled


def is_tokens(sample: Any) -> bool:
    return isinstance(sample, Tensor) and sample.dim() == 1 and not sample.is_floating_point()
