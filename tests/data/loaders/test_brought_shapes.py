"""Datasets and models as people bring them: each trains like plain pairs, or ends in one line."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from running import same_bits, train, weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, random_split

pd = pytest.importorskip("pandas", reason="needs pandas")

COUNT = 24
GENERATOR = torch.Generator().manual_seed(0)
POINTS = torch.randn(COUNT, 6, generator=GENERATOR).half().float()
LABELS = (POINTS[:, 0] > 0).long() + (POINTS[:, 1] > 1).long()
PARTS: dict[str, Any] = {"x": POINTS, "label": LABELS}
PIXELS = torch.randint(0, 255, (COUNT, 4, 4, 3), generator=GENERATOR, dtype=torch.uint8).numpy()
TEXTS = ["abc"[label] for label in LABELS]
FRAME = pd.DataFrame(POINTS.numpy(), columns=list("uvwxyz")).assign(kind=pd.Categorical(TEXTS))
INPUTS = FRAME.columns[:6]


class Made(Dataset[Any]):
    """Samples made by a function of their number."""

    def __init__(self, make: Callable[[int], Any], size: int = COUNT, **attributes: Any) -> None:
        self.make, self.size = make, size
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[Any]):
    """The same samples one after another."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make, self.num_classes = make, 3

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, range(COUNT))


class Row(NamedTuple):
    """A sample with a name that no model takes."""

    name: str
    features: Tensor
    y: int


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A sample without a `__dict__`."""

    name: str
    features: Tensor
    label: int


class Color(enum.Enum):
    """Classes in the order of their names."""

    AMBER = "x"
    BLUE = "w"
    CYAN = "v"


def label(index: int) -> int:
    return int(LABELS[index])


def halves(index: int) -> dict[str, Tensor]:
    return {"left": POINTS[index, :3], "right": POINTS[index, 3:]}


def tensordict() -> Any:
    found = pytest.importorskip("tensordict")
    return Made(lambda i: found.TensorDict({"x": POINTS[i], "label": LABELS[i]}, []))


def graphs() -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return Made(lambda i: data.Data(x=POINTS[i : i + 1], y=LABELS[i : i + 1]))


class Linear(nn.Module):
    """A linear layer on the inputs in one row."""

    def __init__(self, num_classes: int, how: str = "tensor") -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, num_classes), how

    def outputs(self, x: Any) -> Any:
        out = self.layer(torch.cat([*leaves(x)], 1))
        if self.how == "model output":
            from transformers.modeling_outputs import SequenceClassifierOutput

            return SequenceClassifierOutput(logits=out)
        return (out, out.mean()) if self.how == "logits and loss" else out


def leaves(value: Any) -> Iterator[Tensor]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, Tensor):
        yield value
    for part in parts:
        yield from leaves(part)


class Net(Linear):
    """Takes its input by position."""

    def forward(self, x: Any) -> Any:
        return self.outputs(x)


class ByKeyword(Linear):
    """Takes its input by name alone."""

    def forward(self, *, x: Any) -> Any:
        return self.outputs(x)


class TwoKeywords(Linear):
    """Takes its inputs by name alone."""

    def forward(self, *, right: Tensor, left: Tensor) -> Any:
        return self.outputs([left, right])


class TwoInputs(Linear):
    """Takes two inputs."""

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return self.outputs([left, right])


class Lazy(TwoKeywords):
    """Gets its sizes from the first samples."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.layer = nn.LazyLinear(num_classes)


class Flat(nn.Module):
    """Takes anything with a batch dimension, in a list or not."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(num_classes)

    def forward(self, x: Any) -> Tensor:
        (image,) = leaves(x)
        return self.layer(image.flatten(1).float())


class Recurrent(nn.Module):
    """Gives the outputs of a GRU and its state."""

    def __init__(self, num_classes: int, last: bool = True) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(1, num_classes, batch_first=True), last

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, state = self.gru(x[..., None])
        return (outputs[:, -1] if self.last else outputs), state


class Transformed(Made):
    """Torchvision's way: labels as read, changed by a transform."""

    def __init__(self) -> None:
        super().__init__(lambda i: (POINTS[i], self.target_transform(self.targets[i])))
        self.targets, self.target_transform = LABELS.tolist(), lambda number: "abc"[number]


