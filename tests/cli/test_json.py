"""`--json` prints only objects of the schema in docs/reference/; `ptfast doctor` names weaknesses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from bad_configs import EXIT_CODES

from ptfast.cli.command_line import run
from ptfast.cli.commands import COMMANDS
from ptfast.cli.doctor_command import CHECKS
from ptfast.config.compose import compose
from ptfast.core import machine
from ptfast.core.errors import DataError
from ptfast.launch.launcher import reported_failure
from ptfast.launch.rank_main import report_failure
from ptfast.report.terminal.json_lines import as_json, emit, emit_error

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/reference/json-lines.schema.json").read_text())
TINY = ["data=digits", "model=mlp", "model.hidden=[8]", "steps=4", "log_every=2"]

TYPED = "command line"
ERRORS: dict[str, tuple[str, str | None, str | None, str | None, str | None]] = {
    "train recipe=resnet_cfar": ("C003", "recipe", "resnet_cfar", TYPED, "Did you mean resnet_cifar?"),
    "train optimizer.lrr=1": ("C002", "optimizer.lrr", "1", TYPED, "Did you mean optimizer.lr?"),
    "train optimizer.lr=fast": ("C004", "optimizer.lr", "fast", TYPED, None),
    "train batch_size=-1": ("C005", "batch_size", "-1", TYPED, None),
    "train epochs=1 epochs=2": ("C006", "epochs", None, TYPED, "Keep one of them"),
    "train data=imagefolder data.root=/nowhere": ("D001", "data.root", "/nowhere", TYPED, "Set data.root to"),
    "train optimizer=sdg": ("C003", "optimizer", "sdg", TYPED, "Did you mean optimizer=sgd?"),
    "train epochs": ("C001", "epochs", None, TYPED, "Write epochs=VALUE"),
    "train epochs:3": ("C001", "epochs:3", None, TYPED, "Write epochs=3"),
    "train recipe=./bad.yaml": ("C007", None, None, "bad.yaml:2:1", None),
    "train seed=${nope}": ("C008", "seed", "${nope}", TYPED, None),
    "train seed=[1": ("C001", "seed", "[1", TYPED, "Check quotes"),
    "train model._target_=os.system": ("C009", "model._target_", "os.system", TYPED, None),
    "train data=custom": (
        "C016",
        "data._target_",
        None,
        "conf/data/custom.yaml:11",
        "Give data._target_=VALUE",
    ),
    "train batch_size=10 micro_batches=3": ("C010", "batch_size", "10", TYPED, "are 9 and 12"),
    "train run.name=../x": ("C013", "run.name", "../x", TYPED, "Use letters, digits"),
    "train gradients.clip_norm=1 gradients.clip_value=1": (
        *("C011", "gradients.clip_value", "1.0", TYPED, "Set one of the two to null"),
    ),
    "train optimizer.lr=0.1,0.2": ("C014", "optimizer.lr", "0.1,0.2", TYPED, "Add -m to sweep"),
    "train -m hydra/sweeper=nope seed=1,2": (
        "C003",
        "hydra/sweeper",
        "nope",
        TYPED,
        "Options of hydra/sweeper",
    ),
    "train -m seed=range(3,1)": ("C014", "seed", "range(3,1)", TYPED, "Give at least one"),
    "train precision=tf32 device=cpu": ("E005", "precision", "tf32", TYPED, "Use precision=fp32"),
    "train model.weights=/nowhere": ("S004", "model.weights", "/nowhere", TYPED, "Give a .pt"),
    "train run.dir=RUN": ("C011", "run.dir", "RUN", TYPED, "run.resume=auto"),
    "train run.resume=/nowhere": ("S004", "/nowhere", None, None, "Give a run directory"),
    "train --config /nowhere": ("C007", None, None, "/nowhere", None),
    "train --dry-run --cfg job": ("C011", "--cfg", None, TYPED, "Give one of the two"),
    "train --budgt 3": ("C015", "--budgt", None, TYPED, "Flags: --multirun"),
    "train --config": ("C015", "--config", None, TYPED, "Write --config VALUE"),
    "train hydra.run.dir=x": ("C011", "hydra.run.dir", "x", TYPED, "Use run.dir=x"),
    "train data=arrays data.path=one.npz": ("D005", "data.path", "one.npz", TYPED, None),
    "train task=clasification": ("C003", "task", "clasification", TYPED, "Did you mean classification?"),
    "train schedule.warmup=9999": ("C011", "schedule.warmup", "9999steps", TYPED, None),
    "train callbacks=[nope.Call]": ("C009", "callbacks.0._target_", "nope.Call", TYPED, "Is nope installed"),
    "eval": ("C016", "eval", None, None, "Usage: ptfast eval"),
    "eval /nowhere": ("S004", "/nowhere", None, None, "Give a run directory"),
    "eval RUN eval.flipp=true": ("C002", "eval.flipp", "True", TYPED, "Did you mean eval.flip?"),
    "predict": ("C016", "predict", None, None, "Usage: ptfast predict"),
    "predict RUN /nowhere": ("D001", "PATH", "/nowhere", None, None),
    "predict RUN --prompt x": ("C011", "--prompt", None, TYPED, "Give files to predict instead"),
    "export RUN": ("C016", "--out", None, TYPED, "Usage: ptfast export"),
    "export RUN --out empty": ("C011", "--out", "empty", TYPED, "Choose another folder"),
    "export RUN --out new --weights best": ("C005", "--weights", "best", TYPED, "Use averaged or last"),
    "compare empty": ("C001", "empty", None, None, "Name run directories"),
    "compare RUN --metric val.acuracy": ("C005", "--metric", "val.acuracy", TYPED, "val.accuracy"),
    "pack /nowhere out": ("D001", "SRC", "/nowhere", None, None),
    "pack empty out": ("D002", "SRC", "empty", None, "class folders"),
    "pack empty out --size big": ("C005", "--size", "big", TYPED, "Give pixels, or keep"),
    "pack --verify empty": ("D001", "DST", "empty", None, None),
    "find": ("C016", "find", None, TYPED, "Usage: ptfast find"),
    "find lrs": ("C003", "find", "lrs", TYPED, "Did you mean lr?"),
    "find lr --steps 3": ("C005", "--steps", "3", TYPED, None),
    "find workers optimizer.lrr=1": ("C002", "optimizer.lrr", "1", TYPED, "Did you mean optimizer.lr?"),
    "ablate --budget soon": ("C005", "--budget", "soon", TYPED, None),
    "ablate --only fussed": ("C003", "--only", "fussed", TYPED, "ptfast techniques lists them"),
    "audit --strikt": ("C015", "--strikt", None, TYPED, "Did you mean --strict?"),
    "chaos --kills 0": ("C005", "--kills", "0", TYPED, None),
    "race data=digits": ("C016", "--target", None, TYPED, "Usage: ptfast race"),
    "race schedule=cosine,onecycle --target best": ("C005", "--target", "best", TYPED, "Write metric=value"),
    "doctor now": ("C001", "now", None, None, "Usage: ptfast doctor"),
    "recipes all": ("C001", "all", None, None, "Usage: ptfast recipes"),
    "techniques turbo": ("C003", "turbo", None, None, "Families: dataloader"),
    "copy": ("C016", "copy", None, None, "Usage: ptfast copy"),
    "copy resnet_cifr mine.yaml": ("C003", "resnet_cifr", None, None, "Did you mean resnet_cifar?"),
    "copy resnet_cifar bad.yaml": ("E001", "bad.yaml", None, None, "Choose another name"),
    "schema --out /nowhere/x.json": ("E001", "--out", "/nowhere/x.json", TYPED, None),
    "completion tcsh": ("C015", "tcsh", None, None, "Name bash, zsh or fish"),
    "launch slrum": ("C003", "launch", "slrum", TYPED, "Did you mean slurm?"),
    "launch slurm recipe=none": ("C003", "recipe", "none", TYPED, "Recipes: char_gpt"),
    "launch slurm --nodes none": ("C005", "--nodes", "none", TYPED, None),
    "trian": ("C015", "trian", None, None, "Did you mean train?"),
    "--help optimzer": ("C003", "optimzer", None, None, "Did you mean ptfast --help optimizer?"),
}
"""Command lines, and the code, key, value, place and suggestion of their errors."""


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """What was printed since the last call, checked against the schema."""
    return parsed(capsys.readouterr().out)


def parsed(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        jsonschema.validate(each, SCHEMA)
    return found


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that has ended."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    assert run(["train", *TINY, f"run.dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize("line", ERRORS)
def test_errors_are_objects(
    line: str, tiny_run: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("RUN").symlink_to(tiny_run)
    Path("empty").mkdir()
    Path("bad.yaml").write_text("epochs: 1\n\tseed: 2\n")
    Path("one.npz").write_bytes(b"no arrays")
    capsys.readouterr()
    exit_code = run([*line.split(" "), "--json"])
    (error,) = (each for each in objects(capsys) if each["event"] == "error")
    code, key, value, place, suggestion = ERRORS[line]
    assert error["exit_code"] == exit_code == EXIT_CODES[code[0]]
    assert (error["code"], error["key"], error["value"], error["place"]) == (code, key, value, place)
    assert (suggestion or "") in (error["suggestion"] or "")
    assert (suggestion is None) == (error["suggestion"] is None)
    assert error["what"] in error["message"]


def test_every_command_has_errors() -> None:
    assert {line.split()[0] for line in ERRORS} >= {*COMMANDS}


def test_a_failure_of_a_rank_keeps_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_failure(tmp_path, DataError("D001", "no such folder", key="data.root", value="x"))
    reported = reported_failure(tmp_path, compose(["data=imagefolder", "data.root=x"]))
    assert reported is not None
    with as_json():
        emit_error(reported)
    (error,) = objects(capsys)
    assert (error["code"], error["key"], error["value"]) == ("D001", "data.root", "x")
    assert (error["place"], error["exit_code"]) == (TYPED, 3)


@pytest.mark.slow
def test_a_race_says_which_figures_there_are(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "race schedule=cosine,onecycle steps=4 --target acuracy=0.9 --json"
    assert run(line.split()) == 2
    error = [each for each in objects(capsys) if each["event"] == "error"][-1]
    assert (error["code"], error["key"], error["value"]) == ("C005", "--target", "acuracy")
    assert "accuracy" in error["suggestion"]


def test_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json", "train", *TINY, f"run.dir={tmp_path / 'run'}"]) == 0
    found = objects(capsys)
    (result,) = (each for each in found if each["event"] == "result")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result.items() >= summary.items()
    assert {"panel", "choice", "progress", "evaluation"} <= {each["event"] for each in found}


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
    monkeypatch.setattr(machine, "shared_memory", lambda: 2**26)
    assert run(["doctor", "--json"]) == 0
    found = [each for each in objects(capsys) if each["event"] == "finding"]
    remedies = {each["subject"]: each["remedy"] for each in found}
    assert len(remedies) >= len(CHECKS)
    assert "eth99" in remedies["network"]
    assert "--shm-size" in remedies["shared memory"]
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"shared memory +64 MiB free", shown)
    assert "! shared memory: worker processes pass batches" in shown
