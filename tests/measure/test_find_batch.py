"""`ptfast find batch`: the quickest size is chosen, and running out of memory is survived."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import WITH_TESTS, train

from ptfast.cli import command_line
from ptfast.config.read import read_config
from ptfast.core.errors import ReportedError
from ptfast.measure.experiment.laboratory import TrialResult
from ptfast.measure.experiment.trial import SPARE, memory_to_spare
from ptfast.measure.experiment.warm_parent import NO_MEMORY
from ptfast.measure.find import batch_finder
from ptfast.measure.find.batch_finder import BatchSearch

SMALL = ("model=mlp", "model.hidden=[8]")


def search_among(rates: dict[int, float], monkeypatch: pytest.MonkeyPatch, **limits: int) -> BatchSearch:
    """A search on a machine on which sizes have these rates, and what is larger than `room` does not fit.

    Beyond `spare`, if given, a whole run finds no room. Processes of sizes beyond `killed` are killed.
    """

    class Machine:
        def __init__(self, **options: float) -> None:
            pass

        def __enter__(self) -> Machine:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def try_configs(self, configs: Any, *, timed_s: float, spares: bool) -> list[TrialResult]:
            (words,) = configs
            size = int(words[-1].removeprefix("batch_size="))
            room = limits.get("spare" if spares else "room", limits.get("room", sys.maxsize))
            if size > limits.get("killed", sys.maxsize):
                return [TrialResult(words, math.nan, "its process ended with exit code -11")]
            if size > room:
                return [TrialResult(words, math.nan, "ran out of memory", {"code": NO_MEMORY})]
            facts = {"rates": [rates.get(size, 1.0)], "peak_memory_bytes": size, "num_train": 10_000}
            return [TrialResult(words, 0.0, "", facts)]

    monkeypatch.setattr(batch_finder, "Laboratory", Machine)
    return BatchSearch(read_config(SMALL)[1], SMALL, 0.1)


def test_the_peak_is_found_and_not_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {8: 100, 16: 180, 32: 300, 64: 280, 128: 200, 256: 150, 48: 320, 24: 290}
    search = search_among(rates, monkeypatch)
    search.ascend(8, 4096)
    assert max(search.seen) == 256
    search.refine(8, 4096)
    assert search.best() == 48
    assert len(search.seen[48]) == 3


def test_of_sizes_as_quick_the_smallest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_among({8: 100, 16: 199, 32: 200, 64: 201}, monkeypatch)
    search.measure([8, 16, 32, 64])
    assert search.best() == 16


@pytest.mark.parametrize("limit", ["room", "killed"])
def test_what_does_not_fit_ends_the_search(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {size: float(size) for size in range(10_000)}
    search = search_among(rates, monkeypatch, **{limit: 100})
    search.ascend(8, 4096)
    assert search.too_large is not None
    assert search.too_large["size"] == 128
    search.refine(8, 4096)
    assert search.best() == 96


def test_a_size_without_room_to_spare_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {size: float(size) for size in range(10_000)}
    search = search_among(rates, monkeypatch, room=100, spare=70)
    search.ascend(8, 4096)
    search.refine(8, 4096)
    assert search.best() == 96
    assert search.confirm() == 64
    # Where no limit was met, nothing is run a second time.
    roomy = search_among(rates, monkeypatch)
    roomy.measure([8, 16])
    roomy.measure = None  # type: ignore[assignment,method-assign]
    assert roomy.confirm() == 16


def test_what_the_data_has_no_batches_for_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_among({}, monkeypatch)
    search.measure([8, 20_000])
    assert (list(search.seen), search.too_large) == ([8], None)
    assert search.rejected == {20_000: "more than an epoch of 10,000 samples"}
    search._note(1617, TrialResult((), math.nan, "leaves one", {"code": "D006"}), "")
    assert search.rejected[1617] == "leaves one"
    with pytest.raises(ReportedError, match="no such file"):
        search._note(
            9, TrialResult((), math.nan, "x", {"code": "D001", "line": "ptfast: error: no such file"}), ""
        )


@pytest.mark.parametrize(("optimizer", "rule"), [("sgd", "linear"), ("adamw", "sqrt")])
def test_the_recipe_written_scales_the_rate(optimizer: str, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "found.yaml"
    words = ["recipe=resnet_digits", "checkpointing=every_n", f"optimizer={optimizer}", "batch_size=64"]
    batch_finder._write(file, BatchSearch(read_config(words)[1], words, 0.1), 128)
    _, config = read_config([f"recipe={file}"])
    assert (config.batch_size, config.checkpointing.mode, config.checkpointing.every) == (128, "every_n", 2)
    assert (config.optimizer.lr_scaling, config.optimizer.reference_batch) == (rule, 64)


@pytest.mark.gpu
def test_memory_is_held_back_on_a_gpu() -> None:
    device = torch.device("cuda")
    free, total = torch.cuda.mem_get_info(device)
    with memory_to_spare(device, 0):
        assert free - torch.cuda.mem_get_info(device)[0] >= 0.9 * SPARE * total


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
    _, config = read_config(["recipe=./found.yaml"])
    assert config.batch_size == facts["chosen"]
    assert (config.optimizer.reference_batch or 64) == 64
    assert train("recipe=./found.yaml", "epochs=null", "steps=2", "run.dir=run") == 0


@pytest.mark.slow
def test_too_few_samples(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["find", "batch", *SMALL, "--from", "4096", "--seconds", "0.05"]) == 3
    assert "more than an epoch of 1,617 samples" in capfd.readouterr().err


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
