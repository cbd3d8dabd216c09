"""Time to a target: variants paired by seed, leads with misses, and `ptfast race`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import in_this_process

from ptfast.cli import command_line
from ptfast.cli.run_ranking import rank_runs
from ptfast.cli.time_to_target import Target, compare_to_target, lead
from ptfast.core.errors import ConfigError


def train(step: int, **figures: float) -> dict[str, Any]:
    return {"step": step, "split": "train", "loss": 1.0, **figures}


def val(step: int, accuracy: float) -> dict[str, Any]:
    return {"step": step, "split": "val", "loss": 1.0, "accuracy": accuracy}


def write_run(run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any], **summary: Any) -> Path:
    """A run directory; JSON is YAML."""
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run_dir / "summary.json").write_text(json.dumps({"status": "finished", "exit_code": 0, **summary}))
    (run_dir / "config.yaml").write_text(json.dumps(config))
    return run_dir


def rows(run_dirs: list[Path], target: Target) -> list[list[str]]:
    return compare_to_target(rank_runs(run_dirs), run_dirs, target)


def test_time_to_the_target_is_that_of_training_alone(tmp_path: Path) -> None:
    # The first window warms up: its two steps count as the median of the others.
    records = [
        train(2),
        train(4, step_s=1.0),
        val(4, 0.5),
        train(8, step_s=2.0),
        val(8, 0.9),
        train(10, step_s=3.0),
        val(10, 0.8),
    ]
    run_dir = write_run(tmp_path / "a", records, {"seed": 0})
    assert rows([run_dir], Target("accuracy", 0.85))[0][1:4] == ["1 of 1", "8", "14.0s"]
    assert rows([run_dir], Target("accuracy", 0.95))[0][1:4] == ["0 of 1", "", ""]
    assert rows([run_dir], Target("loss", 1.5))[0][2] == "4"


def test_variants_stand_in_the_order_given_and_are_paired_by_seed(tmp_path: Path, capsys: Any) -> None:
    run_dirs = []
    for name, steps in (("slow", (20, 30, 50)), ("fast", (10, 20, 30))):
        for seed, step in enumerate(steps):
            records = [train(step, step_s=1.0), val(step, 0.9)]
            config = {"seed": seed, "optimizer": {"lr": name}}
            run_dirs.append(write_run(tmp_path / f"{name}{seed}", records, config))
    slow, fast = rows(run_dirs, Target("accuracy", 0.9))
    assert slow == ["lr=slow", "3 of 3", "30", "30.0s", "1.00x", "1.00x", ""]
    assert fast[:4] == ["lr=fast", "3 of 3", "20", "20.0s"]
    expected = lead([(20, 10), (30, 20), (50, 30)])
    assert fast[4] == fast[5] == str(expected)
    assert "how many times sooner than lr=slow" in capsys.readouterr().out
    # Of seeds that only one of them has, there is no pair.
    assert rows(run_dirs[:4], Target("accuracy", 0.9))[1][4:6] == ["2.00x", "2.00x"]


def test_a_run_that_was_cut_short_does_not_count_and_one_that_diverged_has_missed(tmp_path: Path) -> None:
    endings = {"a": ("finished", 0), "b": ("failed", 5), "c": ("interrupted", 130), "d": ("failed", 1)}
    run_dirs = [
        write_run(tmp_path / name, [train(4), val(4, 0.5)], {"seed": seed}, status=status, exit_code=code)
        for seed, (name, (status, code)) in enumerate(endings.items())
    ]
    assert rows(run_dirs, Target("accuracy", 0.9))[0][1] == "0 of 2"
    # One that had reached it has.
    assert rows(run_dirs, Target("accuracy", 0.5))[0][1] == "4 of 4"


def test_a_figure_that_no_run_has_is_named(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "a", [train(4), val(4, 0.5)], {"seed": 0})
    with pytest.raises(ConfigError, match="There are: accuracy, loss"):
        rows([run_dir], Target("recall", 0.5))


@pytest.mark.parametrize(("seeds", "missing"), [(3, 0.0), (5, 0.0), (3, 0.3), (5, 0.3), (8, 0.3), (12, 0.3)])
def test_the_interval_covers_the_true_lead(seeds: int, missing: float) -> None:
    draws = np.random.default_rng(0)
    covered = count = 0
    for _ in range(400):
        first = draws.lognormal(3, 0.3, seeds)
        other = first / draws.lognormal(math.log(1.5), 0.2, seeds)
        # The slowest miss: a run that has no time left has not reached the target.
        limit = np.quantile([first, other], 1 - missing / 2) if missing else math.inf
        taken = ([t if t <= limit else None for t in variant] for variant in (first, other))
        found = lead(list(zip(*taken, strict=True)))
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
def test_a_miss_is_later_than_any_time(first: list[Any], other: list[Any], expected: Any) -> None:
    found = lead(list(zip(first, other, strict=True)))
    assert found is not None
    assert (found.ratio, found.low, found.high) == expected


def test_pairs_that_both_missed_give_no_lead() -> None:
    assert lead([(None, None)]) is None


@pytest.mark.parametrize("text", ["accuracy", "accuracy=", "=0.9", "accuracy=high", "accuracy:nan"])
def test_a_target_is_a_metric_and_a_number(text: str) -> None:
    with pytest.raises(ConfigError, match="no target"):
        Target.parse(text)
    assert Target.parse("val.accuracy=0.9") == Target.parse("accuracy:0.9") == Target("accuracy", 0.9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("schedule=cosine,onecycle", "error[C016]: --target"),
        ("schedule=cosine,onecycle seed=3 --target loss=1", "error[C006]: seed"),
        ("schedule=cosine,onecycle --target loss=1 --seeds 0", "error[C005]: --seeds=0"),
        ("optimizer.lr=interval(0.1,1) --target loss=1", "name the points: key=a,b"),
        ("schedule=cosine,onecicle --target loss=1", "Did you mean schedule=onecycle?"),
    ],
)
def test_a_race_that_cannot_be_is_rejected(words: str, said: str, in_tmp: Path, capsys: Any) -> None:
    assert command_line.run(["race", *words.split()]) == 2
    assert said in capsys.readouterr().err
    assert not list(in_tmp.glob("**/metrics.jsonl"))


def test_a_race_is_a_sweep_over_seeds_and_a_comparison(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    words = ["race", "model.hidden=[8]", "steps=12", "epochs=null", "eval.every=4steps", "log_every=2steps"]
    assert (
        command_line.run([*words, "optimizer.lr=0.01,1e-9", "--target", "accuracy=0.2", "--seeds", "2"]) == 0
    )
    out = capsys.readouterr().out
    last = out[out.index("to accuracy 0.2") :]
    assert "lr=1e-09  0 of 2" in last
    (folder,) = Path("runs/sweeps").iterdir()
    # Seeds come first, so that the variants take turns.
    seeds = [
        json.loads((folder / str(number) / "config.yaml").read_text().split("seed: ")[1].split()[0])
        for number in range(4)
    ]
    assert seeds == [0, 0, 1, 1]
    # Later on it is a comparison of these runs.
    assert command_line.run(["compare", str(folder), "--target", "accuracy=0.2", "--out", "both.html"]) == 0
    assert last.splitlines()[:4] == capsys.readouterr().out.split("\n\n")[-1].splitlines()[:4]
    assert "<h2>To accuracy 0.2</h2>" in Path("both.html").read_text()
