"""The search for the fastest settings: what it tries, what it promises, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import train
from toys import SMALL

from ptfast.config.applicability import ThisMachine
from ptfast.config.read import read_config
from ptfast.core.devices import machine_name
from ptfast.core.run import Resolved
from ptfast.measure.batch.critical_batch import Critical
from ptfast.measure.batch.noise_forecast import NoiseForecast
from ptfast.measure.trials.comparison import ORDER, Arm, Comparison
from ptfast.measure.tune import batch_choice, tuner
from ptfast.measure.tune.tuner import dimensions

RESOLVED = Resolved(
    device="cpu", num_ranks=1, threads=1, dataloader="memory", optimizer="fused", channels_last=True
)
WORTH = {"precision=amp": 2.0, "rewrites.channels_last=false": 0.8, "optimizer.fused=false": 1.2}
WORTH |= {"batch_size=32": 0.7, "batch_size=128": 1.2, "batch_size=256": 1.5}
"""How much faster each setting is here; all others are as fast as the start."""


class Measured:
    """A session whose measurements are computed."""

    least_s = 6.0

    def __init__(self, arguments: Sequence[str], *, budget_s: float, folder: Path) -> None:
        self.left_s, self.comparisons = budget_s, list[Comparison]()
        self.pool, self.alive, self.arguments = self, set[Arm](), list(arguments)

    def config(self, arm: Arm) -> Any:
        return read_config([*self.arguments, *arm.overrides])

    @property
    def step_s(self) -> dict[Arm, float]:
        return dict.fromkeys(self.alive, 0.01)

    def close(self) -> None:
        self.alive.clear()

    @property
    def warm(self) -> dict[Arm, Any]:
        return {Arm("as it is"): {"resolved": vars(RESOLVED)}}

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def calibrate(self, base: Arm) -> None:
        self.left_s -= 10

    def prepare(self, base: Arm, *arms: Arm) -> None:
        self.alive |= {base, *arms}

    def describe_floor(self) -> list[str]:
        return []

    def write_receipt(self, path: Path, command: Sequence[str]) -> None:
        path.write_text("{}")

    def compare(
        self, base: Arm, other: Arm, *, seconds: float | None = None, fresh: bool = False
    ) -> Comparison:
        self.left_s -= 6
        ours, its = (math.prod(WORTH.get(word, 1.0) for word in arm.overrides) for arm in (base, other))
        worth = (its / ours) ** (LUCK if fresh else 1.0)
        comparison = Comparison(base, other)
        for noise in (0.99, 1.0, 1.01, 1.0, 0.995):
            walls = [1.0 if arm == 0 else noise / worth for arm in ORDER]
            comparison.rounds.append([{"samples": 1, "tokens": None, "wall_s": wall} for wall in walls])
        self.comparisons.append(comparison)
        return comparison


LUCK = 1.0


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tuner, "Session", Measured)
    monkeypatch.setattr(ThisMachine, "lacks", lambda self, need: None if need == "half" else "no")
    words = ["+recipe=resnet_digits"]
    config = read_config(words)[1]

    def run(budget_s: float, **flags: Any) -> str:
        file = tmp_path / "tuned.yaml"
        assert tuner.tune(config, words, budget_s=budget_s, write=file, out=tmp_path / "out", **flags) == 0
        return file.read_text() if file.exists() else ""

    return run


def test_settings_that_gain_are_put_together(tuned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    text = tuned(1000.0)
    shown = capsys.readouterr().out
    assert "promised 2.40x, measured again 2.40x" in shown
    assert "precision: amp" in text
    assert "fused: false" in text
    assert "channels_last" not in text
    assert f"tuned_for: {machine_name('auto')}" in text
    assert "# precision=amp: 2.00x".replace("# ", "#   ") in text
    assert [line.split()[0] for line in shown.splitlines() if "slower" in line or "0.80x" in line] == [
        "rewrites.channels_last=false"
    ]


def test_what_is_no_faster_measured_again_is_not_written(
    tuned: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(globals(), "LUCK", 0.0)
    assert not tuned(1000.0)
    assert "no recipe is written" in capsys.readouterr().out


def test_a_short_budget_names_what_it_did_not_reach(tuned: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(40.0)
    assert "not reached, give a longer --budget: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("critical", "size", "lr"),
    [
        # 256 samples need 1.09 times as many as 64 in all, for 1.5 times as many a second: AdamW's rate goes
        # with the root of 3.66.
        (Critical(2000.0, 50.0, 1900.0), 256, 0.0191),
        # Of noise that is known to be above that only, the same.
        (Critical(None, None, 2000.0), 256, 0.0191),
        # 2.7 times as many samples, and 1.7: not sooner.
        (Critical(50.0, 5.0, 40.0), None, None),
        # Sooner by a hair, in noise that might be half as large.
        (Critical(420.0, 200.0, 40.0), None, None),
        (None, None, None),
    ],
)
def test_a_batch_is_taken_only_where_the_noise_lets_it_gain(
    critical: Critical | None,
    size: int | None,
    lr: float | None,
    tuned: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    forecast = NoiseForecast(64, critical=critical)
    monkeypatch.setattr(batch_choice, "forecast_noise", lambda search, num_steps: forecast)
    text = tuned(1000.0, batches=True)
    assert "precision: amp" in text
    found = yaml.safe_load(text)
    assert (found.get("batch_size"), found["optimizer"].get("lr")) == (size, lr)
    assert ("no other batch is clearly sooner" in capsys.readouterr().out) is (size is None)
    assert ("batch_size=256: 1.50x" in text) is (size is not None)


def test_settings_that_the_run_has_are_not_tried() -> None:
    config = read_config(["+recipe=resnet_digits"])[1]
    names = dimensions(config, RESOLVED, ThisMachine(), compiles=False)
    assert names["layout"] == [("rewrites.channels_last=false",)]
    assert ("backend.threads=1",) not in names.get("threads", ())
    assert not any("dataloader=memory" in words[:1] and len(words) == 1 for words in names["loader"])
    assert "compile" not in names
    flat = replace(RESOLVED, channels_last=None, dataloader="packed")
    fewer = dimensions(config, flat, ThisMachine(), compiles=False)
    assert not {*fewer} & {"layout", "loader"}


def test_a_recipe_tuned_elsewhere_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for machine, warns in (("a Cray-1, 1 core", True), (machine_name("cpu"), False)):
        train(f"run.dir={tmp_path / machine[:2]}", *SMALL, "epochs=null", "steps=1", f"tuned_for='{machine}'")
        assert ("tuned for a Cray-1" in capsys.readouterr().out) is warns
