"""Runs are ranked by the right figure in the right direction, and told apart by what differs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ptfast.cli.compare_command import compare, print_ranking, rank_runs
from ptfast.core.errors import ConfigError, MachineError


def write_run(run_dir: Path, accuracy: float | None, config: dict[str, Any], **summary: Any) -> Path:
    """A run directory; JSON is YAML."""
    run_dir.mkdir(parents=True)
    facts: dict[str, Any] = {"status": "finished", "wall_s": 50.0, "train_samples_per_s": 1000.0}
    if accuracy is not None:
        figures = {"loss": 1 - accuracy, "accuracy": accuracy}
        facts |= {"val": figures, "best": {**figures, "step": 20}}
        records = [
            {"step": step, "split": "val", "loss": 1 / step, "accuracy": accuracy} for step in (10, 20)
        ]
        records += [{"step": step, "split": "train", "loss": 1 / step, "lr": 0.1} for step in range(1, 21)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run_dir / "summary.json").write_text(json.dumps({**facts, **summary}))
    (run_dir / "config.yaml").write_text(json.dumps(config))
    return run_dir


def sgd(lr: float, seed: int = 0) -> dict[str, Any]:
    return {
        "seed": seed,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": lr, "momentum": 0.9},
        "run": {"dir": f"runs/{lr}-{seed}"},
        "milestones": [1, 2],
    }


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "a", 0.90, sgd(0.1), wall_s=30.0),
        write_run(tmp_path / "b", 0.97, sgd(0.2), status="failed", error="N001: the loss is nan"),
        write_run(tmp_path / "c", 0.95, sgd(0.3), wall_s=10.0),
        write_run(tmp_path / "d", None, sgd(0.4), status="interrupted"),
    ]


def names(ranking: Any) -> list[str]:
    return [run.run_dir.name for run in ranking.runs]


def test_better_first_then_those_without_the_figure_then_failed_ones(runs: list[Path]) -> None:
    ranking = rank_runs(runs)
    assert (ranking.metric, ranking.mode) == ("best.accuracy", "max")
    assert names(ranking) == ["c", "a", "d", "b"]
    assert ranking.values == [0.95, 0.90, None, None]
    assert ranking.rows[-1][-2] == "failed: N001: the loss is nan"


@pytest.mark.parametrize(
    ("metric", "mode", "expected"),
    [
        ("val.accuracy", None, ["c", "a"]),
        ("val.accuracy", "min", ["a", "c"]),
        ("accuracy", "auto", ["c", "a"]),
        ("val.loss", None, ["c", "a"]),
        ("wall_s", None, ["c", "a"]),
        ("wall_s", "max", ["d", "a"]),
    ],
)
def test_the_direction_follows_the_figure_unless_it_is_given(
    runs: list[Path], metric: str, mode: str | None, expected: list[str]
) -> None:
    assert names(rank_runs(runs, metric, mode))[:2] == expected


def test_throughput_is_better_when_higher(tmp_path: Path) -> None:
    slow = write_run(tmp_path / "slow", 0.9, {}, train_samples_per_s=10.0)
    fast = write_run(tmp_path / "fast", 0.9, {}, train_samples_per_s=20.0)
    assert names(rank_runs([slow, fast], "train_samples_per_s")) == ["fast", "slow"]


def test_runs_too_short_to_tell_a_throughput_say_so(tmp_path: Path) -> None:
    facts = {"train_samples_per_s": None, "peak_memory_bytes": 2**30}
    short = write_run(tmp_path / "short", 0.9, {}, **facts)
    dead = tmp_path / "dead"
    dead.mkdir()
    (dead / "summary.json").write_text('{"status": "failed"}')
    ranking = rank_runs([short, dead])
    columns = [ranking.headers.index(name) for name in ("samples/s", "peak memory")]
    assert [[row[column] for column in columns] for row in ranking.rows] == [
        ["too short", "1.0 GiB"],
        ["-", "-"],
    ]


def test_auto_takes_what_the_runs_follow(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", 0.9, {}, best_metric="val.loss")
    assert rank_runs([one]).metric == "val.loss"


def test_columns_are_the_config_keys_that_differ(runs: list[Path]) -> None:
    headers = rank_runs(runs).headers
    assert headers[:3] == ["#", "optimizer.lr", "best.accuracy"]
    assert [row[1] for row in rank_runs(runs).rows] == ["0.3", "0.1", "0.4", "0.2"]


def test_keywords_of_one_target_only_are_left_out(tmp_path: Path) -> None:
    adamw = {**sgd(0.1), "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.001, "betas": [0.9, 0.99]}}
    runs = [write_run(tmp_path / "sgd", 0.9, sgd(0.1)), write_run(tmp_path / "adamw", 0.8, adamw)]
    ranking = rank_runs(runs)
    assert ranking.headers[1:3] == ["optimizer", "optimizer.lr"]
    assert [row[1:3] for row in ranking.rows] == [["SGD", "0.1"], ["AdamW", "0.001"]]


def test_a_sweep_is_told_apart_by_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, 0.9, sgd(0.1)) for name in ("0", "1")]
    for run_dir, name in zip(runs, ("sgd", "adamw"), strict=True):
        words = ["train", "+recipe=x", f"optimizer={name}", f"run.dir={run_dir}"]
        (run_dir / "environment.json").write_text(json.dumps({"command_line": words}))
    dead = tmp_path / "2"
    dead.mkdir()
    summary = {"status": "failed", "error": "killed", "arguments": ["+recipe=x", "optimizer=lamb"]}
    (dead / "summary.json").write_text(json.dumps(summary))
    ranking = print_ranking([*runs, dead, tmp_path / "never started"])
    assert ranking.headers[1] == "optimizer"
    assert ("+recipe" in ranking.headers, "run.dir" in ranking.headers) == (False, False)
    assert {row[1] for row in ranking.rows} >= {"sgd", "adamw", "lamb"}
    out = capsys.readouterr().out
    assert out.startswith("4 runs by best.accuracy, highest first\n")
    assert "failed: killed" in out


def test_a_page_holds_the_table_and_a_line_for_each_run(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    assert compare(runs, out=out) == 0
    text = out.read_text()
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert titles == ["val loss", "train loss", "val accuracy", "learning rate"]
    assert text.count('<g class="c0">') == text.count('<g class="c1">') == 4
    assert not re.search(r"<script|<link|https?://", text)


def test_a_picture_is_drawn(runs: list[Path], tmp_path: Path) -> None:
    compare(runs[:2], out=tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_bad_arguments_are_named(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        compare([tmp_path])
    with pytest.raises(ConfigError, match=r"There are: .*val\.accuracy"):
        compare(runs, "val.f1")
    with pytest.raises(ConfigError, match=r"\.html or \.png"):
        compare(runs, out=tmp_path / "out.pdf")
    with pytest.raises(ConfigError, match="must be min, max or auto"):
        compare(runs, mode="best")
    with pytest.raises(MachineError):
        compare(runs, out=tmp_path / "missing" / "out.html")
