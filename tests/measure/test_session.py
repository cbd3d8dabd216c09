"""Sessions of paired trials: their A/A run, comparisons, receipt, and what goes wrong in them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ptfast.core.errors import ConfigError, MachineError
from ptfast.core.machine import processor_time_of
from ptfast.measure.trials import system_load
from ptfast.measure.trials.comparison import Arm, Comparison
from ptfast.measure.trials.session import Session
from ptfast.measure.trials.system_load import ProcessorTimes, interference
from ptfast.measure.trials.verdicts import Effect, ProcessSpread

SMALL = ("model=mlp", "model.hidden=[8]", "device=cpu", "dataloader=memory")
BASE, LARGE = Arm("base"), Arm("large", ("model.hidden=[1500,1500]",))


def stretch(arm: int, wall_s: float, **figures: Any) -> dict[str, Any]:
    """What a stretch may report."""
    return {
        "arm": arm,
        "steps": 10,
        "samples": 100,
        "tokens": None,
        "wall_s": wall_s,
        "peak_memory_bytes": 1000 + arm,
        "system": {"others_cores": 0.0, "steal_cores": 0.0, "load": 1.0, "mhz": None},
    } | figures


def test_a_session_measures_judges_and_keeps_it_all(tmp_path: Path) -> None:
    rounds: list[Comparison] = []
    with Session(SMALL, budget_s=1e6, folder=tmp_path, stretch_s=0.02, on_round=rounds.append) as session:
        aa = session.calibrate(BASE)
        assert len(aa.rounds) == len(rounds) == 8
        assert "smallest effect" in session.describe_floor()[1]
        large = session.compare(BASE, LARGE)
        typo = session.compare(BASE, Arm("typo", ("model.hiden=[8]",)))
        same = session.compare(BASE, Arm("same", ("optimizer.fused=auto",)))
        diverges = session.compare(BASE, Arm("diverges", ("optimizer=sgd", "optimizer.lr=1e30")))
        processes = [process._process for process in session.pool.alive.values()]
        session.write_receipt(tmp_path / "measure.json", ["ptfast", "ablate", "logger.api_key=abc"])
    assert large.verdict == "slower"
    assert large.effect is not None
    assert large.effect.ratio < 0.5
    assert large.memory_change_bytes > 10e6
    assert {typo.verdict, same.verdict, diverges.verdict} == {"not applicable"}
    assert "model.hidden" in typo.why
    assert same.why == "changes nothing in this config"
    assert "loss is" in diverges.why
    first = aa.rounds[0]
    assert [each["arm"] for each in first] == [0, 1, 1, 0]
    # Two equal arms begin with the same batches, to the same bits.
    assert aa.loss_drift == 0
    assert len({each["steps"] for each in first}) == 1
    assert processes
    assert all(process.poll() is not None for process in processes)
    receipt = json.loads((tmp_path / "measure.json").read_text())
    assert "abc" not in json.dumps(receipt)
    assert receipt["environment"]["torch"]
    assert [each["verdict"] for each in receipt["comparisons"]][:2] == ["slower", "not applicable"]
    assert len(receipt["comparisons"][0]["rounds"][0]) == 4


def test_a_budget_too_small_for_a_trial(tmp_path: Path) -> None:
    with (
        Session(SMALL, budget_s=0.5, folder=tmp_path) as session,
        pytest.raises(ConfigError, match=r"too little.*Give \d+s or more"),
    ):
        session.calibrate(BASE)
    assert not session.pool.alive


def test_time_is_held_against_what_was_processed() -> None:
    """Twice the batch in 1.6 times the time is 1.25x, and padding is no work done."""
    comparison = Comparison(BASE, LARGE)
    comparison.rounds = [[stretch(0, 1.0), *[stretch(1, 1.6, samples=200)] * 2, stretch(0, 1.0)]] * 4
    assert comparison.unit == "samples"
    assert comparison.process_effect is not None
    assert comparison.process_effect.ratio == pytest.approx(1.25)
    tokens = [[stretch(0, 1.0, tokens=80), *[stretch(1, 0.8, tokens=40)] * 2, stretch(0, 1.0, tokens=80)]] * 4
    comparison.rounds = tokens
    assert comparison.unit == "tokens"
    assert comparison.process_effect.ratio == pytest.approx(0.625)


def test_rounds_end_once_processes_differ_by_more_than_they_do(tmp_path: Path) -> None:
    session = Session(SMALL, budget_s=1.0, folder=tmp_path)
    walls = (1.0, 1.02, 0.98, 1.01, 0.97)
    rounds = [[stretch(0, 1.0), *[stretch(1, wall)] * 2, stretch(0, 1.0)] for wall in walls]
    assert not session._is_settled(Comparison(BASE, LARGE, session.spread, rounds))
    session.spread = ProcessSpread((Effect(0.2, 0.01, 7),))
    assert session._is_settled(Comparison(BASE, LARGE, session.spread, rounds))
    assert not session._is_settled(Comparison(BASE, LARGE, session.spread, rounds[:3]))


class Pool:
    """Processes that are made up: each takes its own time, for as long as it lives."""

    def __init__(self, *process_s: float) -> None:
        self.process_s, self.alive = iter(process_s), dict[Arm, float]()
        self.lost: dict[Arm, Exception] = {}
        self.warm, self.step_s = (dict.fromkeys((BASE, LARGE), value) for value in ({"batch_size": 1}, 0.1))

    def config(self, arm: Arm) -> Any:
        raise ConfigError("C001", "there is none")

    def prepare(self, *arms: Arm) -> None:
        self.alive |= {arm: next(self.process_s) for arm in arms if arm not in self.alive}

    def end(self, *arms: Arm) -> None:
        for arm in arms:
            self.alive.pop(arm, None)

    def train(self, arm: Arm, num_steps: int) -> dict[str, Any]:
        return stretch(0, self.alive[arm])


def test_further_processes_narrow_what_one_pair_shows(tmp_path: Path) -> None:
    session = Session(SMALL, budget_s=1e6, folder=tmp_path)
    session.spread = ProcessSpread((Effect(0.03, 0.0, 7),))
    session.pool = Pool(*[1.0, 0.97, 1.0, 1.01, 1.02, 1.0, 1.0, 0.99, 0.98, 1.0])  # pyright: ignore[reportAttributeAccessIssue]
    once = session.compare(BASE, LARGE)
    assert once.starts == [0]
    again = session.compare(BASE, LARGE, fresh=True)
    assert len(again.starts) == len(again.process_effects) == 4
    assert once.effect
    assert again.effect
    assert again.effect.se < once.effect.se
    session.pool = Pool(*[1.0, 0.97, 1.0, 1.01])  # pyright: ignore[reportAttributeAccessIssue]
    session.least_s = 10.0
    # There is no time for a second pair, until there is.
    found = session.compare(BASE, LARGE, fresh=True, seconds=9.0)
    assert found.starts == [0]
    assert not session.confirm(found, seconds=9.0)
    assert session.confirm(found, seconds=99.0)
    assert len(found.process_effects) == 2
    session.pool.lost[LARGE] = MachineError("E002", "no room")
    assert not session.confirm(found, seconds=99.0)
    assert (found.verdict, found.why) == ("not applicable", "no room")


def test_compiling_pays_after_some_steps() -> None:
    comparison = Comparison(BASE, LARGE)
    comparison.rounds = [[stretch(0, 1.0), *[stretch(1, 0.5)] * 2, stretch(0, 1.0)]] * 4
    comparison.warm = ({"first_step_s": 1.0}, {"first_step_s": 21.0})
    assert comparison.pays_after_steps == 400  # 20 s later, 0.05 s gained in each step
    comparison.warm = ({"first_step_s": 1.0}, {"first_step_s": 1.0})
    assert comparison.pays_after_steps is None


def test_interference_is_seen_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_load, "ROOT", tmp_path)
    monkeypatch.setattr(system_load.os, "sched_getaffinity", lambda _: {0, 1})
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    # Ticks of 10 ms: user, nice, system, idle, iowait, irq, softirq, steal; CPU 2 is not ours.
    stat.write_text("cpu 9 9\ncpu0 100 0 10 500 0 0 0 0\ncpu1 100 0 10 500 0 0 0 5\ncpu2 0 0 0 0 0 0 0 0\n")
    busy_s, steal_s = system_load._machine_times()
    assert (busy_s, steal_s) == pytest.approx((2.2, 0.05))
    stat.write_text(
        "cpu 9 9\ncpu0 250 0 10 500 0 0 0 0\ncpu1 200 0 10 500 0 0 0 45\ncpu2 999 0 0 0 0 0 0 0\n"
    )
    after = system_load._machine_times()
    # In 2 s, 2.5 s were used, 1.3 s of them by the measurement itself.
    sample = ProcessorTimes(0.0, 0.0, busy_s, steal_s).until(ProcessorTimes(2.0, 1.3, *after), 1.3)
    assert sample["others_cores"] == pytest.approx(0.6)
    assert sample["steal_cores"] == pytest.approx(0.2)
    assert interference(sample) == "others took 0.60 cores, 0.20 cores were stolen"
    assert interference(sample | {"others_cores": 0.01, "steal_cores": 0.0}) == ""
    assert interference({"mhz": 1000.0}, 3000.0) == "clocked at 1000 of 3000 MHz"
    quiet, noisy = stretch(0, 1.0), stretch(1, 1.0, system=sample | {"mhz": None})
    comparison = Comparison(BASE, LARGE, rounds=[[quiet] * 4, [quiet, noisy, noisy, quiet]])
    assert list(comparison.disturbed()) == [2]


@pytest.mark.slow
def test_idle_processes_rest(tmp_path: Path) -> None:
    """A process that waits for its turn takes next to no processor time, though it has workers."""
    words = (*SMALL[:-1], "dataloader=workers", "dataloader.workers=1")
    with Session(words, budget_s=1e6, folder=tmp_path, stretch_s=0.02) as session:
        session.pool.prepare(BASE)
        session.pool.train(BASE, 5)
        process = session.pool.alive[BASE]._process
        before = processor_time_of(process.pid)
        subprocess.run(["sleep", "1"], check=True)
        assert processor_time_of(process.pid) - before < 0.1
