"""`ptfast ablate`: what is measured, the stack that is built of it, and what is shown and written."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from running import WITH_TESTS

from ptfast.cli.command_line import run
from ptfast.config.applicability import ThisMachine
from ptfast.config.catalogue import CATALOGUE, Need, technique_named
from ptfast.config.read import read_config
from ptfast.core.errors import EXIT_INTERRUPTED
from ptfast.measure.ablate import ablate_run
from ptfast.measure.ablate.ablate_run import COMPILES, choose
from ptfast.measure.ablate.ablation import Step
from ptfast.measure.ablate.ablation_table import stack_lines
from ptfast.measure.trials.comparison import ORDER, Arm, Comparison
from ptfast.measure.trials.session import Session

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


class Planted(Session):
    """A session in which arms take what is planted, but for a little noise, and no process is started."""

    speeds = SPEEDS
    start_speed = 1.0
    """Of the config as it was given."""
    luck = 1.0
    """Speed of the first process of bfloat16, of which a further one has nothing."""
    interrupted_after = 999
    """Comparisons."""

    def prepare(self, base: Arm, *arms: Arm) -> None:
        warm = {"batch_size": 64, "losses": [2.0], "first_step_s": 0.1, "step_s": 0.1, "compiles": False}
        for arm in (base, *arms):
            self.pool.warm[arm] = warm | {"meets": ["images", "convolutions", "batchnorm"]}

    def _measure(self, comparison: Comparison, seconds: float, most_rounds: int) -> None:
        if len(self.comparisons) > self.interrupted_after:
            raise KeyboardInterrupt
        generator = np.random.default_rng(len(self.comparisons))
        comparison.warm = tuple(self.pool.warm[arm] for arm in (comparison.base, comparison.other))
        speeds = [self._speed(arm) for arm in (comparison.base, comparison.other)]
        if len(comparison.starts) == 1 and "precision=bf16" in comparison.other.overrides:
            speeds[1] *= self.luck
        comparison.rounds += [
            [_stretch(arm, generator.normal(1, 0.001) / speeds[arm]) for arm in ORDER] for _ in range(8)
        ]

    def _speed(self, arm: Arm) -> float:
        if not arm.overrides:
            return self.start_speed
        return math.prod(self.speeds.get(word, 1.0) for word in arm.overrides)


def _stretch(arm: int, wall_s: float) -> dict[str, Any]:
    system = {"others_cores": 0.3, "steal_cores": 0.0, "load": 1.0, "mhz": None}
    figures = {"arm": arm, "steps": 10, "samples": 640, "tokens": None, "wall_s": wall_s}
    return figures | {"peak_memory_bytes": 10**8 + arm, "system": system}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> type[Planted]:
    kind = type("PlantedHere", (Planted,), {})
    monkeypatch.setattr(ablate_run, "Session", kind)
    return kind


def ablated(folder: Path, *words: str) -> dict[str, Any]:
    assert run(["ablate", *WORDS, *words, "--only", ONLY, "--out", str(folder)]) == 0
    return json.loads((folder / "measure.json").read_text())


def test_a_promise_below_the_product_of_its_steps_says_why() -> None:
    effect = SimpleNamespace(log_ratio=math.log(1.3), ratio=1.3, interval=lambda: (1.2, 1.4))
    comparison: Any = SimpleNamespace(effect=effect)
    steps = [Step(technique_named("channels last"), comparison, is_kept=True)] * 2
    given = {"added": {"": comparison}, "stack": steps, "over_plain": comparison, "over_start": None}
    for promised, said in ((1.5, True), (1.69, False)):
        ablation: Any = SimpleNamespace(steps=steps, promised=promised, **given)
        assert any("(the steps multiply to 1.69x:" in line for line in stack_lines(ablation)) is said


def test_the_stack_holds_what_is_faster(planted: type[Planted], in_tmp: Path, capsys: Capture) -> None:
    receipt = ablated(in_tmp / "out")
    # Of two alternatives one; nothing slower; nothing that nobody asked for to change the result.
    assert receipt["stack"] == ["fused optimizer step", "channels last"]
    assert receipt["promised_speedup"] == pytest.approx(1.56, rel=0.01)
    shown = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert list(rows).index("bfloat16 autocast") < list(rows).index("fused optimizer step")
    assert "faster per step" in rows["bfloat16 autocast"]
    assert "ptfast race" in shown
    assert "slower" in rows["gradient accumulation"]
    # In the stack as alone: 1.30x and 1.20x.
    assert [rows[name].count("1.30x") for name in ("fused optimizer step", "channels last")] == [2, 0]
    assert rows["channels last"].count("1.20x") == 2
    assert "promised 1.56x over plain, measured again in new processes: 1.56x" in shown
    assert "interference in" in shown
    assert "\n  + foreach" not in shown  # 1.1x alone, it would take the place of 1.3x
    assert (in_tmp / "out/ablate.png").read_bytes().startswith(b"\x89PNG")
    _, best = read_config(["+recipe=./out/best.yaml"])
    assert (best.optimizer.target.kwargs["fused"], best.rewrites.channels_last) == ("auto", True)
    assert (best.precision.mode, best.model.target.kwargs["width"]) == ("fp32", 4)


def test_an_alternative_is_compared_with_the_one_in_the_stack(
    planted: type[Planted], in_tmp: Path, capsys: Capture
) -> None:
    planted.speeds = {**SPEEDS, "optimizer.foreach=true": 1.299}
    receipt = ablated(in_tmp / "out")
    headings = [(each["base"]["name"], each["other"]["name"]) for each in receipt["comparisons"]]
    assert ("stack", "stack + foreach optimizer step for fused optimizer step") in headings
    assert "foreach optimizer step, for fused optimizer step" in capsys.readouterr().out
    assert receipt["stack"] == ["fused optimizer step", "channels last"]


def test_lower_precision_where_the_config_has_some(planted: type[Planted], in_tmp: Path) -> None:
    assert "bfloat16 autocast" in ablated(in_tmp / "out", "preset=fast")["stack"]


def test_a_gain_has_to_show_in_two_pairs_of_processes(planted: type[Planted], in_tmp: Path) -> None:
    planted.speeds, planted.luck = {**SPEEDS, "precision=bf16": 0.99}, 1.5
    receipt = ablated(in_tmp / "out", "preset=fast")
    assert receipt["comparisons"][2]["other"]["name"] == "plain + bfloat16 autocast"
    assert "bfloat16 autocast" not in receipt["stack"]


def test_the_config_as_given_may_be_the_best(planted: type[Planted], in_tmp: Path) -> None:
    planted.start_speed = 3.0
    assert ablated(in_tmp / "out", "seed=7")["best"] == []
    text = (in_tmp / "out/best.yaml").read_text()
    assert "As it was given" in text
    assert "preset" not in text


def test_ctrl_c_keeps_what_was_found(planted: type[Planted], in_tmp: Path, capsys: Capture) -> None:
    planted.interrupted_after = 2
    words = ["ablate", *WORDS, "--only", ONLY, "--out", "out"]
    assert run(words) == EXIT_INTERRUPTED
    shown = capsys.readouterr().out
    assert "interrupted" in shown
    assert sum("reordered" in line for line in shown.splitlines()) == 2
    assert "not measured (not reached): " in shown
    receipt = json.loads((in_tmp / "out/measure.json").read_text())
    assert receipt["interrupted"] is True
    assert [len(each["rounds"]) for each in receipt["comparisons"]] == [8, 8, 0]
    assert not (in_tmp / "out/best.yaml").exists()


def test_every_switch_is_measured_or_left_out_with_a_reason() -> None:
    meets: list[Need] = ["images", "convolutions"]
    chosen, left_out = choose(meets, ThisMachine())
    names = [technique.name for technique in chosen]
    assert sorted([*names, *left_out]) == sorted(technique.name for technique in CATALOGUE if technique.on)
    assert names.index("fused optimizer step") < names.index("gradient accumulation") < names.index("lamb")
    # A short budget reaches the layout before a second loader.
    assert names.index("channels last") < names.index("worker processes")
    assert "dynamic padding" in left_out
    assert left_out["compiled blocks"] in (COMPILES, "no compiler")
    assert "same switch" in left_out["augmented batches from memory"]
    # What is asked for by name is measured whatever its class.
    mixup = technique_named("mixup")
    assert choose(meets, ThisMachine(), only=[mixup]) == ([mixup], {})


def test_a_technique_that_does_not_exist(capsys: Capture) -> None:
    assert run(["ablate", *WORDS, "--only", "fussed-optimizer-step"]) == 2
    assert "Did you mean fused optimizer step?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_ablation_and_ctrl_c(in_tmp: Path) -> None:
    """Measured in processes; interrupted, it says what it found and leaves no process behind."""
    only = "fused-optimizer-step,gradient-accumulation"
    command = [sys.executable, "-m", "ptfast", "ablate", *WORDS, "--only", only, "--out", "out"]
    process = subprocess.Popen(command, env=WITH_TESTS, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines: list[str] = []
    while not any("plain + fused" in line for line in lines):
        lines.append(process.stdout.readline())
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert "interrupted" in rest
    receipt = json.loads(Path("out/measure.json").read_text())
    assert receipt["comparisons"][0]["rounds"]
    left = subprocess.run(["pgrep", "-f", f"trial_rank.* {process.pid}$"], capture_output=True, text=True)
    assert not left.stdout
