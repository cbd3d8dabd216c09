"""The machine's limits: operators counted, peaks remembered, a step predicted, and the next switch."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import build_run, same_bits
from torch import nn

from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.profiling.limits import advice, closing, machine_peaks, roofline
from ptfast.profiling.limits.machine_peaks import Peaks, known_peaks, measured_peaks
from ptfast.profiling.limits.operators import Operators, flops
from ptfast.profiling.limits.step_counting import Counted, StepCounter
from ptfast.training.fit import fit

CPU = torch.device("cpu")
PEAKS = Peaks({"fp32": 1e11, "bf16": 2e11, "fp32_medium": 1.5e11}, 1e10, 1e-6)
DIGITS = ("data=digits", "steps=6", "schedule=constant", "batch_size=32")
SMALL = (*DIGITS, "model=mlp", "model.hidden=[16]")
RESNET = (*DIGITS, "model=resnet_digits", "model.depth=8", "model.width=4")


def counted_flops(step: Any) -> int:
    with Operators() as operators:
        step()
    return sum(flops(operator) * operator.count for operator in operators)


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


def test_operators_are_told_apart_by_shape_and_views_move_nothing() -> None:
    with Operators() as operators:
        for size in (2, 2, 3):
            torch.ones(size).add(1).view(-1)
    found = {(o.name, o.results[0].shape): o.count for o in operators}
    assert found["add", (2,)] == 2
    assert found["add", (3,)] == 1
    moved = {o.name: o.num_bytes for o in operators if o.results[0].shape == (2,)}
    assert moved["view"] == 0
    assert moved["add"] == 2 * 4 * 2


def test_what_has_not_been_used_for_long_is_far() -> None:
    first, others = torch.ones(100), [torch.ones(1000) for _ in range(3)]
    with Operators(near_bytes=8000) as operators:
        first.sum()
        first.sum()
        for other in others:
            other.sum()
        first.sum()
    far = {o.tensors[0].shape: o.far_bytes for o in operators if o.name == "sum"}
    assert far[(100,)] == 2 * 400
    assert far[(1000,)] == 3 * 4000


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
    assert {o.phase for o in found.operators} == {"forward", "backward", "optimizer"}
    assert found.kept_bytes > 0
    assert found.batch_bytes >= 32 * 64 * 4

    monkeypatch.setattr(StepCounter, "due", lambda self, step: False)
    plain = build_run(tmp_path / "plain", *words)
    assert fit(plain) == "finished"
    assert plain.counter.counted is None
    assert same_bits(dict(plain.model.state_dict()), dict(counted.model.state_dict()))
    assert same_bits(plain.optimizer.state_dict()["state"], counted.optimizer.state_dict()["state"])


def test_peaks_are_measured_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    calls: list[float] = []
    # A made-up second for everything: rates are then the amounts themselves.
    monkeypatch.setattr(
        machine_peaks, "_quickest", lambda device, call, amount: calls.append(amount) or 1 / amount
    )
    assert known_peaks(CPU) is None
    found = measured_peaks(CPU, ["fp32"])
    assert found.flops_per_s["fp32"] == 2 * 512**3
    assert found.op_s == 1 / 200
    assert known_peaks(CPU, ["fp32"]) == found
    assert known_peaks(CPU, ["fp16"]) is None
    # Other threads, other figures; and of two measurements the better one counts.
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    assert known_peaks(CPU) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(machine_peaks, "_quickest", lambda device, call, amount: 2 / amount)
    assert measured_peaks(CPU, ["fp16"]).flops_per_s == {**found.flops_per_s, "fp16": 512**3}
    (file,) = tmp_path.glob("peaks-*.json")
    file.write_text("{")
    assert known_peaks(CPU) is None


def test_measuring_peaks_leaves_torch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_peaks, "TRY_S", 0.0)
    before = torch.get_rng_state(), torch.get_float32_matmul_precision()
    found = measured_peaks(CPU)
    assert all(rate > 1e8 for rate in found.flops_per_s.values())
    assert found.seconds > 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_float32_matmul_precision() == before[1]


# Advice: what a step of 100 ms went to, and what is switched on.
ROWS = {"data": 0.0, "transfer": 0.0, "forward": 0.03, "backward": 0.06, "gradient_sync": 0.0}
WORK = roofline.Work({"fp32": 8e9}, 0.5, 1e8, 2e7, 1e8, calls=100)


@functools.cache
def _read(*words: str) -> Config:
    return read_config(words)[1]


def situation(
    *words: str, rows: dict[str, float] | None = None, work: roofline.Work = WORK, **given: Any
) -> advice.Situation:
    seconds = ROWS | {"optimizer": 0.01, "callbacks": 0.0} | (rows or {})
    rest = 0.1 - sum(seconds.values())
    seconds["backward"] += min(rest, 0)
    config = _read("data=digits", "model=mlp", "epochs=1", *words)
    lack = given.pop("lack", None)
    facts = {"device": "cpu", "data_kind": "image", "loader": "memory", "stepping": "fused"}
    step = roofline.weigh(work, given.pop("peaks", PEAKS), seconds, 1)
    return advice.Situation(step, config, lacks=lambda need: lack, **facts | given)


HALF = replace(WORK, flops={"bf16": 8e9})


def planted() -> dict[str, tuple[advice.Situation, str | None, float]]:
    """Situations by name, with the switch that should come first and what it promises."""
    bf16 = {"work": replace(WORK, flops={"bf16": 8e9}, pointwise_bytes=0.0)}
    text = {"data_kind": "text", "padding_share": 0.5, **bf16}
    unfused = {"stepping": "for-loop", "rows": {"optimizer": 0.04}, **bf16}
    return {
        "nothing": (situation("precision=bf16", **bf16), None, 1.0),
        "fp32 products": (
            situation(work=replace(WORK, pointwise_bytes=0.0)),
            *("precision=amp", 1 / (1 - 0.9 * 0.5)),
        ),
        "few products": (
            situation(work=replace(WORK, flops={"fp32": 2e6}, pointwise_bytes=0.0)),
            *(None, 1.0),
        ),
        "data": (
            situation("precision=bf16", rows={"data": 0.03}, **bf16),
            *("dataloader.read_ahead=true", 1 / 0.7),
        ),
        "data, read ahead": (
            situation("precision=bf16", "dataloader.read_ahead=true", rows={"data": 0.03}, **bf16),
            *(None, 1.0),
        ),
        "data, by choice": (
            situation("precision=bf16", "dataloader=plain", rows={"data": 0.03}, loader="plain", **bf16),
            *("dataloader=auto", 1 / 0.7),
        ),
        "padding": (situation("precision=bf16", **text), "batching=buckets", 1 / (1 - 0.45)),
        "padding, in buckets": (situation("precision=bf16", "batching=buckets", **text), None, 1.0),
        "padding, batches grow": (
            situation("precision=bf16", "curriculum=batch_size", "batch_size=64", **text),
            *(None, 1.0),
        ),
        "optimizer": (
            situation("precision=bf16", "optimizer.fused=false", **unfused),
            *("optimizer.fused=auto", 1 / (1 - 0.38)),
        ),
        "optimizer without": (
            situation("precision=bf16", "optimizer=lamb", **unfused),
            *(None, 1.0),
        ),
        "elementwise": (
            situation("precision=bf16", work=replace(HALF, pointwise_bytes=4e8)),
            *("compile=pointwise", 1 / (1 - 0.2)),
        ),
        "elementwise, for nothing": (
            situation("precision=bf16", work=replace(HALF, pointwise_bytes=8e7)),
            *(None, 1.0),
        ),
        "gradients": (
            situation("precision=bf16", "parallel=ddp", rows={"gradient_sync": 0.04}, num_ranks=2, **bf16),
            *("parallel.compression=bf16", 1 / (1 - 0.2)),
        ),
        "gradients, compressed": (
            situation(
                *("precision=bf16", "parallel=ddp", "parallel.compression=bf16"),
                **{"rows": {"gradient_sync": 0.04}, "num_ranks": 2, **bf16},
            ),
            *(None, 1.0),
        ),
        "debugging": (situation("debug=profiler", rows={"data": 0.05}), None, 1.0),
    }


def test_the_next_switch_is_the_one_that_saves_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptfast.core.devices.lack_of_compiler", lambda device: None)
    for name, (given, words, gain) in planted().items():
        found = advice.suggest(given)
        if words is None:
            assert found == [], name
            assert "none" in advice.describe(found, 0.1)["next"]
        else:
            assert found[0].words == words, name
            assert found[0].up_to(given.step.seconds) == pytest.approx(gain, rel=0.02), name


def test_what_the_machine_lacks_is_not_suggested() -> None:
    words = [s.words for s in advice.suggest(situation(lack="no bfloat16"))]
    assert words == ["precision.matmul_precision=auto"]
    small = replace(HALF, calls=50_000, pointwise_bytes=0.0)
    words = [s.words for s in advice.suggest(situation("precision=bf16", work=small, lack="no compiler"))]
    assert words == ["ptfast find batch"]


def test_the_bound_is_what_takes_the_largest_part() -> None:
    assert situation(work=WORK).step.bound == "compute"
    assert situation(work=replace(WORK, moved_bytes=9e8)).step.bound == "memory"
    assert situation(rows={"data": 0.09}).step.bound == "data"
    small = replace(WORK, flops={"fp32": 1e6}, moved_bytes=1e6, calls=0.0)
    assert situation(work=small).step.bound == "operators"
    assert situation(work=replace(small, calls=50_000)).step.bound == "overhead"


def test_a_long_run_measures_and_a_short_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    run = build_run(tmp_path / "run", *SMALL)
    assert fit(run) == "finished"
    config = read_config(SMALL)[1]
    measured: list[Any] = []
    monkeypatch.setattr(closing, "measured_peaks", lambda *args: measured.append(args) or PEAKS)
    assert closing.speed_of_light(run, config, may_measure=True) is None

    for name in ("forward", "backward"):
        run.clock.seconds[name] += 10.0
    told = closing.speed_of_light(run, config, may_measure=True)
    assert told is not None
    assert "60 s" in told["line"]
    assert told["flops_per_step"] > 0
    assert not measured

    run.clock.seconds["forward"] += 100.0
    told = closing.speed_of_light(run, config, may_measure=False)
    assert told is not None
    assert "mfu" not in told
    assert not measured
    told = closing.speed_of_light(run, config, may_measure=True)
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
    assert work.update_bytes == 3 * weights + 2 * (2 * weights + steps)
    assert work.moved_bytes == work.update_bytes + 3 * weights + 2 * run.counter.counted.kept_bytes
    assert work.format == "fp32"
    assert work.matmul_share == 1
    assert isinstance(run.counter.counted, Counted)


@pytest.mark.gpu
def test_a_gpu_is_measured_in_each_of_its_number_formats(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path))
    device = torch.device("cuda", 0)
    found = measured_peaks(device)
    assert found.flops_per_s["bf16"] > 1.5 * found.flops_per_s["fp32"]
    assert found.transfer_bytes_per_s is not None
    assert found.bytes_per_s > found.transfer_bytes_per_s
    run = build_run(tmp_path / "run", *RESNET, "device=cuda", "precision=bf16")
    assert fit(run) == "finished"
    work = roofline.count_work(run, run.counter.counted)
    assert work.format == "bf16"
    assert work.batch_bytes > 0
