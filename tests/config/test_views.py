"""Configs as shown: views, help, copies of recipes, completion."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from ptfast.cli.command_line import run
from ptfast.cli.completion.completion_command import complete
from ptfast.config import multirun
from ptfast.config.compose import compose
from ptfast.config.editors import help as config_help
from ptfast.config.files import paths


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in a folder of its own, without ./conf and ./recipes unless it makes them."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: str, text: str) -> str:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return file


def test_cfg_hides_secrets_and_keeps_references() -> None:
    text = multirun.show_config(
        "job", ["logger.api_key=abc", "run.name=${oc.env:NO_SUCH}", "data=imagefolder"]
    )
    tree = yaml.safe_load(text)
    assert tree["logger"]["api_key"] == "<secret>"
    assert tree["run"]["name"] == "${oc.env:NO_SUCH}"
    assert "hydra" not in tree
    assert "launcher" in yaml.safe_load(multirun.show_config("hydra", []))["hydra"]


def copied(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `ptfast copy` says."""
    run(["copy", name, file])
    return "".join(capsys.readouterr())


def test_copied_recipes_run_and_are_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    copied("resnet_digits", "new/mine.yaml", capsys)
    assert (
        compose(["recipe=new/mine.yaml"]).tree["batch_size"]
        == compose(["recipe=resnet_digits"]).tree["batch_size"]
    )
    assert copied("resnet_cifar", "mine.yaml", capsys).endswith("recipe=./mine.yaml\n")
    assert "ptfast train recipe=./mine.yaml data=imagefolder" in Path("mine.yaml").read_text()
    assert copied("resnet_digits", "recipes/mine.yaml", capsys).endswith("recipe=mine\n")
    (listed,) = (entry for entry in config_help.entries(paths.RECIPES) if entry.name == "mine")
    assert listed.command == "ptfast train recipe=mine"
    assert "not overwritten" in copied("resnet_digits", "new/mine.yaml", capsys)
    assert "Did you mean resnet_digits" in copied("resnet_digit", "other.yaml", capsys)
    assert "Write mine.yaml" in copied("resnet_digits", "mine", capsys)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tr", ["train"]),
        ("train --d", ["--dry-run"]),
        ("train optim", ["optimizer=", "optimizer."]),
        ("train optimizer=adamw_g", ["optimizer=adamw_gpt", "optimizer=adamw_gpt2"]),
        ("train -m optimizer=adam,adamw_g", ["optimizer=adam,adamw_gpt", "optimizer=adam,adamw_gpt2"]),
        ("train optimizer.n", []),
        ("train optimizer=sgd optimizer.n", ["optimizer.nesterov="]),
        ("train recipe=resnet_cifar optimizer.n", ["optimizer.nesterov="]),
        ("train rec", ["recipe="]),
        ("train +recipe=resnet_c", ["+recipe=resnet_cifar"]),
        ("train recipe=./mi", ["recipe=./mine.yaml"]),
        ("train run.na", ["run.name="]),
        ("train batch_", ["batch_size="]),
        ("find ", ["lr", "batch", "workers"]),
        ("find lr --tri", ["--trial-steps"]),
        ("find w", ["workers"]),
        ("find workers batch_", ["batch_size="]),
    ],
)
def test_completion(line: str, found: list[str]) -> None:
    write("mine.yaml", "epochs: 1\n")
    assert complete(line.split(" ")) == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_hook(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "ptfast __complete" in capsys.readouterr().out


def test_help_and_completion_need_neither_hydra_nor_torch() -> None:
    program = (
        "import sys; from ptfast.config.editors import help; "
        "from ptfast.cli.completion.completion_command import complete; "
        "from ptfast.cli.command_line import run; run(['--help']); help.entries('recipe'); "
        "assert not {'hydra', 'omegaconf', 'torch', 'pydantic'} & set(sys.modules); "
        "assert 'optimizer.layer_decay=' in complete(['train', 'optimizer.l']); "
        "assert not {'hydra', 'omegaconf', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
