"""The benchmark beside other trainers: ptfast and the loop by hand train the same jobs."""

from __future__ import annotations

import math
import random
import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "scripts"))

import bench_peers
from peers import Clock, by_hand, ptfast, tasks
from peers.tasks import TASKS

SIZES = {
    "resnet": {"batch_size": 4, "num_train": 20},
    "mobilenet": {"batch_size": 4, "num_train": 10},
    "sst2": {"batch_size": 4, "num_train": 22},
    "gpt": {"batch_size": 2, "num_train": 6},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small files of all kinds that the tasks read."""
    from PIL import Image

    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for split in ("train", "test"):
        for name in range(10):
            (folder / "cifar" / split / f"class{name}").mkdir(parents=True)
            for number in range(2):
                image = Image.frombytes("RGB", (32, 32), draw.randbytes(3 * 32 * 32))
                image.save(folder / "cifar" / split / f"class{name}" / f"{number}.jpg")
    (folder / "sst2").mkdir()
    for split, size in (("train", 22), ("dev", 6)):
        rows = [f"{' '.join(draw.choices('abcdef', k=draw.randint(1, 9)))}\t{i % 2}" for i in range(size)]
        (folder / "sst2" / f"{split}.tsv").write_text("\n".join(rows))
    (folder / "tinyshakespeare.txt").write_text("".join(draw.choices("abcdef \n", k=3_000)))
    return folder


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[pytest.mark.slow] * (task == "mobilenet")) for task in TASKS]
)
def test_both_train_the_same_job(task, data, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "VAL_WINDOWS", 4)
    options = {**TASKS[task][1], "epochs": 2, **SIZES[task], "data": data, "cache": tmp_path}
    job = bench_peers.build_job(task, options, tmp_path)
    job.prepare()
    ours, theirs = Clock(), Clock()
    by_hand.train(job, theirs)
    ptfast.train(ptfast.words_of(job, seed=0), ours)
    assert sorted(size for _, size in ours.steps) == sorted(size for _, size in theirs.steps)
    for clock in (ours, theirs):
        assert sum(size for _, size in clock.steps) == 2 * options["num_train"]
        assert len(clock.evaluations) == 2
        assert all(math.isfinite(figure) for _, figure in clock.evaluations)


def test_speed_leaves_out_warm_up_and_evaluations():
    moments = [0, 9, 10, 11, 13, 20, 22]
    clock = Clock(steps=[(moment, 4) for moment in moments], evaluations=[(19, 0.5)])
    assert clock.samples_per_s() == 8 / 4


def test_a_ratio_is_of_two_trainings_of_one_round(capsys):
    def result(peer, number, speed, target_s):
        facts = {"peer": peer, "round": number, "samples_per_s": speed, "memory_bytes": 2**20}
        reached = [(1.0, 3.0), *([] if target_s is None else [(target_s, 2.5)])]
        return {**facts, "first_step_s": 1.0, "evaluations": reached}

    results = [
        *(result("by_hand", 0, 100, 10.0), result("by_hand", 1, 50, 20.0), result("by_hand", 2, 10, 20.0)),
        *(result("ptfast", 0, 200, 5.0), result("ptfast", 1, 100, None)),
    ]
    bench_peers.print_table("gpt", {**TASKS["gpt"][1], "bf16": False, "target": 2.5}, results)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| ptfast"))
    speed, times, memory = "150 [100-200] | 2.00 [2.00-2.00]", "5.0 s | 0.50 [0.50-0.50] | 1.0 s", "1 MiB"
    assert row == f"| ptfast | {speed} | {times} | {memory} | 1 of 2, 2.750 |"
