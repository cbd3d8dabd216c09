"""`--json` prints objects of the schema in docs/json.md, nothing else; `ptfast doctor` names weaknesses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from forked import Forked, run_command

from ptfast.cli.command_line import run
from ptfast.cli.doctor_command import CHECKS
from ptfast.core import machine
from ptfast.report.terminal.json_lines import as_json, emit

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
SCHEMA = json.loads(PAGE.read_text().split("```json\n")[1].split("```")[0])
TINY = ["data=digits", "model=mlp", "model.hidden=[8]", "steps=4", "log_every=2"]

ERRORS = {
    "train +recipe=resnet_cfar": "C003",
    "train data=digits model=mlp optimizer.lrr=1": "C002",
    "train data=digits model=mlp optimizer.lr=fast": "C004",
    "train data=digits model=mlp batch_size=-1": "C005",
    "train data=digits model=mlp epochs=1 epochs=2": "C006",
    "train data=imagefolder data.root=/nowhere model=mlp": "D001",
    "eval /nowhere": "S004",
    "predict": "C016",
    "compare /nowhere": "C001",
    "pack /nowhere out": "D001",
    "find lrs": "C003",
    "ablate --budget soon": "C005",
    "audit --strikt": "C015",
    "race data=digits": "C016",
    "chaos --kills 0": "C005",
    "techniques turbo": "C003",
    "copy": "C016",
    "launch slurm +recipe=none": "C003",
    "trian": "C015",
}


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What was printed since the last call, checked against the schema."""
    return parsed(capsys.readouterr().out)


def parsed(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        jsonschema.validate(each, SCHEMA)
    return found


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_objects(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = run([*line.split(), "--json"])
    (error,) = (each for each in objects(capsys) if each["event"] == "error")
    assert error["exit_code"] == code > 0
    assert error["code"] == ERRORS[line]
    assert error["message"]


def test_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json", "train", *TINY, f"run.dir={tmp_path / 'run'}"]) == 0
    found = objects(capsys)
    (result,) = (each for each in found if each["event"] == "result")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result.items() >= summary.items()
    assert {"panel", "progress", "evaluation"} <= {each["event"] for each in found}


@pytest.mark.filterwarnings("ignore:.*fork")
def test_ranks_print_objects_too(tmp_path: Path) -> None:
    words = [*TINY, f"run.dir={tmp_path / 'run'}", "parallel=ddp", "parallel.nproc=2"]
    process = Forked(run_command("train", *words, "--json"))
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert [each["steps"] for each in parsed(said) if each["event"] == "result"] == [4]


@pytest.mark.parametrize("line", ["recipes", "techniques precision", "schema", "train --cfg job", "--help"])
def test_listings(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*line.split(), "--json"]) == 0
    assert objects(capsys)


def test_a_secret_is_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "data=digits", "model=mlp", "optimizer.api_tokn=abcdefgh", "--json"]) == 2
    assert "abcdefgh" not in json.dumps(objects(capsys))


def test_prints_and_numbers_that_are_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    with as_json():
        print("mine", end=" ")
        print("own\n\nand a last line", end="")
        emit("row", loss=math.nan)
        print('\n{"event": "mine", "v": 0, "text": "an object"}')
    found = objects(capsys)
    assert [each["event"] for each in found] == ["text", "row", "text", "row"]
    assert [each.get("text") for each in found] == ["mine own", None, "and a last line", "an object"]
    assert found[1]["loss"] is None


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth99")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(machine, "shared_memory", lambda: 2**26)
    assert run(["doctor", "--json"]) == 0
    found = [each for each in objects(capsys) if each["event"] == "finding"]
    remedies = {each["subject"]: each["remedy"] for each in found}
    assert len(remedies) >= len(CHECKS)
    assert "eth99" in remedies["network"]
    assert "RANK" in remedies["launcher"]
    assert "--shm-size" in remedies["shared memory"]
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"shared memory +64 MiB free", shown)
    assert "! shared memory: worker processes hand batches" in shown
