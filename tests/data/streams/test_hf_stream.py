"""Streams of the package `datasets`, from files on this machine."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from running import same_bits, train, weights
from streamed import build

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.build_data import build_data
from ptfast.data.sources.hf_dataset import HfDataset

datasets = pytest.importorskip("datasets")
COUNT = 17


@pytest.fixture
def files(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in JSON lines, images in parquet, and a tokenizer of words; every row says its number."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", in_tmp / "cache")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<unk>": 1, **{f"w{number}": 2 + number for number in range(COUNT)}}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save("tokenizer.json")
    Path("texts").mkdir()
    for part in range(2):
        rows = [{"text": f"w{n} " * (1 + n % 3), "label": n % 2} for n in range(part, COUNT, 2)]
        Path(f"texts/train-{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("texts/validation.jsonl").write_text(json.dumps({"text": "w3 w4", "label": 1}))
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])}
    images = [np.full((6, 5, 3), number * 10, np.uint8) for number in range(COUNT)]
    columns = {"image": images, "label": [number % 2 for number in range(COUNT)]}
    Path("images").mkdir()
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).to_parquet("images/train.parquet")


def load(path: str, shuffle_buffer: int | None = None, **options: Any) -> Any:
    if path == "texts":
        options = {"classes": 2, "tokenizer": "tokenizer.json", **options}
    source = HfDataset(path, streaming=True, **options)
    return build_data(source, val=Duration(0, "percent"), seed=0, task="auto", shuffle_buffer=shuffle_buffer)


def steps(data: Any, count: int, first: int = 0, state: Any = None, **options: Any) -> list[Any]:
    with contextlib.closing(build(data.train, **options)) as loader:
        if state is not None:
            loader.marks.load(state, first)
        return [part.data for step in loader.steps(first, first + count) for part in step.micro_batches]


@pytest.mark.usefixtures("files")
def test_texts_and_labels_are_those_of_the_rows() -> None:
    data = load("texts")
    assert (data.info.kind, data.info.num_classes, data.info.vocab_size) == ("text", 2, COUNT + 2)
    rows = [row for tokens, labels in steps(data, 6) for row in zip(tokens, labels, strict=True)]
    numbers = [int(tokens[0]) - 2 for tokens, _ in rows]
    assert numbers[:COUNT] == [*range(0, COUNT, 2), *range(1, COUNT, 2)]
    for number, (tokens, label) in zip(numbers, rows, strict=True):
        assert tokens[tokens > 0].tolist() == [number + 2] * (1 + number % 3)
        assert int(label) == number % 2


@pytest.mark.usefixtures("files")
def test_images_are_decoded_as_they_are_asked_for() -> None:
    data = load("images")
    assert (data.info.class_names, data.info.input_shape) == (("even", "odd"), (3, 6, 5))
    images, labels = map(torch.cat, zip(*steps(data, 2), strict=True))
    assert images[:, 0, 0, 0].tolist() == [number * 10 for number in range(len(images))]
    assert labels.tolist() == [number % 2 for number in range(len(images))]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("shuffle_buffer", [None, 5])
def test_all_data_workers_make_the_same_batches(shuffle_buffer: int | None) -> None:
    data = load("texts", shuffle_buffer=shuffle_buffer)
    plain = steps(data, 6)
    assert same_bits(steps(data, 6, kind="workers", workers=2), plain)
    ranks = [steps(data, 6, rank=rank, world_size=2) for rank in (0, 1)]
    assert same_bits([batch for pair in zip(*ranks, strict=True) for batch in pair], plain)


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_a_run_is_resumed_to_the_same_bits() -> None:
    words = ("data=hf", "data.path=texts", "data.streaming=true", "data.tokenizer=tokenizer.json")
    words = (*words, "data.classes=[no,yes]", "data.shuffle_buffer=4", "model=text_encoder", "model.width=8")
    words = (*words, "model.heads=1", "model.depth=1", "batch_size=4", "steps=9", "saving.every=1steps")
    assert train(*words, "saving.keep=9", "run.dir=whole") == 0
    # The first pass of 17 samples ends within step 5.
    for step in (3, 6):
        assert train(*words, f"run.resume=whole/saved/step-{step}", f"run.dir=from{step}") == 0
        assert same_bits(weights(Path(f"from{step}")), weights(Path("whole")))


@pytest.mark.usefixtures("files")
def test_unfit_streams_are_rejected() -> None:
    for options, code, key in (
        ({"classes": None}, "C016", "data.classes"),
        ({"tokenizer": "words"}, "C011", "data.tokenizer"),
        ({"label": "class"}, "D005", "data.label"),
    ):
        with pytest.raises((ConfigError, DataError)) as caught:
            load("texts", **options)
        assert (caught.value.code, caught.value.key) == (code, key)
    with pytest.raises(DataError) as caught:
        steps(load("texts", classes=1), 3)
    assert caught.value.code == "D004"
