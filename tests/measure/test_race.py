"""`ptfast race`: arms, times to a target, leads with misses, and what it says of bad input."""

from __future__ import annotations

import json
import math
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from ptfast.cli import command_line
from ptfast.core import run_directory
from ptfast.core.errors import ConfigError
from ptfast.measure import outputs, race_run
from ptfast.measure.race_run import RaceTarget, build_arms, describe_rates, lead, read_finish

SMALL = ("model.hidden=[8]", "steps=12", "epochs=null", "eval.every=4steps", "log_every=2steps")


def test_arms_are_the_product_of_what_is_swept_and_what_is_written_out():
    arms = build_arms(["batch_size=32", "schedule=cosine,onecycle"], "epochs=2; epochs=4 optimizer=sgd")
    assert [arm.name for arm in arms] == [
        "schedule=cosine epochs=2",
        "schedule=onecycle epochs=2",
        "schedule=cosine epochs=4 optimizer=sgd",
        "schedule=onecycle epochs=4 optimizer=sgd",
    ]
    assert all(arm.config.batch_size == 32 for arm in arms)
    assert (arms[3].config.epochs, arms[3].lr) == (4, 0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["schedule=cosine,onecycle"], "learning rates as configured (0.001, 0.001)"),
        (["optimizer=sgd,adamw"], "learning rates as configured (0.1, 0.001)"),
        (["optimizer.lr=0.1,0.01"], ""),
    ],
)
def test_it_says_what_the_learning_rates_are(words, said):
    text = describe_rates(build_arms(words, None))
    assert text.startswith(said)
    assert bool(text) == bool(said)


def test_time_to_the_target_is_that_of_training_alone(tmp_path):
    def train(step, **figures):
        return {"step": step, "split": "train", "loss": 1.0, **figures}

    def val(step, accuracy):
        return {"step": step, "split": "val", "loss": 1.0, "accuracy": accuracy}

    # The first window warms up: its two steps count as the median of the others.
    lines = [
        train(2),
        train(4, step_s=1.0),
        val(4, 0.5),
        train(8, step_s=2.0),
        val(8, 0.9),
        train(10, step_s=3.0),
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, val(10, 0.8)])
    )
    finish = read_finish(tmp_path, RaceTarget("accuracy", 0.85), 0, 3)
    assert (finish.steps, finish.train_s, finish.best) == (8, 2 * 2.0 + 2 * 1.0 + 4 * 2.0, 0.9)
    assert (finish.total_steps, finish.total_train_s) == (10, 20.0)
    assert read_finish(tmp_path, RaceTarget("accuracy", 0.95), 0, 3).steps is None
    assert read_finish(tmp_path, RaceTarget("loss", 1.5), 0, 3).steps == 4


@pytest.mark.parametrize(("seeds", "missing"), [(3, 0.0), (5, 0.0), (3, 0.3), (5, 0.3), (8, 0.3), (12, 0.3)])
def test_the_interval_covers_the_true_lead(seeds, missing):
    draws = np.random.default_rng(0)
    covered = count = 0
    for _ in range(400):
        first = draws.lognormal(3, 0.3, seeds)
        other = first / draws.lognormal(math.log(1.5), 0.2, seeds)
        # The slowest miss: a run that has no time left has not reached the target.
        limit = np.quantile([first, other], 1 - missing / 2) if missing else math.inf
        found = lead(*([t if t <= limit else None for t in arm] for arm in (first, other)))
        if found is not None and found.low is not None and found.high is not None:
            covered += found.low <= 1.5 <= found.high
            count += 1
    assert covered >= 0.93 * count


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ([10.0] * 5, [5.0, 5.0, None, 5.0, 5.0], (2.0, 0.0, math.inf)),
        ([10.0] * 8, [5.0, 4.0, None, 5.0, 5.0, 5.0, 5.0, 5.0], (2.0, 0.0, 2.5)),
        ([10.0] * 9, [5.0] * 7 + [None, 4.0], (2.0, 2.0, 2.0)),
        ([None] * 6, [1.0] * 6, (math.inf, math.inf, math.inf)),
        # Where both missed nobody knows.
        ([None, 4.0], [None, 2.0], (2.0, 0.0, math.inf)),
        ([None, *[4.0] * 5], [None, *[2.0] * 5], (2.0, 0.0, math.inf)),
        # Three equal ratios do not make a certainty.
        ([4.0] * 3, [2.0] * 3, (2.0, 0.0, math.inf)),
    ],
)
def test_a_miss_is_later_than_any_that_is_none(first, other, expected):
    found = lead(first, other)
    assert found is not None
    assert (found.ratio, found.low, found.high) == expected