LIKE_PAIRS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "pairs": (lambda: Made(lambda i: (POINTS[i], label(i))), "Net", ""),
    "list of pairs": (lambda: [(POINTS[i], label(i)) for i in range(COUNT)], "Net", ""),
    "nested dicts": (
        lambda: Made(lambda i: {"all": {"a": POINTS[i, :3], "b": {"c": POINTS[i, 3:]}}, "label": label(i)}),
        "Net",
        "label is the target, all the input",
    ),
    "list of dicts": (
        lambda: Made(lambda i: ([{"x": part} for part in halves(i).values()], label(i))),
        "Net",
        "",
    ),
    "named tuple": (lambda: Made(lambda i: Row("n", POINTS[i], label(i))), "Net", "name left out"),
    "slots": (lambda: Made(lambda i: Record("n", POINTS[i], label(i))), "Net", "name left out"),
    "TensorDict": (tensordict, "Net", "label is the target, x the input"),
    "StackDataset": (lambda: StackDataset(**PARTS), "Net", "label is the target, x the input"),
    "float64 series": (
        lambda: Made(lambda i: (FRAME[INPUTS].iloc[i].astype("f8"), FRAME.kind.iloc[i])),
        "Net",
        "float64 inputs are cast to float32",
    ),
    "rows of objects": (
        lambda: Made(lambda i: (FRAME.iloc[i][INPUTS].to_numpy(), FRAME.iloc[i]["kind"])),
        "Net",
        "text labels are numbered in sorted order",
    ),
    "categories of numbers": (
        lambda: Made(lambda i: (POINTS[i], pd.Categorical(LABELS.tolist())[i])),
        "Net",
        "",
    ),
    "lists of floats": (
        lambda: Made(lambda i: (POINTS[i].tolist(), label(i))),
        "Net",
        "lists of numbers become tensors",
    ),
    "reversed": (lambda: Made(lambda i: (POINTS[i].flip(0).numpy()[::-1], label(i))), "Net", ""),
    "big-endian": (lambda: Made(lambda i: (POINTS[i].numpy().astype(">f4"), label(i))), "Net", ""),
    "read-only": (lambda: Made(lambda i: (np.broadcast_to(POINTS[i].numpy(), 6), label(i))), "Net", ""),
    "float16": (lambda: Made(lambda i: (POINTS[i].half(), label(i))), "Net", "float16 inputs are cast"),
    "0-d tensor": (lambda: Made(lambda i: (POINTS[i], torch.tensor(label(i)))), "Net", ""),
    "0-d array": (lambda: Made(lambda i: (POINTS[i], np.array(label(i), "u2"))), "Net", ""),
    "0-d text": (lambda: Made(lambda i: (POINTS[i], np.array(TEXTS[i]))), "Net", "text labels are numbered"),
    "bytes": (lambda: Made(lambda i: (POINTS[i], TEXTS[i].encode())), "Net", "text labels are numbered"),
    "Enum": (lambda: Made(lambda i: (POINTS[i], [*Color][label(i)])), "Net", "text labels are numbered"),
    "y in a dict": (lambda: Made(lambda i: {"x": POINTS[i], "y": TEXTS[i]}), "Net", "y is the target"),
    "some keys match": (
        lambda: Made(lambda i: {"id": i, "x": POINTS[i], "label": label(i)}),
        "Net",
        "label is the target, x the input; id left out",
    ),
    "Subset": (
        lambda: Subset(Made(lambda i: (POINTS[i], TEXTS[i]), classes=["a", "b", "c"]), range(COUNT)),
        "Net",
        "",
    ),
    "ConcatDataset": (
        lambda: ConcatDataset([Made(lambda i, at=at: (POINTS[at + i], TEXTS[at + i]), 12) for at in (0, 12)]),
        "Net",
        "text labels are numbered",
    ),
    "target_transform": (Transformed, "Net", "text labels are numbered"),
    "dict and target": (lambda: Made(lambda i: (halves(i), label(i))), "TwoInputs", "forward's left, right"),
    "dict as one": (lambda: Made(lambda i: (halves(i), label(i))), "Net", ""),
    "keyword": (lambda: Made(lambda i: {"x": POINTS[i], "label": label(i)}), "ByKeyword", "x the input"),
    "two keywords": (
        lambda: Made(lambda i: {**halves(i), "label": label(i)}),
        "TwoKeywords",
        "label is the target, left, right the input",
    ),
    "logits and loss": (
        lambda: Made(lambda i: (POINTS[i], label(i))),
        "Net",
        "the output is a Tensor of float32 (8, 3)",
    ),
    "model output": (
        lambda: Made(lambda i: (POINTS[i], label(i))),
        "Net",
        "the output is a Tensor of float32 (8, 3)",
    ),
}
"""The dataset, the model, and what is said. All contain the samples of `pairs`."""

