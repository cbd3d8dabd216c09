"""Infers the form of a user's samples from the first ones, with a note for each decision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, DataError, described
from ptfast.core.protocols import NamedInputs
from ptfast.core.tensors.trees import map_tensors, tensors_in
from ptfast.data.decoding.pictures import UnknownScaleError, in_square, rgb_pixels
from ptfast.data.label_checks import number_names, signed

TARGET_NAMES = ("label", "labels", "target", "targets", "y")
"""Names of the target in samples with named parts."""
_CHANNELS = (1, 3, 4)
_LABELS = (int, float, str, bytes, np.generic, np.ndarray, Tensor, list, tuple, Mapping)


class InputOptions(NamedTuple):
    """Other options that decide how samples are read."""

    parameters: Sequence[str] | None = None
    """Parameter names of the model's `forward`; None if unknown."""
    by_position: int = 1
    """How many of them are passed by position: 1, or 0 if `forward` takes keywords only."""
    image_size: int | None = None
    """Side in pixels of the square to which images are resized."""


AS_GIVEN = InputOptions()


@dataclass(frozen=True)
class SampleForm:
    """Reads samples of one dataset as `(input, target)`."""

    inputs: tuple[str, ...] = ()
    """Names of the inputs; empty if samples are tuples or lists."""
    by_name: bool = False
    """Whether inputs are passed to the model by these names."""
    target: str | int = 1
    converts: bool = False
    """Whether some inputs are images, or numbers in a form that torch does not collate."""
    image_size: int | None = None
    classes: tuple[str, ...] | None = None
    """Class names of text labels, by number."""
    notes: tuple[str, ...] = ()
    numbers: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers.update({name: number for number, name in enumerate(self.classes or ())})

    def __call__(self, sample: Any, number: int) -> tuple[Any, Any]:
        """Return the input and target of sample `number`; raise D004 for a missing or unknown label."""
        if self.inputs:
            parts = parts_of(sample)
            target = parts[str(self.target)]
            inputs = parts[self.inputs[0]]
            if self.by_name:
                inputs = NamedInputs({name: parts[name] for name in self.inputs})
        else:
            inputs, target = sample[0], sample[1]
            inputs = NamedInputs(inputs) if self.by_name else inputs
        if self.converts:
            inputs = converted(inputs, self.image_size, number)
            target = as_array(target, number) if is_row(target) else target
        if is_missing(target):
            raise missing(number, target)
        if self.classes is None:
            return inputs, target
        if (name := text_of(target)) not in self.numbers:
            label = described(target) if name is None else repr(name)
            what = f"the label {label} of sample {number:,} is no class of training"
            hint = f"Classes are {', '.join(self.classes[:10])}; an attribute `classes` names all"
            raise DataError("D004", what, key="data", suggestion=hint)
        return inputs, self.numbers[name]


def form_of(sample: Any, options: InputOptions = AS_GIVEN) -> SampleForm | None:
    """Return how samples like this one are read; None for `(input, target)` pairs of tensors or numbers.

    Raises:
        DataError: D004 for samples with named parts if none, or several, of the names stand for a target.
        ConfigError: C011 for an image size if the inputs are not images.
    """
    parameters, by_position, size = options
    notes: list[str] = []
    names: tuple[str, ...] = ()
    target: str | int = 1
    if isinstance(sample, Mapping) or dataclasses.is_dataclass(sample) or hasattr(sample, "_fields"):
        parts = parts_of(sample)
        found = [name for name in TARGET_NAMES if name in parts]
        if len(found) == 1:
            target = found[0]
            others = [name for name in parts if name != target]
            taken = [name for name in others if parameters is not None and name in parameters]
            names = tuple(taken or [name for name in others if _is_numeric(parts[name])])
            if parameters is not None and len(names) > 1 and not taken:
                what = f"samples have the inputs {', '.join(map(str, names))}"
                what += f", and the model's forward takes {', '.join(parameters)}"
                raise DataError("D004", what, key="data", suggestion="Give them the same names")
            left = [str(name) for name in others if name not in names]
            notes.append(f"{target} is the target, {', '.join(map(str, names))} the input")
            notes += [f"{', '.join(left)} left out"] if left else []
        if len(found) > 1 or (found and not names) or not (found or hasattr(sample, "_fields")):
            what = f"samples have the parts {', '.join(map(str, parts))}"
            which = f"{' and '.join(found)} may be the target" if found else "none is named as a target"
            what += f", and {which if len(found) != 1 else 'none of the others is a number or tensor'}"
            hint = f"Name one of them {' or '.join(TARGET_NAMES)}, or set a task of your own: task=mine.Task"
            raise DataError("D004", what, key="data", suggestion=hint)
    if not names:
        if not isinstance(sample, (tuple, list)) or len(sample) < 2:
            return None
        notes += left_out(len(sample))
    by_name = len(names) > 1 or bool(names and parameters and names[0] in parameters[by_position:])
    inputs, label = SampleForm(names, by_name, target)(sample, 0)
    if not names and isinstance(inputs, dict) and len(inputs) > by_position:
        by_name = parameters is not None and all(name in parameters for name in inputs)
        notes += [f"inputs go to forward's {', '.join(inputs)}"] if by_name else []
    form = SampleForm(names, by_name, target)
    values = [*_parts(inputs)]
    images = any(is_image_like(value) or (size is not None and _is_pixels(value)) for value in values)
    converts = images or is_row(label) or any(map(_needs_array, values))
    if converts and any(map(is_row, (*values, label))):
        notes.append("lists of numbers become tensors")
    if images:
        notes.append("images become uint8 tensors, channels first")
    elif size is not None:
        what = f"its inputs are no images of uint8: each is {described(inputs)}"
        raise ConfigError("C011", what, key="data.image_size", value=size)
    if not notes and not converts and text_of(label) is None:
        return None
    return dataclasses.replace(form, converts=converts, image_size=size, notes=tuple(notes))


