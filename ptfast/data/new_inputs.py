"""Reads new inputs for prediction in the same way as the training data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ptfast.core.errors import DataError, described
from ptfast.core.protocols import DataInfo
from ptfast.data.decoding.image_decoding import decode_file, fit
from ptfast.data.decoding.text_tokenizer import read_tokenizer
from ptfast.data.loaders.pipeline import LoaderOptions, Prepare
from ptfast.data.map_source import as_tensor
from ptfast.data.sources.arrays import as_inputs, read_arrays
from ptfast.data.sources.class_folders import PassedOver, image_files
from ptfast.data.sources.text_files import read_texts
from ptfast.data.tables.columns import read_columns
from ptfast.data.tables.preparation import Preparation

Named = tuple[str, Tensor]
"""A name that tells the user which input it is, and the input without batch dimension."""


class Text(str):
    """A text to predict for; any other string is a path."""


def read_inputs(
    info: DataInfo,
    given: Sequence[Any],
    *,
    device: torch.device,
    channels_last: bool = False,
    normalize: bool = True,
    batch_size: int = 64,
    skip: Callable[[DataError], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[list[str], Tensor]]:
    """Read files as model inputs: images, `.npy` or `.npz` arrays, or text with one input per line.

    Args:
        info: facts of the run's data; `extra` contains shapes, statistics and vocabulary.
        given: paths, `Text`s, PIL images, or arrays or tensors of one or several inputs; for a model of
            tables also one mapping per row.
        skip: called with the error of an unreadable image, which is left out; None to raise the error.
        note: called with a remark on files that are skipped in folders.

    Yields:
        Names, and inputs on `device`, of up to `batch_size` samples: (batch, channels, height, width)
        float32 for images, (batch, features) float32, or (batch, tokens) int64, padded. Running text is
        yielded one input at a time, without padding.

    Raises:
        DataError: D001 for a path that does not exist, D005 for a file that is unreadable or does not fit.
    """
    kind, extra = info.kind, info.extra
    if "table" in extra:
        named = _each_table_row(extra["table"], given)
    elif all(hasattr(each, "dtype") for each in given):
        named = _each_array(info, given)
    elif kind == "image":
        named = _each_image(info, _files(given, note), skip)
    elif kind == "features":
        named = (pair for path in _paths(given) for pair in _each_row(path, images=False))
    elif kind in ("text", "tokens") and "tokenizer" in extra:
        named = _each_line(extra, given)
    else:
        what = "data of your own cannot be read from files"
        raise DataError("D005", what, key="data", suggestion="Give arrays: ptfast.predict(RUN, array)")
    options = LoaderOptions(device, normalize, channels_last, pin=False)
    while batch := list(islice(named, 1 if kind == "tokens" else batch_size)):
        names, inputs = [name for name, _ in batch], [sample for _, sample in batch]
        if kind in ("text", "tokens"):
            stacked = pad_sequence(inputs, batch_first=True, padding_value=extra.get("pad_id", 0))
        else:
            for name, sample in batch:
                expected = _sample_shape(info, sample.dtype == torch.uint8)
                if expected is not None and list(sample.shape) != expected:
                    what = f"has shape {list(sample.shape)}, the model takes {expected}"
                    raise DataError("D005", what, key=name)
            stacked = torch.stack(inputs)
        images = kind == "image" and stacked.dtype == torch.uint8
        yield names, Prepare(options, info, images=images).inputs(stacked)


def _sample_shape(info: DataInfo, channels_last: bool) -> list[int] | None:
    """Return the shape of one input as it is given; None if the data does not state it."""
    shape = list(info.extra.get("input_shape") or info.input_shape or ())
    return ([*shape[1:], shape[0]] if len(shape) == 3 and channels_last else shape) or None


def _each_array(info: DataInfo, arrays: Sequence[Any]) -> Iterator[Named]:
    """Yield the inputs in arrays or tensors, each of which contains one or several."""
    number = 0
    for array in arrays:
        inputs = torch.as_tensor(array).detach().cpu()
        images = info.kind == "image" and inputs.dtype == torch.uint8
        if info.kind in ("image", "features") and not images:
            inputs = inputs.float()
        shape = _sample_shape(info, images)
        alone = shape is not None and inputs.numel() == math.prod(shape) and inputs.dim() <= len(shape)
        inputs = inputs.reshape(1, *shape) if alone and shape is not None else inputs
        if images:
            inputs, _ = as_inputs(inputs.numpy(), "inputs")
        for sample in inputs:
            yield f"[{number}]", sample
            number += 1


def _each_image(
    info: DataInfo, given: Iterator[Any], skip: Callable[[DataError], None] | None
) -> Iterator[Named]:
    extra = info.extra
    channels, height, width = extra["input_shape"]
    for number, path in enumerate(given):
        if hasattr(path, "dtype"):
            yield from _each_array(info, [path])
            continue
        if isinstance(path, Path) and path.suffix in (".npy", ".npz"):
            yield from _each_row(path, images=True)
            continue
        try:
            is_file = isinstance(path, Path)
            pixels = decode_file(str(path)).pixels if is_file else np.asarray(path.convert("RGB"))
        except DataError as error:
            if skip is None:
                raise
            skip(error)
            continue
        if height == width:
            pixels = fit(pixels, height)
        if channels == 1:
            grey = pixels @ np.array([0.299, 0.587, 0.114])
            pixels = np.rint(grey * (extra.get("max_value", 255) / 255)).astype(np.uint8)[..., None]
        yield str(path) if is_file else f"[{number}]", torch.from_numpy(np.ascontiguousarray(pixels))


def _each_row(path: Path, *, images: bool) -> Iterator[Named]:
    arrays = read_arrays(path, "PATH", archive=path.suffix == ".npz")
    name = next((name for name in ("x", "test_x", "") if name in arrays), next(iter(arrays)))
    inputs, found_images = as_inputs(arrays[name], f"{path} {name}".strip())
    if found_images != images:
        what = "no uint8 images, which the model takes" if images else "images; the model takes vectors"
        raise DataError("D005", f"contains {what}", key=str(path))
    yield from ((f"{path}[{i}]", row) for i, row in enumerate(inputs))


def _each_table_row(facts: dict[str, Any], given: Sequence[Any]) -> Iterator[Named]:
    """Yield table rows, from files or from mappings of column names to values."""
    prepare = Preparation.from_facts(facts["columns"])
    if given and all(isinstance(each, Mapping) for each in given):
        names = dict.fromkeys(name for row in given for name in row)
        columns = {str(name).strip(): [row.get(name) for row in given] for name in names}
        inputs = prepare(columns, "inputs", range(len(given)))
        yield from ((f"[{number}]", row) for number, row in enumerate(as_tensor(inputs)))
        return
    for path in _paths(given, "Give the path of a file, a DataFrame, or a dict for each row"):
        rows = read_columns(path, "PATH")
        inputs = prepare(rows.columns, rows.file, rows.numbers)
        for number, row in zip(rows.numbers, as_tensor(inputs), strict=True):
            yield f"{path}:{number}", row


def _each_line(extra: dict[str, Any], given: Sequence[Any]) -> Iterator[Named]:
    tokenizer, most = read_tokenizer(extra["tokenizer"]), extra["max_length"]
    for path in _files(given):
        is_text = isinstance(path, Text)
        for number, line in [(0, path)] if is_text else read_texts(path, extra.get("columns", ()), "PATH"):
            if line.strip():
                ids = tokenizer.encode(line)[:most] or [extra.get("pad_id", 0)]
                yield str(path) if is_text else f"{path}:{number}", torch.tensor(ids)


def _paths(given: Sequence[Any], hint: str = "Give the path of a file") -> Iterator[Path]:
    """Yield the given files; raise D005 for anything but a path."""
    for path in _files(given):
        if not isinstance(path, Path):
            what = f"{described(path)} cannot be read here, where files are"
            raise DataError("D005", what, key="inputs", suggestion=hint)
        yield path


def _files(given: Sequence[Any], note: Callable[[str], None] = lambda text: None) -> Iterator[Any]:
    """Yield the files of paths and folders; other objects are yielded unchanged."""
    for text in given:
        if isinstance(text, Text) or not isinstance(text, (str, Path)):
            yield text
            continue
        path = Path(text).expanduser()
        if path.is_dir():
            passed = PassedOver()
            inside = [Path(file) for file in image_files(path, passed)]
            if passed.note:
                note(passed.note)
            if not inside:
                raise DataError("D002", "contains no images", key="PATH", value=path)
            yield from inside
        elif path.is_file():
            yield path
        else:
            raise DataError("D001", "no such file or folder", key="PATH", value=path)
