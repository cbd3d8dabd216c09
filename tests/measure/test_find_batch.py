"""`ptfast find batch`: the quickest size is chosen, and running out of memory is survived."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running import WITH_TESTS, train

from ptfast.cli import command_line
from ptfast.config.read import read_config
from ptfast.core.errors import ReportedError
from ptfast.measure.find import batch_finder, batch_search
from ptfast.measure.find.batch_search import BatchSearch

SMALL = ("model=mlp", "model.hidden=[8]")


def search_among(
    rates: dict[int, float], folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: int
) -> BatchSearch:
    """A search on a machine on which sizes have these rates, and what is larger than `room` does not fit.

    With activations that are computed again, three times as much fits, at 0.9 of the rate; beyond `spare`,
    if given, a whole run finds no room.
    """

    def measure_once(*arguments: Any) -> tuple[list[dict[str, Any]], str | None]:
        keywords, results = arguments[4], []
        mode = None if arguments[2].checkpointing.mode == "none" else arguments[2].checkpointing.mode
        if mode is not None and "no_blocks" in limits:
            raise ReportedError("error[C011]: checkpointing=full: Mlp has no repeated blocks", 2)
        more = 1 if mode is None else 3
        room = limits.get("spare" if keywords["checked_fully"] else "room", limits.get("room", sys.maxsize))
        for size in keywords["sizes"]:
            if size > limits.get("killed", sys.maxsize):
                return results, "SIGKILL"
            if size > room * more:
                return [*results, {"size": size, "no_room": "out of memory"}], None
            rate = rates.get(size, 1.0) * (1 if mode is None else 0.9)
            facts = {"rates": [rate], "memory_bytes": size}
            results.append({"size": size, "samples_per_s": rate, **facts})
        return results, None

    monkeypatch.setattr(batch_search, "measure_once", measure_once)
    return BatchSearch(SMALL, *read_config(SMALL), folder, 0.1)


def test_the_peak_is_found_and_not_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {8: 100, 16: 180, 32: 300, 64: 280, 128: 200, 256: 150, 48: 320, 24: 290}
    search = search_among(rates, tmp_path, monkeypatch)
    search.ascend(8, 4096)
    assert max(search.seen) == 256
    search.refine(8, 4096)
    assert search.best() == 48
    assert len(search.seen[48]) == 3


def test_of_sizes_as_quick_the_smallest_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_among({8: 100, 16: 199, 32: 200, 64: 201}, tmp_path, monkeypatch)
    search.measure([8, 16, 32, 64])
    assert search.best() == 16


@pytest.mark.parametrize("limit", ["room", "killed"])
def test_what_does_not_fit_ends_the_search(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {size: float(size) for size in range(10_000)}
    search = search_among(rates, tmp_path, monkeypatch, **{limit: 100})
    search.ascend(8, 4096)
    assert search.too_large is not None
    assert search.too_large["size"] == 128
    search.refine(8, 4096)
    assert search.best() == 96


def test_a_size_without_room_to_spare_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {size: float(size) for size in range(10_000)}
    search = search_among(rates, tmp_path, monkeypatch, room=100, spare=70)
    search.ascend(8, 4096)
    search.refine(8, 4096)
    assert search.best() == 96
    assert search.confirm() == 64
    # Where no limit was met, nothing is run a second time.
    roomy = search_among(rates, tmp_path, monkeypatch)
    roomy.measure([8, 16])
    roomy.measure = None  # type: ignore[assignment,method-assign]
    assert roomy.confirm() == 16


@pytest.mark.parametrize(
    ("rates", "limits", "mode", "size"),
    [
        # Still rising where memory ends: twice the batch at 0.9 of its rate is worth it, ...
        ({8: 50.0, 16: 100.0, 32: 180.0, 64: 300.0, 96: 320.0, 128: 500.0, 192: 510.0}, {}, "full", 192),
        # ... and not where larger batches gain nothing.
        ({8: 50.0, 16: 100.0, 32: 180.0, 64: 300.0, 96: 320.0, 128: 330.0, 192: 340.0}, {}, "none", 96),
        ({8: 50.0, 16: 100.0, 32: 180.0, 64: 300.0, 96: 320.0}, {"no_blocks": 1}, "none", 96),
        # Where nothing fits as configured.
        ({8: 50.0, 16: 100.0, 24: 110.0}, {"room": 6}, "full", 16),
    ],
)
def test_checkpointing_where_it_buys_a_quicker_batch(
    rates: dict[int, float],
    limits: dict[str, int],
    mode: str,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = search_among(rates, tmp_path, monkeypatch, **({"room": 100} | limits))
    search.ascend(8, 4096)
    if search.seen:
        search.refine(8, 4096)
    assert search.too_large is not None
    best = batch_finder._choose([search, *batch_finder._with_checkpointing(search, 8, 4096)])
    assert best is not None
    assert (best[0].mode, best[1]) == (mode, size)


def test_the_recipe_written_has_the_checkpointing_it_was_found_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.yaml"
    words = ["+recipe=resnet_digits", "checkpointing=every_n", "optimizer=sgd", "batch_size=64"]
    search = BatchSearch(words, *read_config(words), tmp_path, 0.1)
    batch_finder._write(file, search, 128, lr_ratio=1.5)
    _, config = read_config([f"+recipe={file}"])
    assert (config.batch_size, config.checkpointing.mode, config.checkpointing.every) == (128, "every_n", 2)
    given = search.config.optimizer.target.kwargs["lr"]
    adapts = any(name in search.config.optimizer.target.path.lower() for name in batch_finder.ADAPTIVE)
    ratio = 1.5**0.5 if adapts else 1.5
    assert config.optimizer.target.kwargs["lr"] == pytest.approx(given * ratio, rel=0.01)


@pytest.mark.slow
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", WITH_TESTS["PYTHONPATH"])
    flags = ["--from", "32", "--to", "64", "--seconds", "0.05", "--out", "out", "--write", "found.yaml"]
    assert command_line.run(["find", "batch", *SMALL, *flags]) == 0
    out = capfd.readouterr().out
    facts = json.loads(Path("out/batch.json").read_text())
    assert f"best: batch_size={facts['chosen']} at" in out
    _, config = read_config(["+recipe=./found.yaml"])
    assert config.batch_size == facts["chosen"]
    assert (config.optimizer.reference_batch or 64) == 64
    assert train("+recipe=./found.yaml", "epochs=null", "steps=2", "run.dir=run") == 0


@pytest.mark.slow
def test_too_few_samples(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["find", "batch", *SMALL, "--from", "4096", "--seconds", "0.05"]) == 3
    assert "more than an epoch of 1,617 samples" in capfd.readouterr().err


def test_flags_of_another_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["find", "batch", "--steps", "100"]) == 2
    assert "--steps (command line): is for --noise" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by ulimit")
def test_it_survives_running_out_of_memory(tmp_path: Path) -> None:
    words = "model=mlp model.hidden=[200000] device=cpu --from 128 --seconds 0.1 --out out"
    command = f"ulimit -v 5200000; exec {sys.executable} -m ptfast find batch {words}"
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **WITH_TESTS}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("do not fit( with room to spare)?: ulimit -v leaves", done.stdout)
    facts = json.loads((tmp_path / "out" / "batch.json").read_text())
    assert facts["chosen"] < facts["too_large"]["size"]


@pytest.mark.slow
def test_two_ranks_agree_on_one_size(tmp_path: Path) -> None:
    words = [*SMALL, "device=cpu", "parallel=ddp", "parallel.nproc=2"]
    flags = ["--from", "32", "--to", "64", "--seconds", "0.1", "--out", "out"]
    command = [sys.executable, "-m", "ptfast", "find", "batch", *words, *flags]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **WITH_TESTS}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=300)
    facts = json.loads((tmp_path / "out" / "batch.json").read_text())
    assert facts["chosen"] in (32, 48, 64)
    assert all(trial["micro_batches"] == 2 for trials in facts["trials"].values() for trial in trials)


def test_batches_of_so_many_tokens_have_no_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data=text_tsv", "data.path=x.tsv", "model=text_encoder", "batching=tokens"]
    assert command_line.run(["find", "batch", *words]) == 2
    assert "no batch size to search for" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for what in ("lr", "batch"):
        assert command_line.run(["find", what, *SMALL, "--out", str(tmp_path / "file")]) == 4
        assert "--out=" in capsys.readouterr().err
