"""Runs are ranked by the right figure in the right direction, and told apart by what differs."""

from __future__ import annotations

import io
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from ptfast.cli import command_line, compare_command
from ptfast.cli.compare_command import columns_of, show
from ptfast.cli.run_ranking import group_repeats, rank_runs
from ptfast.core.errors import ConfigError, MachineError


def compare(paths: list[Path], metric: str = "auto", mode: str = "auto", out: Path | None = None) -> int:
    words = [str(path) for path in paths]
    return compare_command.compare(Namespace(words=words, metric=metric, mode=mode, target=None, out=out))


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
    assert columns_of(ranking)["status"][-1] == "failed: N001: the loss is nan"


@pytest.mark.parametrize(
    ("metric", "mode", "expected"),
    [
        ("val.accuracy", "auto", ["c", "a"]),
        ("val.accuracy", "min", ["a", "c"]),
        ("accuracy", "auto", ["c", "a"]),
        ("val.loss", "auto", ["c", "a"]),
        ("wall_s", "auto", ["c", "a"]),
        ("wall_s", "max", ["d", "a"]),
    ],
)
def test_the_direction_follows_the_figure_unless_it_is_given(
    runs: list[Path], metric: str, mode: str, expected: list[str]
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
    rows = columns_of(rank_runs([short, dead]))
    assert (rows["samples/s"], rows["peak memory"]) == (["too short", "-"], ["1.0 GiB", "-"])


def test_auto_takes_what_the_runs_follow(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", 0.9, {}, best_metric="val.loss")
    assert rank_runs([one]).metric == "val.loss"


def test_columns_are_the_config_keys_that_differ(runs: list[Path]) -> None:
    rows = columns_of(rank_runs(runs))
    assert list(rows)[:3] == ["#", "optimizer.lr", "best.accuracy"]
    assert rows["optimizer.lr"] == ["0.3", "0.1", "0.4", "0.2"]


def test_keywords_of_one_target_only_are_left_out(tmp_path: Path) -> None:
    adamw = {**sgd(0.1), "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.001, "betas": [0.9, 0.99]}}
    runs = [write_run(tmp_path / "sgd", 0.9, sgd(0.1)), write_run(tmp_path / "adamw", 0.8, adamw)]
    ranking = rank_runs(runs)
    assert ranking.labels == [
        {"optimizer": "SGD", "optimizer.lr": "0.1"},
        {"optimizer": "AdamW", "optimizer.lr": "0.001"},
    ]


def test_values_are_written_as_they_are_typed(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / str(patience), 0.9, {"stop": {"patience": patience}, "eval": {"flip": not patience}}
        )
        for patience in (None, 5)
    ]
    labels = rank_runs(runs).labels
    assert labels == [
        {"eval.flip": "true", "stop.patience": "null"},
        {"eval.flip": "false", "stop.patience": "5"},
    ]


def write_sweep(folder: Path, accuracies: dict[str, float | None]) -> list[Path]:
    """Jobs by their arguments; those without an accuracy failed."""
    runs = []
    for number, (words, accuracy) in enumerate(accuracies.items()):
        ending = {} if accuracy else {"status": "failed", "error": "killed"}
        runs.append(write_run(folder / str(number), accuracy, sgd(0.1), **ending))
        line = ["train", "recipe=x", *words.split(), f"run.dir={runs[-1]}"]
        (runs[-1] / "environment.json").write_text(json.dumps({"command_line": line}))
    return runs


def test_a_sweep_is_told_apart_by_its_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweeps/x"
    runs = write_sweep(folder, {"optimizer=sgd": 0.9, "optimizer=adamw": 0.9})
    dead = folder / "2"
    dead.mkdir()
    summary = {"status": "failed", "error": "killed", "arguments": ["recipe=x", "optimizer=lamb"]}
    (dead / "summary.json").write_text(json.dumps(summary))
    ranking = rank_runs([*runs, dead, folder / "never started"])
    assert [label.get("optimizer") for label in ranking.labels] == ["sgd", "adamw", None, "lamb"]
    assert ranking.keys == ["optimizer"]
    show(ranking)
    out = capsys.readouterr().out
    assert out.startswith("4 runs by best.accuracy, highest first\n")
    assert "failed: killed" in out


def test_seeds_of_a_variant_give_a_mean_and_its_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {
        "seed=0 schedule=linear": 0.80,
        "seed=1 schedule=linear": 0.82,
        "seed=2 schedule=linear": None,
    }
    accuracies |= {f"seed={seed} schedule=cosine": 0.9 + seed / 100 for seed in range(3)}
    ranking = rank_runs(write_sweep(tmp_path / "sweeps/x", accuracies))
    best, other = group_repeats(ranking)
    assert (best.label, len(best.values)) == ({"schedule": "cosine"}, 3)
    # Student's t for 2 and for 1 degrees of freedom, as tables have it.
    assert best.spread("seeds") == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-3)
    assert other.spread("seeds") == pytest.approx(12.706 * 0.02 / 2, rel=1e-3)
    assert compare([tmp_path]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines[0]) == "means over seeds by best.accuracy, highest first"
    assert lines[2][:5] == ["1", "cosine", "91.00%", "2.48%", "3"]
    assert lines[3][:5] == ["2", "linear", "81.00%", "12.71%", "2"]
    assert " ".join(lines[3]).endswith("2 finished, 1 failed")


def test_folds_of_a_variant_give_a_mean_and_its_deviation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {f"data.fold={fold}": accuracy for fold, accuracy in enumerate([0.9, 0.92, 0.94, 0.91])}
    show(rank_runs(write_sweep(tmp_path / "sweeps/x", accuracies)))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines[0]) == "means over folds by best.accuracy, highest first"
    assert lines[1][:4] == ["#", "best.accuracy", "std", "folds"]
    assert lines[2][:4] == ["1", "91.75%", "1.71%", "4"]


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_gets_whole_words_and_links(
    runs: list[Path], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    for number, run in enumerate(runs):
        config = {
            **sgd(number),
            "batch_size": 2**number,
            "epochs": number,
            "gradients": {"clip_norm": number},
        }
        (run / "config.yaml").write_text(json.dumps(config))
    (runs[0] / "report.html").touch()
    compare(runs)
    assert "]8;id=" in stream.getvalue()
    assert (runs[0] / "report.html").as_uri() in stream.getvalue()
    shown = re.sub(r"\x1b\]8;.*?\x1b\\|\x1b\[[\d;]*m", "", stream.getvalue())
    assert max(map(len, shown.splitlines())) <= width
    assert "None" not in shown
    key = "gradients.clip_norm" if width == 120 else "clip_norm=3"
    assert {key, "best.accuracy", "interrupted"} <= {*shown.split()}


def test_a_page_holds_the_table_and_a_line_for_each_run(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    assert compare(runs, out=out) == 0
    text = out.read_text()
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert titles == ["val loss", "train loss", "val accuracy", "learning rate"]
    assert text.count('<g class="c0">') == text.count('<g class="c1">') == 4
    assert not re.search(r"<script|<link|https?://", text)
    assert 'href="c"' in text


def test_a_page_names_what_the_runs_share_and_marks_their_best_checkpoints(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{lr}", 0.9, sgd(lr), best_metric="val.accuracy") for lr in (0.1, 0.2)]
    assert compare(runs, out=tmp_path / "both.html") == 0
    text = (tmp_path / "both.html").read_text()
    assert '<p class="sub">SGD<br>by val.accuracy, best first; large dots' in text
    # Of two runs, on the curves of loss and accuracy.
    assert text.count('r="5"') == 2 * 2


def test_bad_arguments_are_named(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains no run"):
        compare([tmp_path / "empty"])
    with pytest.raises(ConfigError, match=r"There are: .*val\.accuracy, .*wall_s"):
        compare(runs, "val.f1")
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        compare(runs, out=tmp_path / "out.pdf")
    assert command_line.run(["compare", str(runs[0]), "--mode", "best"]) == 2
    with pytest.raises(MachineError):
        compare(runs, out=tmp_path / "missing" / "out.html")
