"""report.html: one self-contained page from the files of a run, even if some are missing."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from ptfast.cli.run_ranking import rank_runs
from ptfast.core import run_directory
from ptfast.core.errors import MachineError
from ptfast.report.html.run_files import training_times
from ptfast.report.html.run_report import headline, write_report
from ptfast.report.html.svg_charts import MAX_POINTS, SCRIPT_FILE, Series, line_chart, stacked_bar, thin


def write_run(run_dir: Path, **summary: Any) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    for step in range(10, 1001, 10):
        metrics = {"loss": 2 * math.exp(-step / 200) + 0.01, "lr": 0.1 - step / 1e4}
        metrics |= {"samples_per_s": 3400.0, "step_s": 0.02, "peak_memory_bytes": 2**30, "padding_share": 0.1}
        metrics |= {"memory_bytes": 2**29, "cpu_cores": 1.5}
        records.append({"step": step, "epoch": step / 100, "split": "train", **metrics})
        if step % 100 == 0:
            records.append(
                {"step": step, "epoch": step // 100, "split": "val", "loss": 0.5, "accuracy": step / 1100}
            )
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    facts: dict[str, Any] = {
        "status": "finished",
        "steps": 1000,
        "wall_s": 72.0,
        "train_samples_per_s": 3400.0,
        "val": {"loss": 0.5, "accuracy": 0.9},
        "best": {"loss": 0.4, "accuracy": 0.95, "step": 900},
        "test": {"loss": 0.6, "accuracy": 0.89},
        "time_budget": {"start_up": 12.0, "forward": 20.0, "backward": 40.0, "saving": 0.0},
        "goodput": {"attempts": 3, "wall_s": 90.0, "seconds": {"training": 45.0, "restarts": 45.0}},
        "recipe": "resnet_digits",
    }
    (run_dir / "summary.json").write_text(json.dumps({**facts, **summary}))
    (run_dir / "config.yaml").write_text("recipe: resnet_digits\nmodel: '<script>alert(1)</script>'\n")
    (run_dir / "environment.json").write_text(json.dumps({"torch": "2.9", "command_line": ["a", "<b>"]}))


def write_examples(run_dir: Path, image: str, name: str) -> None:
    sample = {"target": name, "prediction": "dog", "probability": 0.9}
    samples = [sample | {"image": image}, sample | {"image": "data:image/png;base64,AAAA"}]
    mistaken = [{"class": "dog", "samples": 3}]
    classes = [{"class": name, "samples": 12, "hits": 9, "mistaken": mistaken}]
    facts = {"split": "val", "num_samples": 12, "samples": samples, "classes": classes}
    (run_dir / "examples.json").write_text(json.dumps(facts))


def read(run_dir: Path) -> str:
    return write_report(run_dir).read_text()


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_the_page_holds_figures_curves_budget_config_and_environment(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    text = read(tmp_path / "run")
    assert "<title>resnet_digits (finished)</title>" in text
    for part in (
        "89.00%",
        "95.00%",
        "best (step 900)",
        "1m 12s",
        "torch",
        "55.6%",
        "start-up",
        "config.yaml",
    ):
        assert part in text
    # In the order of a run, whatever is largest.
    causes = ["start-up", "forward", "backward", "training", "restarts"]
    assert re.findall(r'<i class="[^"]+"></i>([^<]+)<', text)[-5:] == causes
    titles = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert titles[:4] == ["loss, log scale", "accuracy", "learning rate", "throughput (samples/s)"]
    assert titles[4:] == ["memory", "processor cores busy"]


def test_the_page_loads_nothing_and_runs_no_words_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", error="<img src=x onerror=alert(1)>", recipe="<i>name</i>")
    write_examples(tmp_path / "run", "javascript:alert(1)", "<b>cat</b>")
    text = read(tmp_path / "run").replace(f"<script>\n{SCRIPT_FILE.read_text()}</script>", "")
    assert not re.search(r"<(script|link|iframe)|<img(?! alt=\"\" src=\"data:image/)", text)
    assert not re.search(r"https?://|url\(|@import|<i>name|<b>cat|javascript:", text)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&lt;img src=x" in text


@pytest.mark.parametrize(
    "missing", ["metrics.jsonl", "summary.json", "config.yaml", "environment.json", "all"]
)
def test_a_missing_or_damaged_file_leaves_out_its_part_only(tmp_path: Path, missing: str) -> None:
    run_dir = tmp_path / "run"
    write_run(run_dir)
    for path in list(run_dir.iterdir()):
        if missing in (path.name, "all"):
            path.unlink()
    text = read(run_dir)
    assert ("<figure" in text) == (missing not in ("metrics.jsonl", "all"))
    assert ("Where the time went" in text) == (missing not in ("summary.json", "all"))
    attempts = text.partition("<h2>Over all 3 attempts</h2>")[2].partition("<h2>")[0]
    cells = [re.findall(r"<td.*?>(?:<i.*?></i>)?(.*?)</td>", row) for row in attempts.split("<tr>")[2:]]
    spent = [["training", "45.0s", "50.0%"], ["restarts", "45.0s", "50.0%"], ["all", "1m 30s", ""]]
    assert cells == ([] if missing in ("summary.json", "all") else spent)
    assert ("resnet_digits" in text) == (missing != "all")
    for path in run_dir.iterdir():
        path.write_bytes(b"\xff{[")
    assert "unfinished" in read(run_dir)


def test_predictions_stand_in_the_page_by_sample_and_by_class(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_examples(tmp_path, "data:image/png;base64,AAAA", "cat")
    text = read(tmp_path)
    assert text.count('<img alt="" src="data:image/png;base64,AAAA"><div><b>cat</b>') == 2
    for part in ("predicted dog (90%)", "12 samples of val", "75.0%", "dog (3)"):
        assert part in text


def test_the_head_says_what_was_trained_and_what_the_command_line_changed(tmp_path: Path) -> None:
    write_run(tmp_path, next=["ptfast eval 'a run'"])
    config = "batch_size: 64\nmodel: {_target_: a.Net}\noptimizer: {_target_: torch.optim.SGD, lr: 0.1}\n"
    (tmp_path / "config.yaml").write_text(config + "precision: {mode: fp32}\n")
    words = ["ptfast", "train", "recipe=resnet_digits", "run.dir=r", "optimizer.lr=0.1"]
    (tmp_path / "environment.json").write_text(json.dumps({"command_line": words}))
    text = read(tmp_path)
    assert "Net · SGD · lr 0.1 · precision fp32 · batch 64<br>changed: optimizer.lr=0.1<br>" in text
    assert "ptfast eval &#x27;a run&#x27;" in text


def test_the_best_checkpoint_is_marked_on_the_curves_of_its_split(tmp_path: Path) -> None:
    write_run(tmp_path, best_metric="val.accuracy")
    text = read(tmp_path)
    assert re.findall(r'r="5"><title>([^<]*)</title>', text) == ["best 0.5000 at 900", "best 81.82% at 900"]
    write_run(tmp_path)
    assert 'r="5"' not in read(tmp_path)


def test_a_confusion_matrix_counts_true_and_predicted_classes(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_examples(tmp_path, "", "cat")
    matrix = read(tmp_path).split("<b>confusion matrix</b>")[1].split("</table>")[0]
    assert re.findall(r"<th>(\w*)</th>", matrix) == ["", "cat", "dog", "cat", "dog"]
    assert re.findall(r">(\d*)</td>", matrix) == ["9", "3", "", ""]
    several = [
        {
            "class": f"c{i}",
            "samples": 60,
            "hits": 60 - i,
            "mistaken": [{"class": "c0", "samples": i}] * (i > 0),
        }
        for i in range(60)
    ]
    content = {"split": "val", "num_samples": 3600, "classes": several, "samples": []}
    (tmp_path / "examples.json").write_text(json.dumps(content))
    pairs = read(tmp_path).split("<b>confusion matrix</b>")[1].split("</table>")[0]
    assert re.findall(r"<td[^>]*>(\w+)</td>", pairs)[:6] == ["c59", "c0", "59", "c58", "c0", "58"]


def test_the_time_axis_counts_steps_that_were_not_timed_as_the_others() -> None:
    records = [{"split": "train", "step": step} for step in (1, 11, 21)]
    records[1]["step_s"], records[2]["step_s"] = 0.5, 1.5
    assert training_times(records) == {0: 0.0, 1: 1.0, 11: 6.0, 21: 21.0}


def test_figures_that_are_not_finite_hinder_no_page(tmp_path: Path) -> None:
    lines = [{"step": step, "split": "train", "loss": None, "step_s": None} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    numbers = {"loss": None, "accuracy": math.nan}
    summary = {"status": "finished", "steps": 2, "val": numbers, "best": numbers | {"step": 1}}
    summary |= {"loss_spikes": {"count": 1, "largest": {"step": 1, "loss": None, "usual": None}}}
    summary |= {"goodput": {"attempts": 2, "seconds": {"training": None, "saving": 1.0}}, "wall_s": None}
    run_directory.write_json(tmp_path / "summary.json", summary)
    samples = [
        {"target": None, "prediction": 0.5},
        {"target": 1.0, "prediction": None},
        {"target": "cat", "prediction": "dog", "probability": None},
    ]
    run_directory.write_json(tmp_path / "examples.json", {"split": "val", "samples": samples})
    metrics = {"by_class": {"kind": "Accuracy", "values": [0.5, None]}}
    metrics |= {"roc": {"kind": "BinaryROC", "values": [[0, None, 1], [0, 1, None], [1, 1, 1]]}}
    tables = {"step": 2, "split": "val", "class_names": ["cat", "dog"], "metrics": metrics}
    (tmp_path / "metrics").mkdir()
    run_directory.write_json(tmp_path / "metrics/val.json", tables)
    text = write_report(tmp_path).read_text()
    assert text.count("not finite") >= 5


@pytest.mark.parametrize(
    "name",
    [
        *("summary.json", "environment.json", "examples.json", "metrics.jsonl", "config.yaml"),
        *("metrics/val.json", "attempts.jsonl"),
    ],
)
@pytest.mark.parametrize(
    "content", ["[" * 200_000, '{"a":' * 200_000, '{"steps": "x", "step": {}, "metrics": 3}']
)
def test_a_file_that_is_nested_without_end_is_read_as_empty(tmp_path: Path, name: str, content: str) -> None:
    for run in ("good", "bad"):
        (tmp_path / run / "metrics").mkdir(parents=True)
        run_directory.write_json(
            tmp_path / run / "summary.json", {"status": "finished", "val": {"loss": 0.5}}
        )
    (tmp_path / "bad" / name).write_text(content)
    write_report(tmp_path / "bad")
    assert len(rank_runs([tmp_path / "good", tmp_path / "bad"]).runs) == 2


def test_values_that_are_not_finite_are_left_out_of_curves(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "split": "train", "loss": 1.0}\n{"step": 2, "split": "train", "loss": null}\n'
        '{"step": 3, "split": "train", "loss": NaN}\n{"step": null, "loss": 2}\n[1]\n'
    )
    (chart,) = svgs(read(tmp_path))
    assert len(list(chart.iter("circle"))) == 1
    assert b"nan" not in ET.tostring(chart).lower()


def test_a_folder_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        write_report(tmp_path / "missing")
    assert caught.value.code == "E001"


def places(chart: str) -> list[tuple[float, float]]:
    return [
        (float(c.attrib["cx"]), float(c.attrib["cy"])) for c in ET.fromstring(svg_of(chart)).iter("circle")
    ]


def svg_of(chart: str) -> str:
    match = re.search(r"<svg.*</svg>", chart, re.DOTALL)
    assert match
    return match.group()


def value_labels(chart: str) -> list[str]:
    texts = ET.fromstring(svg_of(chart)).iter("text")
    return [str(text.text) for text in texts if text.attrib["text-anchor"] == "end"]


def test_points_lie_where_the_axes_say() -> None:
    chart = line_chart("loss", [Series("val", [(0, 1.0), (50, 2.0), (100, 3.0)])], 100)
    (x0, y0), (x1, y1), (x2, y2) = places(chart)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.1)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.1)
    ticks = {text.text: text.attrib for text in ET.fromstring(svg_of(chart)).iter("text")}
    assert float(ticks["3.0"]["y"]) - 4 == pytest.approx(y2, abs=0.1)
    assert float(ticks["1.0"]["y"]) - 4 == pytest.approx(y0, abs=0.1)
    assert float(ticks["100"]["x"]) == pytest.approx(x2, abs=0.1)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("accuracy", [0.91, 0.99], ["92%", "94%", "98%"]),
        ("accuracy", [0.5, 1.0], ["50%", "100%"]),
        ("samples_per_s", [3000.0, 3900.0], ["0", "1k", "4k"]),
        ("loss", [0.001, 5.0], ["0.001", "0.1", "10"]),
        ("lr", [0.0, 3e-4], ["0", "1.0e-04", "3.0e-04"]),
        ("perplexity", [12.0, 19.0], ["12", "14", "20"]),
        ("loss", [-0.2, 0.3], ["-0.2", "0.0", "0.3"]),
        ("loss", [0.0, 0.0], ["0.0"]),
        ("loss", [3.0], ["3.0"]),
    ],
)
def test_ticks_are_round_and_formatted_for_the_metric(
    name: str, values: list[float], expected: list[str]
) -> None:
    written = value_labels(line_chart(name, [Series("val", list(enumerate(values)))], 10))
    assert set(expected) <= set(written)
    assert len(written) == len(set(written)) <= 8


def test_a_long_curve_is_thinned_without_losing_its_ends_or_its_level() -> None:
    points = [(float(step), math.sin(step / 500)) for step in range(10_000)]
    thinned = thin(points)
    assert len(thinned) <= MAX_POINTS
    assert thinned[-1] == points[-1]
    assert all(value == pytest.approx(math.sin(step / 500), abs=0.01) for step, value in thinned)
    assert thin(points[:MAX_POINTS]) == points[:MAX_POINTS]


def test_the_bar_is_cut_in_proportion() -> None:
    bar = ET.fromstring(stacked_bar([("training", 3.0), ("start-up", 1.0)], ["c0", "rest"]))
    assert [float(rect.attrib["width"]) for rect in bar.iter("rect")] == [750.0, 250.0]
    assert [rect.attrib["class"] for rect in bar.iter("rect")] == ["c0", "rest"]
    assert stacked_bar([("training", 0.0)], ["c0"]) == ""


def test_the_headline_is_what_the_task_is_after() -> None:
    assert headline({"loss": 1.0, "accuracy": 0.5, "step": 3}) == "accuracy"
    assert headline({"loss": 1.0}) == "loss"
    assert headline({}) is None
