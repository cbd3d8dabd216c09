"""The benchmark of the speed-run: the recipe and the loop by hand train, are timed, and are in its tables."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ptfast.cli import command_line
from scripts import bench_records


def test_both_rows_train_and_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = np.random.default_rng(0)
    for name in ("train/cat", "train/dog", "test/cat", "test/dog"):
        folder = tmp_path / "images" / name
        folder.mkdir(parents=True)
        for index in range(8):
            pixels = noise.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.jpg")

    def execute(words: list[str], environment: dict[str, str], *, accepts: int = 0) -> str:
        """In this process, where torch is imported already."""
        assert bool(environment) is (command_of[-1] == bench_records.TUNED)
        capsys.readouterr()
        if words[:2] == ["-m", "ptfast"]:
            assert command_line.run(words[2:]) == accepts
        else:
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(words[0], run_name="__main__")
        return capsys.readouterr().out

    command_of: list[str] = []
    run_row = bench_records.run_row
    monkeypatch.setattr(bench_records, "execute", execute)
    monkeypatch.setattr(
        bench_records, "run_row", lambda args, row, *rest: command_of.append(row) or run_row(args, row, *rest)
    )
    # As a user's own process imports it, for the callback.
    monkeypatch.setitem(sys.modules, "bench_records", bench_records)
    results = tmp_path / "results"
    words = ["--epochs", "1", "--batch-size", "4", "--seeds", "0", "--rounds", "1", "--steps", "1"]
    words += ["--warm-up", "1", "--results", str(results), "device=cpu", "backend.threads=1"]
    monkeypatch.setattr(sys, "argv", ["bench_records", str(tmp_path / "images"), *words])
    bench_records.main()
    table = capsys.readouterr().out

    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["kind"], line["row"]) for line in lines] == [
        *[("run", "ptfast"), ("run", "by hand")],
        *[("round", "ptfast"), ("round", "by hand"), ("round", "by hand, memory kept")],
    ]
    for line in lines[:2]:
        # The start of the first step and the ends of four.
        assert len(line["times_s"]) == 5
        assert 0 <= line["plain"] <= 1
        assert 0 <= line["views"] <= 1
        assert f"| {line['row']} | 0 | " in table
    assert all(line["steps"] == 1 and line["step_s"] > 0 for line in lines[2:])
    assert "rounds of 1 steps" in table
