"""`ptfast ablate`: what is measured, what is selected and confirmed, and what is shown and written."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from running import WITH_TESTS

from ptfast.cli.command_line import run
from ptfast.config.catalogue import CATALOGUE, ThisMachine, technique_named
from ptfast.config.read import read_config
from ptfast.core import devices
from ptfast.core.errors import EXIT_INTERRUPTED
from ptfast.core.sections.section import Need
from ptfast.measure import ablate_run
from ptfast.measure.ablate_run import COMPILES, choose
from ptfast.measure.experiment.laboratory import Laboratory, TrialResult
from ptfast.measure.experiment.warm_parent import Request

Capture = pytest.CaptureFixture[str]
WORDS = ("model=resnet_digits", "model.width=4", "device=cpu")
SPEEDS = {
    "optimizer.fused=auto": 1.3,
    "optimizer.foreach=true": 1.1,
    "rewrites.channels_last=true": 1.2,
    "precision=bf16": 1.5,
    "gradients.accumulate=4": 0.8,
}
"""Planted: how much faster a run with these words trains."""
ONLY = "fused-optimizer-step,foreach-optimizer-step,channels-last,bfloat16-autocast,gradient-accumulation"


class Planted(Laboratory):
    """A laboratory in which trials take what is planted, but for a little noise; no process is started."""

    speeds = SPEEDS
    given_speed = 1.0
    """Of the config as it was given, over plain."""
    fails: str | None = None
    """A word with which a trial fails."""
    interrupted_after = 999
    """Blocks."""

    def __enter__(self) -> Laboratory:
        self.seconds, self._draws = 0.0, random.Random(0)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def left_s(self) -> float:
        return self.budget_s - self.seconds

    def _request(self, request: Request) -> list[TrialResult]:
        self.seconds += 4.0 if request.timed_s else 0.5
        if request.timed_s and len(self.blocks) >= self.interrupted_after:
            raise KeyboardInterrupt
        return [self._measured(words, request) for words in request.configs]

    def _measured(self, words: Sequence[str], request: Request) -> TrialResult:
        if self.fails in words:
            return TrialResult(tuple(words), math.nan, "it is not to be had")
        speed = math.prod(factor for word, factor in self.speeds.items() if word in words)
        if "preset=plain" not in words:
            speed = self.given_speed
        facts = {"meets": ["images", "convolutions", "batchnorm"], "loss": 2.0, "peak_memory_bytes": 2**30}
        time = math.log(1e-3 / speed) + self._draws.gauss(0, 0.01)
        return TrialResult(tuple(words), time if request.timed_s else math.nan, "", facts)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Planted]:
    (tmp_path / "cpuinfo").write_text("flags: avx512_bf16\n")
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    kind = type("PlantedHere", (Planted,), {})
    monkeypatch.setattr(ablate_run, "Laboratory", kind)
    return kind


def ablated(folder: Path, *words: str, only: str = ONLY, budget: str = "4m") -> dict[str, Any]:
    assert run(["ablate", *WORDS, *words, "--only", only, "--budget", budget, "--out", str(folder)]) == 0
    return json.loads((folder / "measure.json").read_text())


def test_the_selected_config_has_what_is_faster(
    planted: type[Planted], in_tmp: Path, capsys: Capture
) -> None:
    record = ablated(in_tmp / "out")
    # One of two alternatives, nothing slower, and nothing that changes the result without being asked for.
    assert record["selected"] == ["fused optimizer step", "channels last"]
    assert record["predicted_speedup"] == pytest.approx(1.56, rel=0.02)
    assert record["confirmed"]["over_plain"]["ratio"] == pytest.approx(1.56, rel=0.02)
    found = {each["technique"]: each for each in record["findings"]}
    truth = {"bfloat16 autocast": 1.5, "foreach optimizer step": 1.1, "channels last": 1.2}
    for name, speed in truth.items():
        assert found[name]["effect"]["ratio"] == pytest.approx(speed, rel=0.02)
        assert found[name]["verdict"] == "faster"
    # Trained on top of the selected config, not in the plan.
    assert found["gradient accumulation"]["is_apart"]
    assert found["gradient accumulation"]["verdict"] == "slower"
    shown = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert list(rows).index("bfloat16 autocast") < list(rows).index("fused optimizer step")
    assert "faster per step" in rows["bfloat16 autocast"]
    assert "ptfast race" in shown
    assert "processes of one config differ by" in shown
    assert "over plain: predicted 1.5" in shown
    _, best = read_config(["recipe=./out/best.yaml"])
    assert (best.optimizer.target.kwargs["fused"], best.rewrites.channels_last) == ("auto", True)
    assert (best.precision.mode, best.model.target.kwargs["width"]) == ("fp32", 4)


def test_what_the_config_has_stays_unless_it_is_clearly_slower(planted: type[Planted], in_tmp: Path) -> None:
    planted.speeds = {"backend.reuse_memory=true": 0.998, "rewrites.bias_before_norm=false": 0.9}
    only = "memory-reuse,no-bias-before-batch-norm,denormals-flushed-to-zero,channels-last"
    record = ablated(in_tmp / "out", "preset=safe", only=only)
    assert set(record["selected"]) == {"memory reuse", "denormals flushed to zero"}


def test_an_optimizer_is_measured_where_it_is_named(planted: type[Planted], in_tmp: Path) -> None:
    planted.speeds = {"optimizer.foreach=true": 1.3, "optimizer=lamb": 0.8}
    record = ablated(in_tmp / "out", only="channels-last,lamb")
    found = {each["technique"]: each for each in record["findings"]}
    assert found["lamb"]["effect"]["ratio"] == pytest.approx(0.8, rel=0.03)
    # Not every optimizer takes the step kernel of the selected config.
    found = ablated(in_tmp / "other", only="foreach-optimizer-step,muon")["findings"]
    assert [each["why"] for each in found] == ["", "it cannot be combined with the selected config"]


def test_lower_precision_where_the_config_has_some(planted: type[Planted], in_tmp: Path) -> None:
    assert "bfloat16 autocast" in ablated(in_tmp / "out", "preset=fast")["selected"]


def test_a_switch_that_fails_alone_leaves_the_plan_with_its_reason(
    planted: type[Planted], in_tmp: Path, capsys: Capture
) -> None:
    planted.fails = "rewrites.channels_last=true"
    assert ablated(in_tmp / "out")["selected"] == ["fused optimizer step"]
    assert "not measured (it is not to be had): channels last" in capsys.readouterr().out


def test_the_config_as_given_may_be_the_best(planted: type[Planted], in_tmp: Path) -> None:
    planted.given_speed = 3.0
    assert ablated(in_tmp / "out", "seed=7")["best"] == []
    text = (in_tmp / "out/best.yaml").read_text()
    assert "over the config as given" in text
    assert "preset" not in text


@pytest.mark.parametrize("blocks", [0, 6])
def test_ctrl_c_keeps_what_was_found(
    blocks: int, planted: type[Planted], in_tmp: Path, capsys: Capture
) -> None:
    planted.interrupted_after = blocks
    assert run(["ablate", *WORDS, "--only", ONLY, "--out", "out"]) == EXIT_INTERRUPTED
    shown = capsys.readouterr().out
    assert "interrupted" in shown
    record = json.loads((in_tmp / "out/measure.json").read_text())
    assert record["interrupted"] is True
    assert len(record["blocks"]) == blocks
    assert not (in_tmp / "out/best.yaml").exists()
    told = [line for line in shown.splitlines() if "reordered" in line]
    assert any("channels last" in line for line in told) == (blocks > 0)


def test_a_budget_that_is_too_small_is_rejected_before_it_is_spent(
    planted: type[Planted], in_tmp: Path, capsys: Capture
) -> None:
    for budget in ("20s", "31s"):
        assert run(["ablate", *WORDS, "--budget", budget, "--out", "out"]) == 2
        said = capsys.readouterr()
        assert "too short for this recipe: it needs about" in said.err
        assert "Give --budget" in said.err
    assert not (in_tmp / "out").exists()


def test_the_budget_that_is_told_reaches_what_was_missed(planted: type[Planted], in_tmp: Path) -> None:
    only = "fused-optimizer-step,channels-last,gradient-accumulation,lars,lamb,nadam,radam,novograd,adam"
    findings = ablated(in_tmp / "short", only=only, budget="44s")["findings"]
    missed = {each["technique"]: each["why"] for each in findings if each["why"]}
    assert missed
    assert "gradient accumulation" not in missed
    (told,) = set(missed.values())
    budget = told.removeprefix("not reached: give --budget ")
    findings = ablated(in_tmp / "enough", only=only, budget=budget)["findings"]
    assert not [each["technique"] for each in findings if each["why"]]


def test_every_switch_is_measured_or_left_out_with_a_reason() -> None:
    meets: list[Need] = ["images", "convolutions"]
    chosen, left_out = choose(meets, ThisMachine())
    names = [technique.name for technique in chosen]
    assert sorted([*names, *left_out]) == sorted(technique.name for technique in CATALOGUE if technique.on)
    assert "dynamic padding" in left_out
    assert left_out["compiled blocks"] in (COMPILES, "no compiler")
    assert "same switch" in left_out["augmented batches from memory"]
    assert "ptfast race" in left_out["lamb"]
    # What is asked for by name is measured whatever its class.
    mixup = technique_named("mixup")
    assert choose(meets, ThisMachine(), only=[mixup]) == ([mixup], {})


def test_a_technique_that_does_not_exist(capsys: Capture) -> None:
    assert run(["ablate", *WORDS, "--only", "fussed-optimizer-step"]) == 2
    assert "Did you mean fused optimizer step?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_ablation_and_ctrl_c(in_tmp: Path) -> None:
    """Measured in processes; interrupted, it says what it found and leaves no process behind."""
    only = "fused-optimizer-step,channels-last"
    command = [sys.executable, "-m", "ptfast", "ablate", *WORDS, "--only", only, "--out", "out"]
    process = subprocess.Popen(command, env=WITH_TESTS, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines: list[str] = []
    while not any("switches vary in every trial" in line for line in lines):
        lines.append(process.stdout.readline())
    time.sleep(30)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert "interrupted" in rest
    record = json.loads(Path("out/measure.json").read_text())
    assert record["blocks"][0][0]["time"]
    places = Path("/proc").glob("[0-9]*/cwd")
    assert [place.parent.name for place in places if os.path.realpath(place) == str(in_tmp)] == [
        str(os.getpid())
    ]
