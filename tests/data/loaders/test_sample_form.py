"""Samples in the shapes that people bring are understood, and each meaning is said in a note."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import records, train, weights
from test_custom_dataset import NO_VAL, loader
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ptfast.cli import command_line
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError, PtfastError
from ptfast.core.protocols import NamedInputs
from ptfast.data.build_data import build_data
from ptfast.data.loaders.sample_form import InputOptions
from ptfast.data.sources import custom_dataset

POINTS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
CLASSES = (POINTS[:, 0] > 0).long() + (POINTS[:, 1] > 1).long()
PIXELS = torch.randint(0, 255, (24, 8, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
Pair = namedtuple("Pair", "features y")


@dataclass
class Example:
    """A sample as a dataclass."""

    name: str
    features: Tensor
    target: int


class Brought(Dataset[Any]):
    """Samples made by a function of their number."""

    def __init__(self, make: Any = None, size: int = 24, **attributes: Any) -> None:
        self.make, self.size = make or (lambda i: (POINTS[i], "abc"[CLASSES[i]])), size
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def load(dataset: Any, task: str = "auto", val: Duration = NO_VAL, **options: Any) -> Any:
    return build_data(dataset, val=val, seed=0, task=task, options=InputOptions(**options))


def first_batch(data: Any) -> Any:
    """The first 8 samples, in order."""
    return data.train.fetch(np.arange(8))


UNDERSTOOD: dict[str, tuple[Any, str]] = {
    "dict": (lambda i: {"x": POINTS[i], "label": int(CLASSES[i])}, "label is the target, x the input"),
    "named tuple": (lambda i: Pair(POINTS[i], int(CLASSES[i])), "y is the target, features the input"),
    "dataclass": (
        lambda i: Example("id", POINTS[i], int(CLASSES[i])),
        "target is the target, features the input; name left out",
    ),
    "three": (
        lambda i: (POINTS[i], int(CLASSES[i]), f"id{i}"),
        "of 3 parts of a sample, the first is the input, the second the target",
    ),
    "text labels": (
        lambda i: (POINTS[i], "abc"[CLASSES[i]]),
        "text labels are numbered in sorted order (an attribute `classes` states another)",
    ),
    "numpy text": (
        lambda i: (POINTS[i].numpy(), np.array(["a", "b", "c"])[CLASSES[i]]),
        "text labels are num",
    ),
    "float64": (lambda i: (POINTS[i].double().numpy(), CLASSES[i]), "float64 inputs are cast to float32"),
    "float16": (
        lambda i: (POINTS[i].half(), CLASSES[i]),
        "float16 inputs are cast to float32",
    ),
    "gradients": (lambda i: (POINTS[i].clone().requires_grad_(), CLASSES[i]), ""),
    "pairs": (lambda i: (POINTS[i], int(CLASSES[i])), ""),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_the_meaning_of_a_sample_is_found_and_said(name: str) -> None:
    make, note = UNDERSTOOD[name]
    data = load(Brought(make))
    assert note in data.note
    inputs, targets = first_batch(data)
    assert torch.equal(inputs, POINTS[:8].half().float() if name == "float16" else POINTS[:8])
    assert not inputs.requires_grad
    assert torch.equal(targets, CLASSES[:8])
    assert (data.info.task, data.info.num_classes) == ("classification", 3)
    assert data.info.class_names == (("a", "b", "c") if "text" in name else None)


def test_a_program_in_double_precision_keeps_its_inputs() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        inputs, _ = first_batch(load(Brought(lambda i: (POINTS[i].double(), CLASSES[i]))))
    finally:
        torch.set_default_dtype(torch.float32)
    assert inputs.dtype == torch.float64


def test_a_mask_beside_other_inputs_stays_bool() -> None:
    data = load(Brought(lambda i: ([POINTS[i], POINTS[i] > 0], int(CLASSES[i]))))
    assert [part.dtype for part in first_batch(data)[0]] == [torch.float32, torch.bool]
    alone = load(Brought(lambda i: (POINTS[i] > 0, int(CLASSES[i]))))
    assert first_batch(alone)[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "bool", "int64"])
@pytest.mark.parametrize("held", [True, False])
def test_labels_of_any_whole_type_train(dtype: str, held: bool) -> None:
    labels = (CLASSES > 0).numpy().astype(dtype)
    made = (
        TensorDataset(POINTS, torch.from_numpy(labels)) if held else Brought(lambda i: (POINTS[i], labels[i]))
    )
    data = load(made)
    assert (data.info.task, data.info.num_classes) == ("classification", 2)
    targets = first_batch(data)[1]
    assert torch.equal(targets.long(), (CLASSES > 0).long()[:8])
    loss = nn.functional.cross_entropy(torch.zeros(8, 2), targets)
    assert loss.item() == pytest.approx(np.log(2))


def test_images_become_tensors_in_one_size() -> None:
    for make in (
        lambda i: (Image.fromarray(PIXELS[i].numpy()), int(CLASSES[i])),
        lambda i: (PIXELS[i].numpy(), int(CLASSES[i])),
        lambda i: (PIXELS[i].permute(2, 0, 1), int(CLASSES[i])),
    ):
        data = load(Brought(make))
        assert (data.info.kind, data.info.input_shape) == ("image", (3, 8, 8))
        assert torch.equal(first_batch(data)[0], PIXELS[:8])
    varied = Brought(lambda i: (Image.fromarray(PIXELS[i].numpy()[: 8 - i % 3]), int(CLASSES[i])))
    with pytest.raises(DataError, match=r"Bring images to one size with data\.image_size=64, say"):
        load(varied)
    data = load(varied, image_size=4)
    assert first_batch(data)[0].shape == (8, 4, 4, 3)
    with pytest.raises(ConfigError, match=r"data\.image_size=4: its inputs are no images of uint8"):
        load(Brought(), image_size=4)


def test_inputs_with_structure_keep_it() -> None:
    data = load(Brought(lambda i: ([POINTS[i, :3], {"rest": POINTS[i, 3:].double()}], int(CLASSES[i]))))
    inputs, targets = first_batch(data)
    assert torch.equal(inputs[0], POINTS[:8, :3])
    assert torch.equal(inputs[1]["rest"], POINTS[:8, 3:])
    assert (data.info.kind, data.info.num_classes) == ("other", 3)
    named = Brought(lambda i: {"left": POINTS[i, :3], "right": POINTS[i, 3:], "id": i, "label": CLASSES[i]})
    data = load(named, parameters=["right", "left"])
    inputs, targets = first_batch(data)
    assert isinstance(inputs, NamedInputs)
    assert {*inputs} == {"left", "right"}
    assert torch.equal(targets, CLASSES[:8])


@pytest.mark.parametrize(
    ("make", "options", "line"),
    [
        (lambda i: {"a": POINTS[i], "label": 1, "y": 1}, {}, "label and y may be the target"),
        (lambda i: {"a": POINTS[i], "b": 1}, {}, "none is named as a target"),
        (lambda i: {"name": "a", "label": 1}, {}, "none of the others is a number or tensor"),
        (
            lambda i: {"a": POINTS[i], "b": POINTS[i], "label": 1},
            {"parameters": ["x", "z"]},
            "samples have the inputs a, b, and the model's forward takes x, z",
        ),
        (lambda i: (POINTS[i], None if i == 5 else 1), {}, "sample 5 has no label: it is None"),
        (lambda i: (POINTS[i], float("nan") if i == 5 else 1.5), {}, "sample 5 has no label: it is nan"),
        (lambda i: (POINTS[i], None if i == 5 else "a"), {}, "sample 5 has no label: it is None"),
        (lambda i: {"x": POINTS[i], "y": None if i == 5 else 1}, {}, "sample 5 has no label: it is None"),
        (
            lambda i: (POINTS[i], 3 if i == 5 else "a"),
            {},
            "that of sample 5 is the int 3",
        ),
    ],
)
def test_what_is_unclear_is_one_line(make: Any, options: Any, line: str) -> None:
    with pytest.raises(DataError) as caught:
        load(Brought(make), **options)
    assert (caught.value.code, line in str(caught.value)) == ("D004", True), str(caught.value)


def test_text_labels_have_the_same_numbers_in_every_split() -> None:
    val = Brought(lambda i: (POINTS[i], "cb"[i % 2]), size=4)
    data = load(Brought(val=val))
    assert data.info.class_names == ("a", "b", "c")
    assert data.val.fetch(np.arange(4))[1].tolist() == [2, 1, 2, 1]
    stated = load(Brought(classes=["c", "b", "a"]))
    assert stated.train.fetch(np.arange(8))[1].tolist() == (2 - CLASSES[:8]).tolist()
    known = build_data(val, val=NO_VAL, seed=0, task="auto", known=data.info)
    assert known.train.fetch(np.arange(4))[1].tolist() == [2, 1, 2, 1]
    with pytest.raises(DataError, match="the label 'x' of sample 1 is no class of training"):
        load(Brought(val=Brought(lambda i: (POINTS[i], "ax"[i % 2]), size=4))).val.fetch(np.arange(2))
    listed = load(Brought(targets=["abc"[c] for c in CLASSES]))
    assert listed.train.known_labels().tolist() == CLASSES.tolist()


def test_a_stream_is_understood_like_a_list() -> None:
    class Numbers(IterableDataset[Any]):
        classes = ("a", "b", "c")

        def __iter__(self) -> Iterator[Any]:
            return ({"x": POINTS[i].double().numpy(), "label": "abc"[CLASSES[i]]} for i in range(24))

    data = load(Numbers())
    assert data.info.num_classes == 3
    inputs, targets = next(loader(data, batch_size=8, micro_batches=1).steps(0, 1)).micro_batches[0].data
    assert torch.equal(inputs, POINTS[:8])
    assert torch.equal(targets, CLASSES[:8])


@pytest.mark.parametrize("kind", ["plain", "workers"])
def test_loaders_give_the_same(kind: str) -> None:
    data = load(Brought(Named()))
    batches = [step.micro_batches[0].data for step in loader(data, kind, micro_batches=1).steps(0, 3)]
    order = data.order(0, 0)
    assert order is None
    for inputs, targets in batches:
        found = [(row == POINTS).all(1).nonzero().item() for row in inputs["x"].float()]
        assert targets.tolist() == CLASSES[found].tolist()
        assert type(inputs) is NamedInputs


class Named:
    """Makes samples of two inputs with names; a worker takes it along."""

    def __call__(self, index: int) -> Any:
        return {"x": POINTS[index], "z": POINTS[index], "label": "abc"[CLASSES[index]]}


class TwoInputs(nn.Module):
    """Takes its inputs by name."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(12, num_classes)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.layer(torch.cat([x, z], 1))


