"""What is copied from the docs works: examples of own parts, files, and every command that trains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import stand_ins
import torch
from shown import OWN_PARTS, TASKS, TRAINING, Shown, fences, shown_commands, users_folder

from ptfast.cli.command_line import run
from ptfast.config.read import read_config


@pytest.fixture(scope="module")
def in_users_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with users_folder(tmp_path_factory.mktemp("user")) as folder:
        yield folder


def test_every_own_part_trains(in_users_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown_there = [shown for shown in shown_commands() if shown.page == OWN_PARTS]
    commands = [shown for shown in shown_there if shown.words[0] == "train"]
    assert len(commands) >= 9
    accuracy = {}
    for number, shown in enumerate(commands):
        folder = in_users_folder / f"run{number}"
        assert run([*shown.words, f"run.dir={folder}"]) == 0
        figures = json.loads((folder / "summary.json").read_text())["val"]
        accuracy[" ".join(shown.words)] = figures["accuracy"]
        assert figures["accuracy"] > 0.5
        if "task=mine.WithRecall" in shown.words:
            assert 0 < figures["outer_recall"] <= 1
        if any("mine.Watch" in word for word in shown.words):
            assert figures["error"] == pytest.approx(1 - figures["accuracy"])
            assert '"error": ' in (folder / "metrics.jsonl").read_text()
        if "logger._target_=mine.Lines" in shown.words:
            assert len((folder / "figures.txt").read_text().splitlines()) == 5
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
    (groups,) = [text for text in fences("docs/config.md", "yaml") if "groups:" in text]
    Path("groups.yaml").write_text(groups)
    config = read_config(["+recipe=./groups.yaml"])[1]
    assert [group.match for group in config.optimizer.groups] == ["*.bias", "layers.1.*"]
    assert read_config(["+recipe=./mine.yaml"])[1].epochs == 60
    (option,) = [text for text in fences(OWN_PARTS, "yaml") if text.startswith("# conf/")]
    file = Path(re.match(r"# (\S+)\n", option)[1])  # type: ignore[index]
    file.parent.mkdir(parents=True)
    file.write_text(option.partition("\n")[2])
    words = ["data=custom", "data._target_=mine.Rings", "model=net", "model.width=32"]
    assert read_config(words)[1].model.target.path == "mine.Net"


def test_weights_of_lightning_become_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = torch.nn.Linear(2, 3).state_dict()
    torch.save({"state_dict": {f"model.{name}": value for name, value in weights.items()}}, "epoch=9.ckpt")
    (code,) = fences("docs/migrating.md", "python")
    exec(code, {})
    assert torch.load("weights.pt", weights_only=True).keys() == weights.keys()


EXEMPT = {
    "--cfg": "prints the config",
    "--info": "prints how it is composed",
    "--config": "a form: FILE is any run's",
    "-m": "tried on the first pages",
    "compile=model": "compiles for minutes; tests of the compiler train it",
    "data=hf": "reads from the hub",
    "model.weights=pretrained": "downloads weights",
    "debug=nvtx": "needs CUDA",
    "+recipe=finetune_image": "downloads weights",
    "+recipe=distilbert_text": "downloads weights",
    "+recipe=resnet50_imagenet": "trained small by test_recipes",
    "+recipe=gpt2_124m": "trained small by test_recipes",
    "+recipe=segmentation": "trained small by test_recipes",
}
"""Commands that are composed and not trained, and why."""


@pytest.fixture(scope="module")
def small_data(in_users_folder: Path) -> Path:
    """A small data set of each kind, and packs of two of them."""
    folder = in_users_folder / "small"
    folder.mkdir()
    stand_ins.write(folder)
    (folder / "text.txt").write_text("to be or not to be,\n\nthat is the question\n\n" * 60)
    assert run(["pack", str(folder / "images"), str(folder / "image_pack")]) == 0
    assert run(["pack", str(folder / "text.txt"), str(folder / "text_pack"), "--tokenizer", "words"]) == 0
    return folder


def on_small_data(words: tuple[str, ...], folder: Path) -> list[str]:
    """A command with the files of `folder` in the place of a user's, and twelve steps long."""
    text = any(word in ("+recipe=char_gpt", "data=text_file") for word in words)
    tables = any(word in ("+recipe=text_sst2", "data=text_tsv") for word in words)
    files = {
        "FOLDER": "" if tables else "images",
        "FILE": "text.txt" if text else "points.npz",
        "text.txt": "text.txt",
        "PACK": "text_pack" if text else "image_pack",
        "DIR": "shards",
        "DIR/train-{000..146}.tar": "shards",
        "DIR/val": "shards",
    }
    shortened = ("epochs", "steps", "batch_size", "run.resume", "run.dir", "data.image_size")
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words[1:]}
    ours = {key: value for key, value in given.items() if key not in shortened}
    ours = {key: str(folder / files[value]) if value in files else value for key, value in ours.items()}
    if given.get("+recipe") in ("resnet_cifar", "./mine.yaml") and "data" not in given:
        ours["data.root"] = str(folder / "cifar10")
    if "data.image_size" in given:
        ours["data.image_size"] = "32"
    short = {"epochs": "null", "steps": "12", "batch_size": "10"}
    return [f"{key}={value}" if value else key for key, value in {**ours, **short}.items()]


@pytest.mark.slow
@pytest.mark.parametrize("shown", [shown for shown in TRAINING if shown.page != TASKS], ids=str)
def test_a_training_runs(shown: Shown, small_data: Path, tmp_path: Path) -> None:
    if shown.words[0] != "train" or any(word in EXEMPT for word in shown.words):
        pytest.skip("not trained")
    assert run(["train", *on_small_data(shown.words, small_data), f"run.dir={tmp_path}/run"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_the_first_commands_run(page: str, in_tmp: Path) -> None:
    """Those on the digits that come with the package, one after another, as a newcomer types them."""
    shown = [shown.words for shown in shown_commands() if shown.page == page]
    on_digits = [words for words in shown if "+recipe=resnet_digits" in words]
    assert on_digits
    for words in on_digits:
        plain = [word for word in words if not word.startswith("epochs=")]
        short = [] if {"--cfg", "--dry-run", "find"} & {*words} else ["epochs=2"]
        assert run([*plain, *short]) == 0, words
