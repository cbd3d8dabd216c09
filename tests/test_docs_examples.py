"""What is copied from the docs works: examples of own parts, files, and every command that trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import stand_ins
import torch
from shown import (
    COMMANDS_SHOWN,
    DRY_RUN,
    OWN_CONF,
    OWN_PARTS,
    TASKS,
    TRAINING,
    Shown,
    fences,
    points,
    shown_commands,
    users_folder,
)

from ptfast.cli.command_line import run
from ptfast.config.read import read_config


@pytest.fixture(scope="module")
def in_users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with users_folder(tmp_path_factory.mktemp("user")) as folder:
        yield folder


@pytest.mark.slow
def test_every_own_part_takes_steps(in_users_folder: Path) -> None:
    for shown in shown_commands():
        if shown.page in OWN_PARTS and shown.words[0] == "train":
            assert run([*shown.words, "dataloader=plain", "--dry-run"]) == 0, shown


@pytest.mark.slow
def test_every_own_part_trains(in_users_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown_there = [shown for shown in shown_commands() if shown.page in OWN_PARTS]
    commands = [shown for shown in shown_there if shown.words[0] == "train"]
    assert len(commands) >= 9
    accuracy = {}
    for number, shown in enumerate(commands):
        folder = in_users_folder / f"run{number}"
        assert run([*shown.words, "dataloader=plain", f"run.dir={folder}"]) == 0
        figures = json.loads((folder / "summary.json").read_text())["val"]
        accuracy[" ".join(shown.words)] = figures["accuracy"]
        assert figures["accuracy"] > 0.5
        if "task=mine.WithRecall" in shown.words:
            assert 0 < figures["outer_recall"] <= 1
        if any("mine.Watch" in word for word in shown.words):
            assert figures["error"] == pytest.approx(1 - figures["accuracy"])
            assert '"error": ' in (folder / "metrics.jsonl").read_text()
        if "logger._target_=mine.Lines" in shown.words:
            assert len((folder / "metrics.txt").read_text().splitlines()) == 5
    assert "error " in capsys.readouterr().out
    assert all(value > 0.9 for words, value in accuracy.items() if "NAdam" in words)


OWN_TASKS = {
    "curve": (60, "mae", 0, 0.4),
    "shapes": (12, "mean_iou", 0.7, 1),
    "simclr": (4, "accuracy", 0, 1),
    "gan": (12, "loss", 0, 0.9),
}
"""By module of the page on tasks: steps of 32 samples, and the range in which a figure is after them."""


SLOWER = [pytest.param(module, marks=pytest.mark.slow) for module in ("shapes", "simclr", "detection")]


@pytest.mark.parametrize("module", ["curve", "gan", *SLOWER])
def test_every_kind_of_task_trains(module: str, in_users_folder: Path, tmp_path: Path) -> None:
    if module == "detection":
        pytest.importorskip("pycocotools")
    steps, name, low, high = OWN_TASKS.get(module, (4, "map_50", 0, 1))
    (words,) = [s.words for s in shown_commands() if f"data._target_={module}." in str(s.words)]
    given = [word for word in words if not word.startswith(("epochs=", "batch_size="))]
    assert run([*given, "batch_size=32", f"steps={steps}", f"run.dir={tmp_path}/run"]) == 0
    figure = json.loads((tmp_path / "run" / "summary.json").read_text())["val"][name]
    assert low <= figure <= high, figure


def test_a_stream_trains(in_users_folder: Path) -> None:
    words = ["train", "data=custom", "data._target_=mine.Stream", "steps=20", "run.dir=streamed"]
    assert run(words) == 0
    assert json.loads(Path("streamed/summary.json").read_text())["steps"] == 20


def test_files_of_config_say_what_the_page_says(in_users_folder: Path) -> None:
    (groups,) = [text for text in fences("docs/how-to/models/fine-tune.md", "yaml") if "groups:" in text]
    Path("groups.yaml").write_text(groups)
    config = read_config(["recipe=./groups.yaml"])[1]
    assert [group.match for group in config.optimizer.groups] == ["*.bias", "layers.1.*"]
    assert read_config(["recipe=./mine.yaml"])[1].epochs == 60
    words = ["data=custom", "data._target_=mine.Rings", "model=net", "model.width=32"]
    assert read_config(words)[1].model.target.path == "mine.Net"


def test_weights_of_lightning_become_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = torch.nn.Linear(2, 3).state_dict()
    torch.save({"state_dict": {f"model.{name}": value for name, value in weights.items()}}, "epoch=9.ckpt")
    (code,) = fences("docs/compare/lightning.md", "python")
    exec(code, {})
    assert torch.load("weights.pt", weights_only=True).keys() == weights.keys()


EXEMPT = {
    "compile=model": "compiles for minutes; tests of the compiler train it",
    "data=hf": "reads from the hub",
    "task=multilabel": "takes rows of 0 and 1 for labels, which the small data has not",
    "data.tokenizer=distilbert-base-uncased": "downloads a tokenizer",
    "model.weights=pretrained": "downloads weights",
    "debug=nvtx": "needs CUDA",
    "task=detection.Detection": "needs pycocotools",
    "recipe=finetune_image": "downloads weights",
    "recipe=distilbert_text": "downloads weights",
    "recipe=resnet50_imagenet": "trained small by test_recipes",
    "recipe=gpt2_124m": "trained small by test_recipes",
    "recipe=segmentation": "trained small by test_recipes",
    "data.shards=https://HOST/train-{000..146}.tar": "reads from a host",
    "data.shards=s3://BUCKET/train-{000..146}.tar": "reads from a host",
}
"""Trainings that are composed and not run, and why."""
NODES = "parallel.nnodes=2"
"""A dry run takes steps on one machine; to its end the command needs two."""


@pytest.fixture(scope="module")
def small_data(in_users_folder: Path) -> Path:
    """A small dataset of each kind, and packs of two of them."""
    folder = in_users_folder / "small"
    folder.mkdir()
    stand_ins.write(folder)
    (folder / "text.txt").write_text("ROMEO: to be or not to be,\n\nthat is the question\n\n" * 60)
    assert run(["pack", str(folder / "images"), str(folder / "image_pack")]) == 0
    assert run(["pack", str(folder / "text.txt"), str(folder / "text_pack"), "--tokenizer", "words"]) == 0
    return folder


def on_small_data(words: Sequence[str], folder: Path) -> list[str]:
    """A command as it stands, but with the files of `folder` in a user's place, and a run of its own."""
    text = bool({"recipe=char_gpt", "data=text_file", "--tokenizer"} & {*words})
    tables = bool({"recipe=text_sst2", "data=text_tsv"} & {*words})
    files = {
        "FOLDER": "" if tables else "images",
        "FILE": "text.txt" if text else "points.npz",
        "text.txt": "text.txt",
        "PACK": "text_pack" if text else "image_pack",
        "photos": "images",
        "DIR": "shards",
        "DIR/train-{000..146}.tar": "shards",
        "DIR/val": "shards",
        "/shared/conf": "../shared/conf",
    }
    cifar = {"recipe=resnet_cifar", "recipe=./mine.yaml"} & {*words} and "data=imagefolder" not in words
    given = [word for word in words if not word.startswith(("run.resume=", "run.dir="))]
    parts = [word.rpartition("=") for word in given]
    swapped = [
        f"{key}{equals}{folder / files[value] if value in files else value}" for key, equals, value in parts
    ]
    return [*swapped, f"data.root={folder}/cifar10"] if cifar else swapped