def parts_of(sample: Any) -> Mapping[str, Any]:
    """Return the parts of a mapping, a dataclass or a named tuple by name."""
    if dataclasses.is_dataclass(sample):
        return {each.name: getattr(sample, each.name) for each in dataclasses.fields(sample)}
    return sample._asdict() if hasattr(sample, "_fields") else {**sample}


def left_out(count: int) -> list[str]:
    """Return the note on samples of more than two parts."""
    return [f"of {count} parts of a sample, the first is the input, the second the target"] * (count > 2)


def text_classes(labels: Iterable[tuple[int, Any]]) -> tuple[str, ...]:
    """Return the sorted class names among text labels; raise D004 for a sample without a text label."""
    names: list[str] = []
    for number, label in labels:
        if is_missing(label):
            raise missing(number, label)
        if (name := text_of(label)) is None:
            raise _other_type("texts", number, label)
        names.append(name)
    return number_names({"train": names})[0]["class_names"]


def text_of(label: Any) -> str | None:
    """Return the class name given by a string, bytes or an Enum member; None for other labels."""
    if isinstance(label, Enum) and not isinstance(label, int):
        return label.name
    if isinstance(label, np.ndarray) and label.ndim == 0 and label.dtype.kind in "US":
        label = label.item()
    if isinstance(label, bytes):
        return label.decode(errors="backslashreplace")
    return str(label) if isinstance(label, str) else None


def _other_type(usual: str, number: int, label: Any) -> DataError:
    what = f"labels are {usual}, and that of sample {number:,} is {described(label)}"
    return DataError("D004", what, key="data", suggestion="Give all labels one type")


def check_labelled(samples: Any, numbers: Any) -> None:
    """Raise DataError D004 for the first sample, or label, that is missing or of another type."""
    if isinstance(samples, Tensor):
        wrong = samples.isnan().reshape(len(samples), -1).any(1).nonzero()[:1, 0]
        numbers, samples = [numbers[place] for place in wrong], [(None, math.nan)] * len(wrong)
    for number, sample in zip(numbers, samples, strict=False):
        if not isinstance(sample, (tuple, list)) or len(sample) < 2:
            continue
        if is_missing(sample[1]):
            raise missing(number, sample[1])
        is_text = text_of(sample[1]) is not None and text_of(samples[0][1]) is None
        if is_text or not (isinstance(sample[1], (*_LABELS, Enum)) or hasattr(sample[1], "to")):
            raise _other_type("numbers or texts", number, sample[1])


def is_missing(label: Any) -> bool:
    is_nan = isinstance(label, (float, np.floating)) and math.isnan(label)
    return label is None or is_nan or type(label).__name__ in ("NAType", "NaTType")


def missing(number: int, label: Any) -> DataError:
    """Return the error for a sample without a label."""
    what = f"sample {number:,} has no label: it is {label}"
    return DataError("D004", what, key="data", suggestion="Leave such samples out, or label them")


def is_image_like(value: Any) -> bool:
    """Return True for a PIL image, or a uint8 array with the channels last."""
    if isinstance(value, np.ndarray):
        last = value.ndim == 3 and value.shape[2] in _CHANNELS and value.shape[0] not in _CHANNELS
        return last and value.dtype == np.uint8
    return hasattr(value, "getbands") and hasattr(value, "convert")