def named() -> Brought:
    return Brought(Named())


def test_inputs_with_names_are_trained_evaluated_and_exported(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "data=custom",
        "data._target_=test_sample_form.named",
        "model=custom",
        "epochs=1",
        "batch_size=8",
    )
    assert train(*words, "model._target_=test_sample_form.TwoInputs", "run.dir=r") == 0
    assert "label is the target, x, z the input" in " ".join("".join(capsys.readouterr()).split())
    trained = [record for record in records(Path("r")) if record["split"] == "val"][-1]
    assert command_line.run(["eval", "r"]) == 0
    assert f'"loss": {trained["loss"]}' in capsys.readouterr().out
    assert weights(Path("r"))["layer.weight"].shape == (3, 12)


class Ours(Dataset[Any]):
    """Fails by itself, or gives what makes ptfast fail."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return POINTS[index], 1


def test_a_fault_of_ours_is_not_blamed_on_the_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    # In ptfast's own file, as far as the traceback says.
    monkeypatch.setattr(custom_dataset, "kind_of_target", lambda *_: int("x"))
    monkeypatch.setattr("ptfast.data.loaders.worker_processes.INSTALLED", (str(Path(__file__).parents[3]),))
    with pytest.raises(ValueError, match="invalid literal"):
        load(Ours())


def test_the_users_own_error_names_the_dataset() -> None:
    class Property(Ours):
        @property
        def num_classes(self) -> int:
            raise KeyError("column")

    with pytest.raises(PtfastError, match=r"num_classes raises KeyError \(test_sample_form.py"):
        load(Property())