@pytest.mark.parametrize(
    "shown", [pytest.param(s, marks=[] if s in DRY_RUN else pytest.mark.slow) for s in TRAINING], ids=str
)
def test_a_dry_run_takes_steps(shown: Shown, small_data: Path) -> None:
    if {*EXEMPT} & {*shown.words}:
        pytest.skip("not trained")
    words = on_small_data(shown.words, small_data)
    if {"--cfg", "--dry-run"} & {*words}:
        assert run(words) == 0
    elif "-m" in words:
        jobs = {tuple(word for word in point if not word.startswith("seed=")) for point in points(words)}
        assert all(run([*(word for word in job if word != "-m"), "--dry-run"]) == 0 for job in jobs)
    else:
        assert run([*words, "--dry-run"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("shown", [shown for shown in TRAINING if shown.page not in TASKS], ids=str)
def test_a_training_runs(shown: Shown, small_data: Path, tmp_path: Path) -> None:
    """To its end: as it stands on the digits that come with the package, else twelve steps of small data."""
    if {*EXEMPT, NODES, "--cfg", "--dry-run"} & {*shown.words}:
        pytest.skip("not trained")
    words = on_small_data(shown.words, small_data)
    if not {"recipe=resnet_digits"} & {*words} and shown.page != OWN_CONF:
        shorter = ("epochs=", "steps=", "batch_size=", "data.image_size=")
        words = [word for word in words if not word.startswith(shorter)] + ["steps=12", "batch_size=10"]
        words += ["epochs=null"] + ["data.image_size=32"] * ("imagefolder" in str(words))
    assert run([*words, f"run.{'root' if '-m' in words else 'dir'}={tmp_path}/run"]) == 0


OTHER = [
    shown
    for shown in COMMANDS_SHOWN
    if shown.words[0] in ("find", "audit", "eval", "predict", "compare", "pack", "launch", "techniques")
    and len(shown.words) > 2
    and not {"NAME", "PATH...", ">", "gpt2"} & {*shown.words}
    and shown.words[1:2] != ("--size",)
    # The digits have no test split.
    and "--split" not in shown.words
]
"""Those of `ablate`, `race` and `chaos` take minutes: tests of these commands run them."""


@pytest.fixture(scope="module")
def finished(small_data: Path) -> dict[str, str]:
    """What commands that read a run name, by how pages write it."""
    text = on_small_data(
        ["train", "recipe=char_gpt", "data.path=FILE", "steps=2", "batch_size=4"], small_data
    )
    assert run([*text, "run.dir=runs/text"]) == 0
    assert run(["train", "recipe=resnet_digits", "steps=2"]) == 0
    assert run(["train", "-m", "recipe=resnet_digits", "steps=2", "seed=0,1"]) == 0
    shutil.copytree(small_data / "images" / "train", "folder")
    shutil.copy(next(Path("folder").rglob("*.png")), "image.png")
    (digits,) = map(str, Path("runs/resnet_digits").iterdir())
    (sweep,) = map(str, Path("runs/sweeps").iterdir())
    sweeps = ("20261122-1*", "20261122-101112-ab12", "*")
    own = {"FILE": "image.png"} | {f"runs/sweeps/{name}": sweep for name in sweeps}
    after_training = {"runs/photos": digits, "photos/cat/0.jpg": "image.png"}
    return {"RUN": digits, "runs/resnet_digits/...": digits, **own, **after_training}


@pytest.mark.slow
@pytest.mark.parametrize("shown", OTHER, ids=str)
def test_another_command_runs(
    shown: Shown, small_data: Path, finished: dict[str, str], tmp_path: Path
) -> None:
    words = list(shown.words)
    if words[0] == "pack":
        made = small_data / "image_pack" if "--verify" in words else tmp_path / "pack"
        words = [str(made) if word == "PACK" else word for word in words]
    else:
        words = [finished.get(word, word) for word in words]
    if "--prompt" in words:
        words[1] = "runs/text"
    if words[0] == "launch":
        words.append("--print")
    if "--write" in words:
        Path(words[-1]).unlink(missing_ok=True)
    assert run(on_small_data(words, small_data)) == 0