def _is_pixels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.dtype == torch.uint8


def is_row(value: Any) -> bool:
    """Return True for a list or tuple of plain numbers."""
    numbers = (bool, int, float, np.number)
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, numbers) for v in value)


def _needs_array(value: Any) -> bool:
    """Return True for numbers in a form that torch does not collate, or not without a warning."""
    if not isinstance(value, np.ndarray):
        return is_row(value) or hasattr(value, "to_numpy")
    plain = value.dtype.isnative and value.flags.writeable and value.dtype != object
    return not plain or min(value.strides, default=0) < 0


def as_array(value: Any, number: int) -> Any:
    """Return the numbers of sample `number` as an array that torch collates; raise D005 for other values."""
    array = np.asarray(value)
    try:
        kind = np.dtype(np.float64) if array.dtype == object else array.dtype.newbyteorder("=")
        return np.array(array, kind, order="C")
    except (TypeError, ValueError) as error:
        what = f"the input of sample {number:,} contains something other than numbers: {error}"
        raise DataError("D005", what, key="data", suggestion="Leave such columns out") from None


def _parts(inputs: Any) -> Iterable[Any]:
    """Return the leaves of nested inputs; a list of numbers is one leaf."""
    if isinstance(inputs, dict):
        inputs = [*inputs.values()]
    if not isinstance(inputs, (list, tuple)) or is_row(inputs):
        return [inputs]
    return [part for each in inputs for part in _parts(each)]


def converted(value: Any, size: int | None, number: int) -> Any:
    """Convert `value` of sample `number` to arrays, and images to uint8 tensors; `size` makes them square."""
    if isinstance(value, dict):
        return type(value)({name: converted(item, size, number) for name, item in value.items()})
    if isinstance(value, (list, tuple)) and not is_row(value):
        make = getattr(type(value), "_make", type(value))
        return make([converted(item, size, number) for item in value])
    if _needs_array(value):
        value = as_array(value, number)
    if isinstance(value, np.ndarray) and is_image_like(value):
        pixels = torch.from_numpy(np.ascontiguousarray(value))
    elif is_image_like(value):
        try:
            pixels = rgb_pixels(value)
        except UnknownScaleError as error:
            hint = "Convert it to 8 bits in the dataset"
            raise DataError("D005", f"image {number:,} {error}", key="data", suggestion=hint) from None
    elif size is not None and isinstance(value, Tensor) and _is_pixels(value):
        pixels = value.permute(1, 2, 0)
    else:
        return value
    pixels = pixels if size is None else in_square(pixels, size)
    return pixels.permute(2, 0, 1).contiguous()


def as_inputs(inputs: Any) -> Any:
    """Cast inputs to types that models accept: floats to torch's default type, unusual integers to int64.

    A single bool input becomes a float; among other inputs it stays a bool mask.
    """
    return map_tensors(partial(_plain, alone=isinstance(inputs, Tensor)), inputs)


def _plain(part: Any, *, alone: bool) -> Any:
    if not isinstance(part, Tensor):
        return part
    part = part.detach() if part.requires_grad else part
    if part.is_floating_point() or (part.dtype == torch.bool and alone):
        return part.to(torch.get_default_dtype())
    if part.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        return part
    if part.is_complex() or (part.dtype == torch.uint16 and part.dim() > 3):
        what, hint = "images are of 16 bits", "Convert them to 8 bits, or to floats from 0 to 1"
        if part.is_complex():
            what, hint = "inputs are complex numbers", "Give two real ones each: torch.view_as_real"
        raise DataError("D005", what, key="data", suggestion=hint)
    return signed(part).long()


def converted_types(inputs: Any) -> list[str]:
    """Return which input types `as_inputs` converts, in words for a note."""
    pairs = zip(tensors_in(inputs), tensors_in(as_inputs(inputs)), strict=True)
    kinds = {(before.dtype, after.dtype) for before, after in pairs if before.dtype != after.dtype}
    return [
        f"{one} inputs are cast to {other}".replace("torch.", "") for one, other in sorted(kinds, key=str)
    ]


def _is_numeric(value: Any) -> bool:
    plain = (bool, int, float, np.generic, np.ndarray, Tensor)
    if isinstance(value, (list, tuple, dict)):
        return bool(value) and all(map(_is_numeric, _parts(value)))
    return isinstance(value, plain) or is_image_like(value) or hasattr(value, "to_numpy")
