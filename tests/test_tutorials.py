"""The tutorials run as they stand, from their first file to their last command."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from shown import TUTORIALS
from tutorials import (
    cells_of,
    commands_of,
    environment,
    files_of,
    follow,
    give,
    without_ptfast,
)

from ptfast.cli.command_line import read
from ptfast.config.read import read_config

IMAGES = "docs/start/tutorial-images.md"


def test_tutorials_save_the_files_that_they_use() -> None:
    assert len(TUTORIALS) == 5
    for page in TUTORIALS:
        saved = {*files_of(page), *files_of(IMAGES), "exported/load.py"}
        programs = [command.split(" ")[1] for command in commands_of(page) if command.startswith("python ")]
        assert {*programs} <= saved


@pytest.mark.parametrize("page", TUTORIALS)
def test_commands_and_configs_of_tutorials_are_valid(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    commands = [command for command in commands_of(page) if command.startswith("ptfast ")]
    assert commands or cells_of(page)
    for command in commands:
        name, *rest = shlex.split(command)[1:]
        flags = read(name, rest)[2]
        if name in ("train", "launch"):
            read_config([word for word in flags.words if "=" in word])


@pytest.mark.slow
def test_your_images(tmp_path: Path) -> None:
    given = {step.command: step.output for step in follow(IMAGES, tmp_path)}
    assert given["python mistakes.py"].split("\n")[:2] == [
        f"shapes/val/disc/00{number}.png ring 100.0%" for number in (0, 1)
    ]
    accuracy = {run: summary(tmp_path / "runs" / run)["best"]["accuracy"] for run in ("shapes", "signs")}
    assert accuracy["shapes"] == pytest.approx(148 / 150, abs=0.02)
    assert accuracy["signs"] > 0.97
    after_moving = json.loads(given["ptfast eval runs/shapes --split val"].split("\n")[0])
    assert after_moving["accuracy"] > accuracy["shapes"]
    assert given["python exported/load.py 000.png"].startswith("000.png: frame")


@pytest.mark.slow
def test_your_text(tmp_path: Path) -> None:
    *_, last = follow("docs/start/tutorial-text.md", tmp_path)
    assert summary(tmp_path / "runs" / "reviews")["best"]["accuracy"] > 0.97
    assert last.output.startswith("the plot is clever: positive")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = tmp_path / "serve.py"
    server.write_text(server.read_text().replace("8000", str(port)))
    variables = without_ptfast(tmp_path, environment(tmp_path))
    serving = subprocess.Popen([tmp_path / "programs" / "python", server], cwd=tmp_path, env=variables)
    try:
        answer = ask(f"http://127.0.0.1:{port}", b"the plot is clever")
    finally:
        serving.kill()
        serving.wait()
    assert answer["positive"] > answer["negative"]


def ask(address: str, text: bytes) -> dict[str, float]:
    for _ in range(600):
        try:
            with urllib.request.urlopen(address, text, timeout=10) as response:
                return json.loads(response.read())
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def summary(run: Path) -> dict[str, dict[str, float]]:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_your_pytorch_script(tmp_path: Path) -> None:
    *_, last = follow("docs/start/tutorial-script.md", tmp_path, needs=IMAGES)
    assert last.command.startswith("ptfast train recipe=./shapes.yaml")
    for step in ("step1", "step2", "step3"):
        assert summary(tmp_path / "runs" / step)["best"]["accuracy"] > 0.95


@pytest.mark.slow
def test_a_notebook(tmp_path: Path) -> None:
    page = "docs/start/tutorial-notebook.md"
    (tmp_path / "cells.py").write_text(cells_of(page))
    output = give("python cells.py", tmp_path, environment(tmp_path)).output
    best, metrics, widths, predicted, module, error = output.split("-- cell\n")[3:]
    assert best.startswith("{'step': ")
    assert len(metrics.splitlines()) == 6
    assert "\n4 " in widths
    assert predicted.startswith("[{'input': '[0]', 'class': '")
    assert module == "tensor([2, 0])\n"
    assert error.startswith("C002 optimizer.lrr Did you mean optimizer.lr?\n")


@pytest.mark.slow
def test_two_processes_then_slurm(tmp_path: Path) -> None:
    *_, job = follow("docs/start/tutorial-two-gpus.md", tmp_path)
    two, resumed = (summary(tmp_path / "runs" / run) for run in ("two", "stopped"))
    assert resumed["val"]["loss"] == pytest.approx(two["val"]["loss"], rel=1e-3)
    assert "#SBATCH --nodes=2" in job.output