TRAINS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "stream of arrays": (
        lambda: Stream(lambda i: {"x": POINTS[i].double().numpy(), "label": np.int32(label(i))}),
        "Net",
        "label is the target, x the input; float64 inputs are cast to float32",
    ),
    "random_split": (
        lambda: random_split(Made(lambda i: {"x": POINTS[i], "label": TEXTS[i]}), [20, 4])[0],
        "Net",
        "label is the target, x the input; text labels",
    ),
    "val as a list": (
        lambda: Made(lambda i: (POINTS[i], TEXTS[i]), val=[(POINTS[i], TEXTS[i]) for i in range(8)]),
        "Net",
        "24 train, 8 val",
    ),
    "one-hot whole numbers": (
        lambda: Made(lambda i: (POINTS[i], F.one_hot(LABELS[i], 3))),
        "Net",
        "task=multilabel because of the labels: a single 1 each",
    ),
    "rows of 0 and 1": (
        lambda: Made(lambda i: (POINTS[i], [label(i) > 0, True, i % 2])),
        "Net",
        "multilabel of 3 labels",
    ),
    "float16 figures": (
        lambda: Made(lambda i: (POINTS[i], np.float16(POINTS[i, 0]))),
        "Net",
        "regression of 1",
    ),
    "gray images": (
        lambda: Made(lambda i: (Image.fromarray(PIXELS[i, :, :, 0]), label(i))),
        "Flat",
        "images become uint8 tensors, channels first",
    ),
    "RGBA images in a list": (
        lambda: Made(lambda i: {"image": [Image.fromarray(PIXELS[i]).convert("RGBA")], "label": label(i)}),
        "Flat",
        "images become uint8 tensors, channels first",
    ),
    "lazy with names": (
        lambda: Made(lambda i: {**halves(i), "label": label(i)}),
        "Lazy",
        "left, right the input",
    ),
    "GRU": (
        lambda: Made(lambda i: (POINTS[i], label(i))),
        "Recurrent",
        "the output is a Tensor of float32 (8, 3)",
    ),
}
"""What trains, to weights of its own."""