def test_pairs_that_both_missed_give_no_lead():
    assert lead([None], [None]) is None


@pytest.mark.parametrize("text", ["accuracy", "accuracy:", ":0.9", "accuracy:high", "accuracy:nan"])
def test_a_target_is_a_figure_and_a_number(text):
    with pytest.raises(ConfigError, match="no target"):
        RaceTarget.parse(text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["schedule=cosine,onecycle"], "error[C016]: --target"),
        (["schedule=cosine", "--target", "loss:1"], "error[C016]: race"),
        (["schedule=cosine,onecycle", "seed=3", "--target", "loss:1"], "error[C011]: seed"),
        (["schedule=cosine,onecycle", "--target", "loss:1", "--seeds", "0"], "error[C005]: --seeds=0"),
        (
            ["optimizer.lr=interval(0.1,1)", "schedule=cosine,onecycle", "--target", "loss:1"],
            "List the values",
        ),
        (["schedule=cosine,onecicle", "--target", "loss:1"], "Did you mean schedule=onecycle?"),
    ],
)
def test_what_cannot_be_raced_is_refused(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["race", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def in_this_process(words: list[str], log: Path) -> tuple[int, str]:
    """What a race has a process do."""
    with log.open("w") as output, redirect_stdout(output), redirect_stderr(output):
        code = command_line.run(words)
    return code, log.read_text().splitlines()[-1]


def test_an_arm_is_tuned_to_the_rate_that_was_found(tmp_path, monkeypatch):
    def found(words, log):
        run_directory.write_json(tmp_path / "lr1/lr.json", {"chosen": 0.6, "lr_scale": 2.0})
        return 0, ""

    monkeypatch.setattr(race_run, "run_ptfast", found)
    (tmp_path / "lr1").mkdir()
    arm = build_arms(["batch_size=32"], "optimizer=sgd; optimizer=lamb")[0]
    tuned = race_run._tuned(arm, tmp_path / "lr1")
    assert (tuned.name, tuned.lr, tuned.config.batch_size) == ("optimizer=sgd", 0.3, 32)


def test_the_process_of_a_run_writes_a_log(tmp_path):
    log = tmp_path / "run.log"
    code, said = outputs.run_ptfast(["train", "optimizer.lrr=1"], log)
    assert code == 2
    assert said.startswith("ptfast: error[C002]: optimizer.lrr=1")


def test_a_race_ends_with_a_table_a_picture_and_a_receipt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race_run, "run_ptfast", in_this_process)
    arms = ("optimizer.lr=0.01,1e-9", *SMALL)
    assert (
        command_line.run(["race", *arms, "--target", "accuracy:0.2", "--seeds", "1", "--out", "found"]) == 0
    )
    out = capsys.readouterr().out
    assert "optimizer.lr=1e-09  0 of 1" in out
    assert "one seed gives no interval" in out
    receipt = json.loads(Path("found/measure.json").read_text())
    assert [run["steps"] is None for run in receipt["runs"]] == [False, True]
    # Nothing is stopped early: both arms went to their end.
    assert [run["total_steps"] for run in receipt["runs"]] == [12, 12]
    assert receipt["sooner"]["steps"][0]["ratio"] == 0
    assert Path("found/race.png").stat().st_size > 10_000


def test_a_figure_that_there_is_not_ends_it_before_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(race_run, "run_ptfast", in_this_process)
    words = ["race", "optimizer.lr=0.01,0.1", *SMALL, "--target", "recall:0.5", "--out", "found"]
    assert command_line.run(words) == 2
    assert (
        "error[C005]: --target=recall (command line): no such figure. There are: loss, accuracy."
        in capsys.readouterr().err
    )
    assert not list(Path("found").glob("*/metrics.jsonl"))
