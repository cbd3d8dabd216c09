"""The commands beside training: what they print is what the run was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import records, summary, train

from ptfast.cli.arguments import help_of
from ptfast.cli.command_line import COMMANDS, run
from ptfast.config.files import paths

TINY = ("model.hidden=[16]", "steps=12", "log_every=5", "schedule=constant")

OWN_MODULE = """
import torch
from torch.utils.data import Dataset, IterableDataset
from ptfast.core.protocols import Callback

class Net(torch.nn.Module):
    def __init__(self, input_shape, num_classes, width=8):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(input_shape[0], width), torch.nn.ReLU(),
            torch.nn.Linear(width, num_classes))
    def forward(self, inputs):
        return self.layers(inputs)

class Points(Dataset):
    def __init__(self, size=60):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return torch.full((3,), index / self.size), int(index >= self.size / 2)

class Stream(IterableDataset):
    num_classes = 2
    def __iter__(self):
        for index in range(60):
            yield torch.full((3,), index / 60), int(index >= 30)

class Note(Callback):
    def __init__(self, path):
        self.path = path
    def on_evaluation(self, run, step, split, metrics):
        with open(self.path, "a") as file:
            print(step, split, sorted(metrics), file=file)
"""


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run with averaged weights."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    words = ("optimizer.lr=0.05", "ema.decay=0.9", "precision=bf16", "eval.every=6steps")
    assert train(*TINY, *words, "saving.every=6steps", "saving.keep=2", f"run.dir={folder}") == 0
    return folder


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_eval_repeats_the_figures_of_the_run(
    digits_run: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, *words in ((12, "--checkpoint", "last"), (6, "--checkpoint", "step-6")):
        assert run(["eval", str(digits_run), *words]) == 0
        (metrics,) = lines(capsys.readouterr().out)
        (logged,) = [each for each in records(digits_run) if (each["split"], each["step"]) == ("val", step)]
        logged.pop("epoch")
        assert metrics == logged
    assert run(["eval", str(digits_run)]) == 0
    (metrics,) = lines(capsys.readouterr().out)
    assert {name: metrics[name] for name in summary(digits_run)["best"]} == summary(digits_run)["best"]


def test_the_predictions_in_the_report_are_those_that_are_evaluated(digits_run: Path) -> None:
    shown = json.loads((digits_run / "examples.json").read_text())
    counts = [sum(row[name] for row in shown["classes"]) for name in ("hits", "samples")]
    assert counts[0] / counts[1] == summary(digits_run)["val"]["accuracy"]
    assert (
        sum(each["samples"] for row in shown["classes"] for each in row["mistaken"]) <= counts[1] - counts[0]
    )
    assert len(shown["samples"]) == 12
    assert all(sample["image"].startswith("data:image/png;base64,iVBOR") for sample in shown["samples"])


def test_eval_takes_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "one", "two"]) == 2
    assert "two: one argument too many. Usage: ptfast eval" in capsys.readouterr().err
    assert run(["eval", "runs/a=b", "two"]) == 2
    assert "two: one argument too many. Usage: ptfast eval" in capsys.readouterr().err


def test_eval_takes_overrides_and_names_splits(
    digits_run: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", str(digits_run), "eval.batch_size=7", "--split", "val"]) == 0
    (metrics,) = lines(capsys.readouterr().out)
    assert metrics["accuracy"] == summary(digits_run)["best"]["accuracy"]
    assert metrics["loss"] == pytest.approx(summary(digits_run)["best"]["loss"], rel=1e-3)
    assert run(["eval", str(digits_run), "--split", "test"]) == 2
    assert "There are: val" in capsys.readouterr().err
    assert run(["eval", str(digits_run), "data.val=0"]) == 2
    assert "data.val=10%" in capsys.readouterr().err
    assert run(["eval", "nowhere"]) == 6
    assert run(["eval"]) == 2


def test_predict_reads_arrays_and_pictures(
    digits_run: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    pictures = np.random.default_rng(0).integers(0, 16, (3, 8, 8), np.uint8)
    np.save("digits.npy", pictures)
    Image.fromarray(pictures[0]).save("digit.png")
    assert run(["predict", str(digits_run), "digits.npy"]) == 0
    found = lines(capsys.readouterr().out)
    assert [each["input"] for each in found] == [f"digits.npy[{i}]" for i in range(3)]
    assert all(0 < each["probability"] <= 1 and each["class"] in "0123456789" for each in found)
    assert run(["predict", str(digits_run), "digits.npy", "digit.png", "--out", "found.jsonl"]) == 0
    written = lines(Path("found.jsonl").read_text())
    assert [each["class"] for each in written[:3]] == [each["class"] for each in found]
    assert written[3]["input"] == "digit.png"
    assert run(["predict", str(digits_run), "missing.npy"]) == 3
    assert "error[D001]" in capsys.readouterr().err


def test_predict_goes_on_from_a_prompt(
    digits_run: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("to be or not to be " * 40)
    text = ("data=text_file", "data.path=text.txt", "data.context_length=8", "model=gpt", "model.width=16")
    assert train(*text, "model.depth=1", "steps=12", "run.dir=gpt") == 0
    asked = ["predict", "gpt", "--prompt", "to be ", "--max-new-tokens", "20"]
    capsys.readouterr()
    assert [run(words) for words in (asked, asked, [*asked, "seed=7"])] == [0, 0, 0]
    same, again, other = capsys.readouterr().out.splitlines()
    assert len(same) == 26
    assert same.startswith("to be ")
    assert same == again != other
    assert run([*asked, "--top-k", "1", "--out", "said.txt"]) == 0
    assert Path("said.txt").read_text().startswith("to be ")
    for words, code, said in (
        (["predict", "gpt", "--prompt", "to be?"], 3, "'?' does not occur in the training text"),
        (["predict", "gpt", "text.txt", "--top-k", "3"], 2, "--top-k=3 (command line): is for --prompt"),
        (["predict", "gpt", "text.txt", "--prompt", "to"], 2, "cannot be combined with --prompt"),
        ([*asked, "--temperature", "0"], 2, "expected a number above 0"),
        ([*asked, "--top-k", "1.5"], 2, "expected a whole number above 0"),
        (["predict", str(digits_run), "--prompt", "to"], 2, "needs a language model of text"),
    ):
        assert run(words) == code
        assert said in capsys.readouterr().err


def test_compare_ranks_runs(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*TINY, "run.dir=slow", "optimizer.lr=1e-6") == 0
    assert train(*TINY, "run.dir=fast", "optimizer.lr=0.01") == 0
    capsys.readouterr()
    assert run(["compare", "slow", "fast", "--metric", "val.loss", "--out", "both.html"]) == 0
    out = capsys.readouterr().out
    assert out.index("fast") < out.index("slow")
    assert "0.01" in out
    assert Path("both.html").stat().st_size > 1000
    assert run(["compare"]) == 2


def test_a_recipe_can_be_copied_and_trained(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("resnet_digits", "resnet_cifar", "text_sst2", "char_gpt"))
    assert run(["copy", "resnet_digits", "mine.yaml"]) == 0
    text = Path("mine.yaml").read_text()
    Path("mine.yaml").write_text(text.replace("epochs: ", "steps: 3 # epochs: "))
    assert train("recipe=./mine.yaml", "batch_size=32") == 0
    (folder,) = Path("runs/mine").iterdir()
    assert summary(folder)["steps"] == 3
    assert run(["copy", "resnet_digits", "mine.yaml"]) != 0


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_frozen_config_repeats_the_run(resume: str, in_tmp: Path) -> None:
    assert train(*TINY, "run.dir=a", "seed=3", f"run.resume={resume}") == 0
    assert run(["train", "--config", "a/config.yaml"]) == 0
    (again,) = Path("runs/train").iterdir()
    assert records(again) == records(Path("a"))


def test_views_of_the_config(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert run(["train", "recipe=resnet_digits", "optimizer.lr=0.5", "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert (tree["optimizer"]["lr"], tree["recipe"]) == (0.5, "resnet_digits")
    assert run(["schema", "--out", "schema.json"]) == 0
    assert "optimizer" in json.loads(Path("schema.json").read_text())["properties"]
    assert run(["completion", "bash"]) == 0
    assert "ptfast" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_a_dry_run_leaves_nothing_behind(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(in_tmp))
    monkeypatch.setattr("tempfile.tempdir", None)
    words = ("gradients.accumulate=2", "ema=ema", "precision=bf16", "--dry-run")
    assert run(["train", "recipe=resnet_digits", *words]) == 0
    out = capsys.readouterr().out
    for row in ("parameters", "peak memory", "operations per step", "time per epoch", "disk"):
        assert row in out
    assert "FLOP" in out
    assert list(in_tmp.iterdir()) == []
    assert run(["train", "--dry-run", "steps=1", "model.hidden=[8]"]) == 0


def test_code_of_ones_own(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own_code.py").write_text(OWN_MODULE)
    words = ("model=custom", "model._target_=own_code.Net", "+model.width=4", "data=custom", "batch_size=10")
    points = (*words, "data._target_=own_code.Points", "+data.size=50", "epochs=2")
    callback = "callbacks=[{_target_: own_code.Note, path: seen.txt}]"
    assert train(*points, callback, "run.dir=points") == 0
    assert Path("seen.txt").read_text().splitlines() == [
        f"{step} val ['accuracy', 'loss']" for step in (5, 10)
    ]
    assert train(*words, "data._target_=own_code.Stream", "steps=12", "run.dir=stream") == 0
    assert summary(Path("stream"))["samples"] == 120
    capsys.readouterr()
    # A run directory names code: what the user has run here is theirs, wherever it lies by now.
    Path("points").rename("moved")
    assert run(["eval", "moved"]) == 0
    (metrics,) = lines(capsys.readouterr().out)
    assert metrics["loss"] == summary(Path("moved"))["best"]["loss"]
    assert run(["train", "--config", "moved/", "--cfg", "job"]) == 0
    # Of one that is not, it is imported once the user says so.
    with Path("moved/config.yaml").open("a") as config:
        config.write("# edited\n")
    assert run(["eval", "moved"]) == 2
    assert "trust" in capsys.readouterr().err
    assert run(["eval", "moved", "trust=[own_code]"]) == 0


def test_weights_of_a_run_start_another(in_tmp: Path) -> None:
    assert train(*TINY, "run.dir=a") == 0
    assert train(*TINY, "run.dir=b", "model.weights=a", "optimizer.lr=1e-12") == 0
    assert summary(Path("b"))["val"]["accuracy"] == pytest.approx(summary(Path("a"))["val"]["accuracy"])


def test_the_test_split_is_evaluated_once_at_the_end(in_tmp: Path) -> None:
    rng = np.random.default_rng(0)
    splits = {"train": 80, "test": 30}
    arrays = {f"{name}_x": rng.normal(size=(size, 4)).astype(np.float32) for name, size in splits.items()}
    arrays |= {f"{name}_y": rng.integers(0, 2, size) for name, size in splits.items()}
    np.savez("points.npz", **arrays)
    words = ("data=arrays", "data.path=points.npz", "batch_size=10", "epochs=2", "run.resume=auto")
    assert train(*words, "run.dir=a") == 0
    lines_of = [line["split"] for line in records(Path("a"))]
    assert (lines_of.count("val"), lines_of.count("test"), lines_of[-1]) == (2, 1, "test")
    assert set(summary(Path("a"))["test"]) == {"loss", "accuracy"}
    assert train(*words, "run.dir=b", "epochs=1", "eval.test=false") == 0
    assert "test" not in summary(Path("b"))
    assert run(["eval", "b", "--split", "test"]) == 0


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: ptfast {name}")


def test_help_fits_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 23
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert all(name in re.findall(r"\w+", shown) for name in COMMANDS)
    assert "optimizer" in shown.split()
    assert "--version" in shown
    assert "\n  doctor " in shown


def test_help_names_the_kind_of_each_value_in_80_columns() -> None:
    commands = {**COMMANDS, **{f"find {kind}": one for kind, one in COMMANDS["find"].kinds.items()}}
    for name, command in commands.items():
        assert all(flag.metavar != "VALUE" for flag in command.flags if flag.read), name
        assert all(len(line) <= 80 for line in help_of(name, command).splitlines()), name
    assert "  --out FOLDER  " in help_of("export", COMMANDS["export"])


def test_help_of_a_group_names_its_options_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help", "optimizer"]) == 0
    shown = capsys.readouterr().out
    for told in ("  lamb ", "  layer_decay=null ", "ptfast --help optimizer=OPTION"):
        assert told in shown
    for topic in (*paths.groups(), "run", "task", "train"):
        assert run(["--help", topic]) == 0
        shown = capsys.readouterr().out
        assert len(shown.splitlines()) > 3, topic
        assert topic != "model" or "  lora.rank=null " in shown
    assert run(["--help", "optimiser"]) == 2
    assert "Did you mean ptfast --help optimizer?" in capsys.readouterr().err


def test_nothing_under_torchrun_runs_twice(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("find", "ablate", "audit", "race", "chaos"):
        assert run([name, *["lr"] * (name == "find"), "recipe=resnet_digits"]) == 2
        assert "would measure on its own" in capsys.readouterr().err
    assert run(["train", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("flags", [(), pytest.param(("--json",), marks=pytest.mark.slow)])
def test_a_run_outlives_the_reader_of_its_output(in_tmp: Path, flags: tuple[str, ...]) -> None:
    words = ["train", "epochs=1", "run.dir=a", *flags]
    process = subprocess.Popen([sys.executable, "-m", "ptfast", *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 0
    assert json.loads(Path("a/summary.json").read_text())["status"] == "finished"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_output_that_a_full_disk_did_not_take_fails(flags: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "ptfast", "techniques", *flags]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr == "ptfast: error[E002]: standard output: the disk is full.\n"
