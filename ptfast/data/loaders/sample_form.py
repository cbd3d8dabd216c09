"""How samples of a user's dataset are understood: decided once from the first ones, said in a note each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Names by which samples with names hold their target."""
_CHANNELS = (1, 3, 4)


class InputOptions(NamedTuple):
    """What else decides how samples are read."""

    parameters: Sequence[str] | None = None
    """Names that the model's `forward` takes; None if unknown."""
    image_size: int | None = None
    """Side of the square that images are brought to."""


AS_GIVEN = InputOptions()


@dataclass(frozen=True)
class SampleForm:
    """Reads samples of one dataset as `(input, target)`."""

    inputs: tuple[str, ...] = ()
    """Names of the inputs; none where samples have their parts by position."""
    by_name: bool = False
    """The model takes inputs by these names."""
    target: str | int = 1
    has_images: bool = False
    """Some inputs are PIL images, arrays of uint8 with the channels last, or images to resize."""
    image_size: int | None = None
    classes: tuple[str, ...] | None = None
    """The classes that texts name, by number."""
    notes: tuple[str, ...] = ()
    numbers: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers.update({name: number for number, name in enumerate(self.classes or ())})

    def __call__(self, sample: Any, number: int) -> tuple[Any, Any]:
        """The input and the target of sample `number`; D004 for a label that is missing or unknown."""
        if self.inputs:
            parts = parts_of(sample)
            target = parts[str(self.target)]
            inputs = parts[self.inputs[0]]
            if self.by_name:
                inputs = NamedInputs({name: parts[name] for name in self.inputs})
        else:
            inputs, target = sample[0], sample[1]
        if self.has_images:
            inputs = map_images(inputs, self.image_size, number)
        if is_missing(target):
            raise missing(number, target)
        if self.classes is not None and target not in self.numbers:
            what = f"the label of sample {number:,} is {described(target)}, and no class of training"
            if isinstance(target, str):
                what = f"the label {target!r} of sample {number:,} is no class of training"
            hint = f"Classes are {', '.join(self.classes[:10])}; an attribute `classes` names all"
            raise DataError("D004", what, key="data", suggestion=hint)
        return inputs, target if self.classes is None else self.numbers[target]


def form_of(sample: Any, options: InputOptions = AS_GIVEN) -> SampleForm | None:
    """How samples like this one are read; None where they are `(input, target)` pairs of tensors or numbers.

    Raises:
        DataError: D004 for samples with names none or several of which are a target's.
        ConfigError: C011 for a size of images where there are none.
    """
    parameters, size = options
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
    by_name = len(names) > 1 or bool(names and parameters and names[0] in parameters[1:])
    form = SampleForm(names, by_name, target)
    inputs, label = form(sample, 0)
    values = inputs.values() if isinstance(inputs, dict) else [inputs]
    images = any(is_image_like(value) or (size is not None and _is_pixels(value)) for value in values)
    if images:
        notes.append("images become uint8 tensors, channels first")
    elif size is not None:
        what = f"its inputs are no images of uint8: each is {described(inputs)}"
        raise ConfigError("C011", what, key="data.image_size", value=size)
    if not notes and not isinstance(label, str):
        return None
    return dataclasses.replace(form, has_images=images, image_size=size, notes=tuple(notes))


def parts_of(sample: Any) -> Mapping[str, Any]:
    """The parts of a mapping, a dataclass or a named tuple by name."""
    if isinstance(sample, Mapping):
        return sample
    return sample._asdict() if hasattr(sample, "_fields") else vars(sample)


def left_out(count: int) -> list[str]:
    """The note on samples of more than two parts."""
    return [f"of {count} parts of a sample, the first is the input, the second the target"] * (count > 2)


