"""Records reach their files, survive kills, and a failing logger does not end the training."""

from __future__ import annotations

import csv
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from ptfast.core.errors import MachineError
from ptfast.report import loggers
from ptfast.report.loggers import BackgroundLogger, Csv, JsonlLogger, read_records


def train(step: int, **metrics: Any) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "split": "train", **metrics}


class Recorder:
    def __init__(self, error: Exception | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.threads: set[str] = set()
        self.closed = 0
        self.error = error

    def log(self, record: dict[str, Any]) -> None:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


def test_jsonl_is_one_valid_object_a_line_on_disk_at_once(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(train(1, loss=0.1 + 0.2, lr=1e-4))
    logger.log(train(2, loss=math.nan, grad_norm=math.inf))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close, as after a SIGKILL
    logger.close()
    assert json.loads(lines[0]) == train(1, loss=0.1 + 0.2, lr=1e-4)
    assert json.loads(lines[1], parse_constant=pytest.fail) == train(2, loss=None, grad_norm=None)


def test_jsonl_unpacks_scalars_of_numpy_and_torch(tmp_path: Path) -> None:
    import numpy as np
    import torch

    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(train(1, loss=np.float32(0.5), lr=torch.tensor(0.25), count=np.int64(3)))
    logger.close()
    assert read_records(tmp_path / "metrics.jsonl") == [train(1, loss=0.5, lr=0.25, count=3)]


def test_jsonl_goes_on_behind_a_line_that_a_kill_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train(1)) + '\n{"step": 2, "lo')
    assert read_records(path) == [train(1)]
    logger = JsonlLogger(path)
    logger.log(train(2))
    logger.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [train(1), train(2)]


def test_a_resumed_run_keeps_the_records_up_to_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [train(step, loss=1 / step) for step in range(1, 6)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"st')
    JsonlLogger(path, 3).close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == records[:3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError) as caught:
        JsonlLogger(tmp_path / "missing" / "metrics.jsonl")
    assert caught.value.code == "E001"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_surfaces_once_in_the_thread_that_logs() -> None:
    logger = BackgroundLogger([JsonlLogger(Path("/dev/full"))])
    logger.log(train(1))
    with pytest.raises(MachineError) as caught:
        logger.close()
    assert caught.value.code == "E002"
    logger.close()


def test_csv_is_the_records_as_a_table(tmp_path: Path) -> None:
    """Of a resumed run, too: what lies behind its step is gone; it is up to date after each evaluation."""
    (tmp_path / "metrics.csv").write_text("step,epoch,split,loss\n1,0.1,train,0.5\n9,0.9,train,0.1\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train(1, loss=0.5)) + "\n")
    records, table = JsonlLogger(tmp_path / "metrics.jsonl"), Csv()
    logger = BackgroundLogger([records, table])
    table.open(tmp_path, {})
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,epoch,split,loss", "1,0.1,train,0.5"]
    logger.log({"step": 1, "epoch": 0.1, "split": "val", "loss": 0.4, "accuracy": 0.9})
    logger.log(train(2, loss=0.25))
    logger.close()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "epoch", "split", "loss", "accuracy"]
    assert [(row["step"], row["split"], row["loss"], row["accuracy"]) for row in rows] == [
        ("1", "train", "0.5", ""),
        ("1", "val", "0.4", "0.9"),
        ("2", "train", "0.25", ""),
    ]


def test_images_go_to_the_loggers_that_take_them() -> None:
    class Showing(Recorder):
        def log_images(self, step: int, images: Any) -> None:
            self.records.append({"step": step, "images": images})

    plain, showing = Recorder(), Showing()
    assert not BackgroundLogger([plain]).shows_images
    logger = BackgroundLogger([plain, showing])
    assert logger.shows_images
    logger.log_images(3, "pixels")
    logger.close()
    assert (plain.records, showing.records) == ([], [{"step": 3, "images": "pixels"}])


def test_the_background_logger_writes_everything_elsewhere() -> None:
    recorder = Recorder()
    logger = BackgroundLogger([recorder])
    for step in range(1000):
        logger.log(train(step))
    logger.close()
    logger.close()
    assert [record["step"] for record in recorder.records] == list(range(1000))
    assert threading.current_thread().name not in recorder.threads
    assert recorder.closed == 1


def test_a_failing_logger_is_dropped_with_one_warning() -> None:
    failing, sound = Recorder(ConnectionError("no route")), Recorder()
    warned: list[tuple[str, str]] = []
    logger = BackgroundLogger(
        [failing, sound], lambda text: warned.append((text, threading.current_thread().name))
    )
    for step in range(3):
        logger.log(train(step))
    logger.close()
    assert len(sound.records) == 3
    assert [(text.count("no route"), thread) for text, thread in warned] == [
        (1, threading.current_thread().name)
    ]


def test_a_flush_waits_for_the_records_but_not_for_a_logger_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    class Slow(Recorder):
        def log(self, record: dict[str, Any]) -> None:
            gate.wait(0.05)
            super().log(record)

    slow = Slow()
    logger = BackgroundLogger([slow])
    logger.flush()
    logger.log(train(1))
    logger.flush()
    assert len(slow.records) == 1
    monkeypatch.setattr("ptfast.report.loggers.FLUSH_S", 0.01)
    logger.log(train(2))
    logger.flush()
    assert len(slow.records) == 1
    logger.close()
    assert len(slow.records) == 2


def test_a_logger_that_waits_does_not_hold_up_the_step() -> None:
    gate = threading.Event()

    class Waiting(Recorder):
        def log(self, record: dict[str, Any]) -> None:
            assert gate.wait(10)
            super().log(record)

    waiting = Waiting()
    logger = BackgroundLogger([waiting])
    logger.log(train(1))
    logger.log(train(2))
    assert waiting.records == []
    gate.set()
    logger.close()
    assert len(waiting.records) == 2


@pytest.mark.parametrize("method", ["log", "close"])
def test_a_logger_that_hangs_holds_no_finished_run(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "CLOSE_S", 0.2)
    over, said = threading.Event(), list[str]()

    class Hangs(Recorder):
        def log(self, record: dict[str, Any]) -> None:
            over.wait() if method == "log" else None

        def close(self) -> None:
            over.wait()

    others = Recorder(), Recorder()
    background = BackgroundLogger([others[0], Hangs(), others[1]], said.append)
    background.log(train(1))
    background.log(train(2))
    background.close()
    assert said == [
        "Hangs did not finish within 0.2 s and is left behind: what it was given last may be missing"
    ]
    assert [record["step"] for record in others[0].records] == [1, 2]
    assert others[1].records[-1]["step"] == 2
    assert all(recorder.closed for recorder in others)
    over.set()
