"""`ptfast eject`: the script's losses and weights are those of the run, to the bit, for every recipe."""

from __future__ import annotations

import pickle
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from running import records, train, weights

from ptfast.cli import command_line

WORDS = ["a", "good", "film", "that", "is", "not", "too", "long", "but", "the", "end", "comes", "late"]
EVERYTHING = (
    *("augment=crop_flip", "augment.flip=alternating", "gradients.accumulate=3", "gradients.clip_norm=1"),
    *("batch_size=66", "schedule=cosine", "schedule.warmup=3steps", "optimizer.decay_1d=false"),
    *("precision=bf16", "dataloader.last=drop", "rewrites=none"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small data of every kind that a recipe reads."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "cifar").mkdir()
    draws = np.random.default_rng(0)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        pixels = draws.integers(0, 256, (20, 3072), dtype=np.uint8)
        content = {"data": pixels, "labels": list(range(10)) * 2}
        (folder / "cifar" / name).write_bytes(pickle.dumps(content, protocol=2))
    meta = {"label_names": [f"class {label}" for label in range(10)]}
    (folder / "cifar" / "batches.meta").write_bytes(pickle.dumps(meta, protocol=2))
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (folder / "images" / split / label).mkdir(parents=True)
            for number in range(12):
                image = Image.fromarray(draws.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                image.save(folder / "images" / split / label / f"{number}.jpg")
    (folder / "texts").mkdir()
    for split, size in {"train": 90, "dev": 20}.items():
        lines = [" ".join(draws.choice(WORDS, draws.integers(1, 15))) + f"\t{k % 2}" for k in range(size)]
        (folder / "texts" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    (folder / "text.txt").write_text(" ".join(draws.choice(WORDS, 600)))
    return folder


def same_as_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """Train and eject, compare losses and weights; return the script."""
    monkeypatch.chdir(folder)
    own = (*words, "epochs=null", "log_every=1steps", "eval.every=3steps")
    assert train(*own, "run.dir=run") == 0
    assert command_line.run(["eject", *own, "--out", "train.py"]) == 0
    losses = runpy.run_path("train.py")["main"]()
    lines = records(folder / "run")
    assert losses == [line["loss"] for line in lines if line["split"] == "train"]
    own_weights, ejected = weights(folder / "run"), torch.load("weights.pt", weights_only=True)
    assert all(torch.equal(own_weights[name], value) for name, value in ejected.items())
    return Path("train.py").read_text()


RECIPES = {
    "resnet_digits": ("+recipe=resnet_digits",),
    "resnet_cifar": ("+recipe=resnet_cifar", "data.root={}/cifar", "batch_size=16"),
    "text_sst2": ("+recipe=text_sst2", "data.root={}/texts"),
    "char_gpt": ("+recipe=char_gpt", "data.path={}/text.txt", "data.context_length=32"),
}
BRIEF = {
    "cifar": (*RECIPES["resnet_cifar"], "model.depth=8"),
    "folders": (
        "+recipe=resnet_cifar",
        "data=imagefolder",
        "data.root={}/images",
        "model.depth=8",
        "batch_size=8",
    ),
    "texts": RECIPES["text_sst2"],
    "text": (*RECIPES["char_gpt"], "model.depth=1"),
    "everything": ("+recipe=resnet_digits", *EVERYTHING),
    "biases": ("model.batch_norm=true", "schedule=polynomial", "task.label_smoothing=0.1"),
}


@pytest.mark.parametrize("name", BRIEF)
def test_a_script_trains_as_the_run_does(name, files, tmp_path, monkeypatch, capsys):
    words = [word.format(files) for word in BRIEF[name]]
    text = same_as_the_run(tmp_path, monkeypatch, *words, "steps=6")
    assert not re.search("import ptfast|from ptfast", text)
    assert len(text.splitlines()) < 400
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_fifty_steps_of_every_recipe(recipe, files, tmp_path, monkeypatch, capsys):
    words = [word.format(files) for word in RECIPES[recipe]]
    same_as_the_run(tmp_path, monkeypatch, *words, "steps=50")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["ema=ema"], "ema.decay=0.999"),
        (["compile=model"], "compile.mode=model"),
        (["optimizer=lamb"], "optimizer._target_=ptfast.optim.lamb.Lamb"),
        (["schedule=wsd"], "schedule._target_=ptfast.techniques.schedule.wsd.Wsd"),
        (["augment=mixup"], "augment.mixup=0.2"),
        (["parallel=ddp"], "parallel.strategy=ddp"),
    ],
)
def test_what_no_script_is_made_of_is_named(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["eject", "data=digits", *words, "--out", "train.py"]) == 2
    assert f"error[C011]: {named}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_exists_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("mine")
    assert command_line.run(["eject", "data=digits", "--out", "train.py"]) == 4
    assert Path("train.py").read_text() == "mine"
    assert command_line.run(["eject", "data=digits"]) == 2
    assert "error[C016]: --out" in capsys.readouterr().err
