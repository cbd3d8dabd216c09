"""Collating samples to a batch: by torch, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from ptfast.core.errors import DataError, described, name_of, summary_of
from ptfast.core.tensors.trees import map_tensors
from ptfast.data.loaders.sample_form import SampleForm, as_inputs
from ptfast.data.loaders.worker_processes import RAISED


class Collate:
    """Makes a batch of samples, by torch's `default_collate` or a user's function, at `key` of the config."""

    def __init__(self, function: Callable[[list[Any]], Any] | None, *, key: str, value: str) -> None:
        self.is_own = function is not None
        self._function, self.key, self._value = function or default_collate, key, value
        self.name = name_of(self._function)
        self.form: SampleForm | None = None
        """How samples are read as `(input, target)`; None where they are that, or a task's own."""
        self.casts = False
        """Inputs are cast to types that models take."""

    def pairs(self, samples: list[Any], numbers: Sequence[int]) -> list[Any]:
        """The samples `numbers` of a dataset in the form that this function takes."""
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
    """The function that collates a dataset: the `named` one, its own `collate_fn`, or torch's."""
    own = getattr(dataset, "collate_fn", None)
    return named or Collate(own if callable(own) else None, key="data._target_", value=name_of(dataset))