def text_classes(labels: Iterable[tuple[int, Any]]) -> tuple[str, ...]:
    """The names among text labels, in order; D004 names a sample without one."""
    names: list[str] = []
    for number, label in labels:
        if is_missing(label):
            raise missing(number, label)
        if not isinstance(label, str):
            what = f"labels are texts, and that of sample {number:,} is {described(label)}"
            raise DataError("D004", what, key="data", suggestion="Give all labels one type")
        names.append(str(label))
    return number_names({"train": names})[0]["class_names"]


def check_labelled(samples: Any, numbers: Any) -> None:
    """Raise DataError D004 for the first of samples, or labels, without a label."""
    if isinstance(samples, Tensor):
        wrong = samples.isnan().reshape(len(samples), -1).any(1).nonzero()[:1, 0]
        numbers, samples = [numbers[place] for place in wrong], [(None, math.nan)] * len(wrong)
    for number, sample in zip(numbers, samples, strict=False):
        if isinstance(sample, (tuple, list)) and len(sample) > 1 and is_missing(sample[1]):
            raise missing(number, sample[1])


def is_missing(label: Any) -> bool:
    return label is None or (isinstance(label, float) and math.isnan(label))


def missing(number: int, label: Any) -> DataError:
    """The error for a sample without a label."""
    what = f"sample {number:,} has no label: it is {label}"
    return DataError("D004", what, key="data", suggestion="Leave such samples out, or label them")


def is_image_like(value: Any) -> bool:
    """Return True for a PIL image, or an array of uint8 with the channels last."""
    if isinstance(value, np.ndarray):
        last = value.ndim == 3 and value.shape[2] in _CHANNELS and value.shape[0] not in _CHANNELS
        return last and value.dtype == np.uint8
    return hasattr(value, "getbands") and hasattr(value, "convert")


def _is_pixels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and value.dtype == torch.uint8


def map_images(value: Any, size: int | None, number: int) -> Any:
    """`value`, of sample `number`, with its images as uint8 tensors, channels first, in squares of `size`."""
    if isinstance(value, dict):
        return type(value)({name: map_images(item, size, number) for name, item in value.items()})
    if isinstance(value, np.ndarray):
        pixels = torch.from_numpy(np.ascontiguousarray(value))
    elif is_image_like(value):
        try:
            pixels = rgb_pixels(value)
        except UnknownScaleError as error:
            hint = "Convert it to 8 bits in the dataset"
            raise DataError("D005", f"image {number:,} {error}", key="data", suggestion=hint) from None
    elif size is not None and _is_pixels(value):
        pixels = value.permute(1, 2, 0)
    else:
        return value
    pixels = pixels if size is None else in_square(pixels, size)
    return pixels.permute(2, 0, 1).contiguous()


def as_inputs(inputs: Any) -> Any:
    """Inputs in types that models take: torch's default type for other floats, int64 for odd whole numbers.

    A bool input becomes a float, too, unless it stands beside others, where it is a mask.
    """
    return map_tensors(partial(_plain, alone=isinstance(inputs, Tensor)), inputs)


def _plain(part: Any, *, alone: bool) -> Any:
    if not isinstance(part, Tensor):
        return part
    part = part.detach() if part.requires_grad else part
    if part.is_floating_point() or (part.dtype == torch.bool and alone):
        return part.to(torch.get_default_dtype())
    if part.is_complex() or part.dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        return part
    return signed(part).long()


def converted_types(inputs: Any) -> list[str]:
    """The types among inputs that `as_inputs` converts, in words for a note."""
    pairs = zip(tensors_in(inputs), tensors_in(as_inputs(inputs)), strict=True)
    kinds = {(before.dtype, after.dtype) for before, after in pairs if before.dtype != after.dtype}
    return [
        f"{one} inputs are cast to {other}".replace("torch.", "") for one, other in sorted(kinds, key=str)
    ]


def _is_numeric(value: Any) -> bool:
    plain = (bool, int, float, np.generic, np.ndarray, Tensor)
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_numeric, value))
    return isinstance(value, plain) or is_image_like(value)
