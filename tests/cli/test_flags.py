"""Flags of the commands: each is honoured, also beside another, or refused."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from ptfast.cli.command_line import run
from ptfast.config.compose import compose
from ptfast.config.files.frozen import freeze

ACTIONS = {"-m": ("-m", "seed=0,1"), "--dry-run": ("--dry-run",), "--cfg": ("--cfg", "job")}
ACTIONS |= {"--config": ("--config", "config.yaml")}
HONOURED = {("--dry-run", "--config"), ("--cfg", "--config")}


@pytest.mark.parametrize(
    ("first", "second"), [pair for pair in itertools.combinations(ACTIONS, 2) if pair not in HONOURED]
)
def test_flags_of_which_one_would_be_ignored(
    first: str, second: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *ACTIONS[first], *ACTIONS[second]]) == 2
    printed = capsys.readouterr()
    assert "error[C011]" in printed.err
    assert printed.out == ""


def test_a_whole_config_is_shown_and_tried(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    freeze(compose(["batch_size=32", "model.hidden=[8]"]), Path("config.yaml"))
    assert run(["train", "--config", "config.yaml", "--cfg", "job", "seed=5"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert (tree["batch_size"], tree["model"]["hidden"], tree["seed"]) == (32, [8], 5)
    assert run(["train", "--config", "config.yaml", "--cfg", "hydra"]) == 2
    assert "--cfg (command line): cannot be combined with --config" in capsys.readouterr().err
    assert run(["train", "--config", "config.yaml", "--dry-run"]) == 0
    assert re.search(r"parameters +610\n", capsys.readouterr().out)
    assert run(["train", "--config", "config.yaml", "--config", "other.yaml"]) == 2
    assert "error[C006]" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["recipes now", "schema x", "copy a b c", "completion bash zsh"])
def test_arguments_that_nothing_would_read(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    assert "error[C001]" in capsys.readouterr().err