REJECTED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "graphs": (graphs, "Net", "error[D008]"),
    "objects": (lambda: Made(lambda i: SimpleNamespace(x=POINTS[i], y=1)), "Net", "error[D008]"),
    "frame row": (lambda: Made(lambda i: FRAME.iloc[i]), "Net", "Name a function that does: data.collate"),
    "many columns": (
        lambda: Made(lambda i: {**FRAME[["u", "v", "w"]].iloc[i], "name": "n", "label": label(i)}),
        "TwoInputs",
        "error[D004]: data (command line): samples have the inputs u, v, w, and",
    ),
    "complex": (lambda: Made(lambda i: (POINTS[i] + 1j, label(i))), "Net", "torch.view_as_real"),
    "complex label": (lambda: Made(lambda i: (POINTS[i], 1j)), "Net", "that of sample 0 is a complex"),
    "16-bit images": (
        lambda: Made(lambda i: (PIXELS[i].astype("u2") * 256, label(i))),
        "Flat",
        "Convert them to 8 bits, or to floats from 0 to 1",
    ),
    "objects in a row": (
        lambda: Made(lambda i: (np.array([1.5, "x"], object), label(i))),
        "Net",
        "the input of sample 0 contains something other than numbers",
    ),
    "a text among numbers": (
        lambda: Made(lambda i: (POINTS[i], "a" if i == 3 else label(i))),
        "Net",
        "labels are numbers or texts, and that of sample 3 is the str 'a'",
    ),
    "a number among texts": (
        lambda: Made(lambda i: (POINTS[i], 1 if i == 3 else TEXTS[i])),
        "Net",
        "labels are texts, and that of sample 3 is the int 1",
    ),
    "NA": (
        lambda: Made(lambda i: (POINTS[i], pd.NA if i == 5 else TEXTS[i])),
        "Net",
        "sample 5 has no label",
    ),
    "dates": (
        lambda: Made(lambda i: (POINTS[i], pd.Timestamp("2020"))),
        "Net",
        "that of sample 0 is a Timestamp",
    ),
    "texts in own batches": (
        lambda: Made(
            lambda i: (POINTS[i], TEXTS[i]),
            collate_fn=lambda samples: (torch.stack([x for x, _ in samples]), [y for _, y in samples]),
        ),
        "Net",
        "error[D004]",
    ),
    "two targets": (
        lambda: Made(lambda i: {"x": POINTS[i], "y": 1, "label": 1}),
        "Net",
        "label and y may be the target",
    ),
    "no key matches": (
        lambda: Made(lambda i: {"p": POINTS[i], "q": POINTS[i], "label": 1}),
        "TwoInputs",
        "the inputs p, q, and the model's forward takes left, right",
    ),
    "dict of arrays": (
        lambda: {"x": POINTS.numpy(), "y": LABELS.numpy()},
        "Net",
        "torch.utils.data.TensorDataset and StackDataset make one of arrays",
    ),
}
"""What ends in an error of data, and words of it."""


def dataset(name: str) -> Any:
    return {**LIKE_PAIRS, **TRAINS, **REJECTED}[name][0]()


def run(name: str, model: str, *words: str) -> int:
    how = [f"model.how='{name}'"] if name in ("logits and loss", "model output") else []
    return train(
        "data=custom",
        f"data._target_={__name__}.dataset",
        f"data.name='{name}'",
        *("data.val=0", "model=custom", f"model._target_={__name__}.{model}", *how, "device=cpu"),
        *("epochs=1", "batch_size=8", f"run.dir={name.replace(' ', '_')}", *words),
    )


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, without line ends."""
    return " ".join("".join(capsys.readouterr()).split())


@pytest.fixture(scope="module")
def of_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The weights that the plain pairs lead to."""
    folder = tmp_path_factory.mktemp("pairs")
    assert run("pairs", "Net", f"run.dir={folder}/run") == 0
    return weights(folder / "run")


@pytest.mark.parametrize("name", LIKE_PAIRS)
def test_samples_in_another_shape_train_to_the_weights_of_pairs(
    name: str, in_tmp: Path, of_pairs: dict[str, Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    _, model, note = LIKE_PAIRS[name]
    assert run(name, model) == 0
    text = shown(capsys)
    assert not note or text.count(note) == 1
    assert "warning" not in text
    assert same_bits(weights(in_tmp / name.replace(" ", "_")), of_pairs)


@pytest.mark.parametrize("name", TRAINS)
def test_other_shapes_train_and_are_explained_once(
    name: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model, note = TRAINS[name]
    words = ["epochs=null", "steps=3"] if name.startswith("stream") else []
    assert run(name, model, *words) == 0
    assert shown(capsys).count(note) == 1
    assert all(bool(weight.isfinite().all()) for weight in weights(in_tmp / name.replace(" ", "_")).values())


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_unclear_ends_in_one_line(
    name: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model, words = REJECTED[name]
    assert run(name, model) == 3
    text = shown(capsys)
    assert words in text
    assert text.count("ptfast: error[D0") == 1
    assert "Traceback" not in text


def test_classes_of_a_dataset_are_those_of_its_subsets(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("Subset", "Net") == 0
    assert "classification of 3 classes" in shown(capsys)


@pytest.mark.usefixtures("in_tmp")
def test_outputs_that_need_more_than_one_row_name_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pairs", "Recurrent", "model.last=false") == 2
    said = shown(capsys)
    assert "Tensor of float32 (8, 6, 3)" in said
    assert "Classification needs floats of shape (8, 3)" in said
