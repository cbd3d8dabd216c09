"""The machine's limits: operators counted, peaks measured and remembered, and what bounds a step."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import build_run, same_bits
from torch import nn

from ptfast.profiling import roofline
from ptfast.profiling.operator_counting import Counted, Operators, StepCounter, flops
from ptfast.profiling.roofline import Peaks, known_peaks, measured_peaks
from ptfast.training.fit import fit

CPU = torch.device("cpu")
PEAKS = Peaks({"fp32": 1e11, "bf16": 2e11, "fp32_medium": 1.5e11}, 1e10, 1e-6)
DIGITS = ("data=digits", "steps=6", "schedule=constant", "batch_size=32")
SMALL = (*DIGITS, "model=mlp", "model.hidden=[16]")
RESNET = (*DIGITS, "model=resnet_digits", "model.depth=8", "model.width=4")


def counted_flops(step: Any) -> int:
    with Operators() as operators:
        step()
    return sum(map(flops, operators.products))


def test_the_operations_of_products_convolutions_and_attention_are_those_of_their_formulas() -> None:
    linear, inputs = nn.Linear(7, 5), torch.randn(3, 7, requires_grad=True)
    assert counted_flops(lambda: linear(inputs).sum().backward()) == 3 * (2 * 3 * 7 * 5)

    conv, images = nn.Conv2d(2, 4, 3, padding=1), torch.randn(5, 2, 6, 6, requires_grad=True)
    forward = 2 * 5 * 6 * 6 * 4 * 2 * 9
    assert counted_flops(lambda: conv(images)) == forward
    assert counted_flops(lambda: conv(images).sum().backward()) == 3 * forward

    heads = torch.randn(2, 3, 16, 8)
    products = 2 * (2 * 2 * 3 * 16 * 16 * 8)
    assert counted_flops(lambda: F.scaled_dot_product_attention(heads, heads, heads)) == products


def test_every_operator_counts_while_recording() -> None:
    with Operators() as operators:
        torch.ones(2).add(1).view(-1)
        operators.recording = False
        torch.ones(3).add(1)
    assert operators.calls == {"ones": 1, "add": 1, "view": 1}
    assert operators.products == []


@pytest.mark.parametrize(
    "words",
    [
        (*SMALL, "gradients.accumulate=2"),
        (*SMALL, "precision=bf16", "optimizer=adamw"),
        (*SMALL, "precision=amp_fp16"),
        (*RESNET, "checkpointing=full", "ema=ema"),
        (*RESNET, "checkpointing=selective"),
    ],
    ids=" ".join,
)
def test_a_counted_step_trains_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    counted = build_run(tmp_path / "counted", *words)
    assert fit(counted) == "finished"
    found = counted.counter.counted
    assert found.steps == 1
    assert len(found.operators.products) >= 5
    assert found.operators.calls.total() > 3 * len(found.operators.products)
    assert found.kept_bytes > 0

    monkeypatch.setattr(StepCounter, "due", lambda self, step: False)
    plain = build_run(tmp_path / "plain", *words)
    assert fit(plain) == "finished"
    assert plain.counter.counted is None
    assert same_bits(dict(plain.model.state_dict()), dict(counted.model.state_dict()))
    assert same_bits(plain.optimizer.state_dict()["state"], counted.optimizer.state_dict()["state"])


def test_peaks_are_measured_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    # A made-up second for everything: rates are then the amounts themselves.
    monkeypatch.setattr(roofline, "_quickest", lambda device, call: 1.0)
    assert known_peaks(CPU) is None
    found = measured_peaks(CPU, ["fp32"])
    assert found.flops_per_s["fp32"] == 2 * 512**3
    assert found.op_s == 1 / 200
    assert known_peaks(CPU, ["fp32"]) == found
    assert known_peaks(CPU, ["fp16"]) is None
    # Another number of threads has its own peaks; the better of two measurements counts.
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert known_peaks(CPU) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(roofline, "_quickest", lambda device, call: 2.0)
    assert measured_peaks(CPU, ["fp16"]).flops_per_s == {**found.flops_per_s, "fp16": 512**3}
    (file,) = tmp_path.glob("peaks-*.json")
    file.write_text("{")
    assert known_peaks(CPU) is None


def test_measuring_peaks_leaves_torch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    monkeypatch.setattr(roofline, "TRY_S", 0.0)
    before = torch.get_rng_state(), torch.get_float32_matmul_precision()
    found = measured_peaks(CPU)
    assert all(rate > 1e8 for rate in found.flops_per_s.values())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_float32_matmul_precision() == before[1]


# A step of 100 ms, and what it is known to do.
ROWS = {"data": 0.0, "transfer": 0.0, "forward": 0.03, "backward": 0.06, "gradient_sync": 0.0}
WORK = roofline.Work({"fp32": 8e9}, moved_bytes=1e8, calls=100)


def bound(work: roofline.Work = WORK, **rows: float) -> str:
    seconds = ROWS | {"optimizer": 0.01, "callbacks": 0.0} | rows
    seconds["backward"] -= max(sum(seconds.values()) - 0.1, 0.0)
    return roofline.weigh(work, PEAKS, seconds, 1)["bound"]


def test_the_bound_is_what_takes_the_largest_part() -> None:
    assert bound() == "compute"
    assert bound(replace(WORK, moved_bytes=9e8)) == "memory"
    assert bound(data=0.09) == "data"
    small = replace(WORK, flops={"fp32": 1e6}, moved_bytes=1e6, calls=0.0)
    assert bound(small) == "operators"
    assert bound(replace(small, calls=50_000)) == "overhead"


def test_a_long_run_measures_and_a_short_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    run = build_run(tmp_path / "run", *SMALL)
    assert fit(run) == "finished"
    measured: list[Any] = []
    monkeypatch.setattr(roofline, "measured_peaks", lambda *args: measured.append(args) or PEAKS)
    assert roofline.roofline_of(run, may_measure=True) is None

    for name in ("forward", "backward"):
        run.clock.seconds[name] += 10.0
    told = roofline.roofline_of(run, may_measure=True)
    assert told is not None
    assert "60 s" in told["line"]
    assert told["flops_per_step"] > 0
    assert not measured

    run.clock.seconds["forward"] += 100.0
    told = roofline.roofline_of(run, may_measure=False)
    assert told is not None
    assert "mfu" not in told
    assert not measured
    told = roofline.roofline_of(run, may_measure=True)
    assert told is not None
    assert len(measured) == 1
    products = 2 * 32 * (64 * 16 + 16 * 10)
    # The input needs no gradient.
    assert told["flops_per_step"] == 3 * products - 2 * 32 * 64 * 16
    assert told["step_s"] == pytest.approx(120 / 4, rel=0.05)
    assert told["mfu"] == pytest.approx(told["flops_per_step"] / told["step_s"] / 1e11)
    assert json.loads(json.dumps(told)) == told
    assert sum(run.clock.ledger().values()) == pytest.approx(run.clock.elapsed_s(), rel=1e-3)


def test_work_is_counted_from_weights_state_and_operators(tmp_path: Path) -> None:
    run = build_run(tmp_path, *SMALL, "optimizer=adamw")
    fit(run)
    work = roofline.count_work(run, run.counter.counted)
    weights = 4 * sum(p.numel() for p in run.model.parameters())
    steps = sum(kept["step"].numel() * 4 for kept in run.optimizer.state.values())
    assert work.moved_bytes == 6 * weights + 2 * (2 * weights + steps) + 2 * run.counter.counted.kept_bytes
    assert max(work.flops, key=work.flops.__getitem__) == "fp32"
    assert isinstance(run.counter.counted, Counted)


@pytest.mark.gpu("speed")
def test_a_gpu_is_measured_in_each_of_its_number_formats(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    device = torch.device("cuda", 0)
    found = measured_peaks(device, ["fp32", "bf16"])
    assert found.flops_per_s["bf16"] > 1.5 * found.flops_per_s["fp32"]
    run = build_run(tmp_path / "run", *RESNET, "device=cuda", "precision=bf16")
    assert fit(run) == "finished"
    work = roofline.count_work(run, run.counter.counted)
    assert max(work.flops, key=work.flops.__getitem__) == "bf16"
