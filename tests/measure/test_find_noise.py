"""The gradient noise scale: unbiased against gradients of single samples, and what is made of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from running import WITH_TESTS, build_run, same_bits
from torch.overrides import TorchFunctionMode

from ptfast.cli import command_line
from ptfast.config.read import read_config
from ptfast.measure.find import gradient_noise
from ptfast.measure.find.batch_search import SPARE, BatchSearch, memory_to_spare
from ptfast.measure.find.gradient_noise import (
    Critical,
    NoiseForecast,
    NoiseTrainer,
    estimate,
    forecast_noise,
    moments,
    noise_of,
)
from ptfast.training.step import Trainer

SMALL = ("model=mlp", "model.hidden=[8]", "batch_size=32")
PLAIN = ("optimizer=sgd", "optimizer.momentum=0", "schedule=constant")


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (16, 4, 2)])
def test_moments_are_right_on_average(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    true, deviation = torch.tensor([0.3, -0.1, 0.2]), torch.tensor([1.0, 0.5, 2.0])
    total = sum(sizes)
    found = []
    for _ in range(2000):
        parts = [
            (true + deviation * torch.randn(size, 3, generator=generator)).sum(0) / total for size in sizes
        ]
        shares = [size / total for size in sizes]
        squares = [float(part @ part) for part in parts]
        whole = torch.stack(parts).sum(0)
        weighted = sum(square / share for square, share in zip(squares, shares, strict=True))
        shares_squared = sum(share**2 for share in shares)
        figures = (float(whole @ whole), sum(squares), weighted, shares_squared, len(sizes), total)
        found.append(moments(*figures))
    signal, noise = torch.tensor(found).mean(0).tolist()
    assert signal == pytest.approx(float(true @ true), rel=0.15)
    assert noise == pytest.approx(float(deviation @ deviation), rel=0.05)


def test_the_estimate_weighs_steps_by_what_they_are_worth() -> None:
    # Two halves with noise scales of 10 and 90, seen with a batch of 30: their steps are worth 3/4 and 1/4.
    def half(scale: float, length: float) -> list[tuple[float, float, float]]:
        return [(length, scale * length, length * (1 + scale / 30))] * 50

    found = estimate(*zip(*half(10.0, 100.0), *half(90.0, 0.01), strict=True))
    assert found is not None
    assert found.batch == pytest.approx((0.75 * 10 + 0.25 * 90) / (0.75 + 0.25))


def test_noise_that_swamps_the_gradient_is_no_estimate() -> None:
    signal = [1.0 if step % 2 else -0.9 for step in range(40)]
    found = estimate(signal, [50.0] * 40, [2.0] * 40)
    assert found is not None
    assert found.batch is None
    assert found.at_least is not None
    assert 50 < found.at_least < 50 / 0.05
    assert estimate([1.0] * 5, [1.0] * 5, [1.0] * 5) is None


def test_the_error_is_what_other_draws_show() -> None:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(60):
        signal = 1 + torch.randn(100, generator=generator)
        noise = 40 + 5 * torch.randn(100, generator=generator)
        found.append(estimate(signal.tolist(), noise.tolist(), [2.0] * 100))
    batches = torch.tensor([one.batch for one in found if one and one.batch])
    errors = torch.tensor([one.error for one in found if one and one.error])
    assert len(batches) == 60
    assert float(errors.mean()) == pytest.approx(float(batches.std()), rel=0.3)


def test_a_model_against_gradients_of_single_samples(tmp_path: Path) -> None:
    """Weights that stay where they are: the noise scale over an epoch is that of all samples."""
    words = (*SMALL[:2], *PLAIN, "optimizer.lr=1e-12", "batch_size=147", "micro_batches=7", "epochs=2")
    run = build_run(tmp_path, *words)
    model, task = run.model, run.task
    grads = []
    for batch in run.train_loader.steps(0, 11):
        for (inputs, targets), _ in batch.micro_batches:
            for index in range(len(inputs)):
                loss, _ = task.loss(model, (inputs[index : index + 1], targets[index : index + 1]))
                parts = torch.autograd.grad(loss, list(model.parameters()))
                grads.append(torch.cat([part.flatten() for part in parts]))
    of_samples = torch.stack(grads).double()
    assert len(of_samples) == run.info.num_train == 1617
    true = float(of_samples.mean(0).square().sum())
    variance = float(of_samples.var(0).sum())
    found: dict[str, list[float]] = {"signal": [], "noise": [], "square": []}
    for segment in noise_of(run, 22):
        for name, values in found.items():
            values += segment[name]
    assert len(found["signal"]) == 22
    assert sum(found["noise"]) / 22 == pytest.approx(variance, rel=0.03)
    assert sum(found["signal"]) / 22 == pytest.approx(true, rel=0.03)
    critical = estimate(found["signal"], found["noise"], found["square"])
    assert critical is not None
    assert critical.batch == pytest.approx(variance / true, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_it_trains_as_training_does(precision: str, tmp_path: Path) -> None:
    words = (
        *SMALL,
        "model.dropout=0.2",
        "micro_batches=4",
        "gradients.clip_norm=1",
        f"precision={precision}",
    )
    plain, watched = build_run(tmp_path / "plain", *words), build_run(tmp_path / "watched", *words)
    trainer = Trainer(plain)
    trainer.train(plain.train_loader.steps(0, 20), 20)
    segments = list(noise_of(watched, 20))
    assert sum(len(segment["loss"]) for segment in segments) == 20
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(watched.model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert same_bits(plain.progress.samples, watched.progress.samples)


def test_steps_make_no_tensor_on_the_host(tmp_path: Path) -> None:
    """Its copy to the device would make the host wait, out of memory that is not pinned."""
    made: list[str] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.tensor, torch.as_tensor, torch.from_numpy):
                made.append(func.__name__)
            return func(*args, **(kwargs or {}))

    trainer = NoiseTrainer(build_run(tmp_path, *SMALL, "micro_batches=4"))
    batches = trainer.run.train_loader.steps(0, 6)
    trainer.train(batches, 3)
    prepared = [*batches]
    with Watch():
        trainer.train(iter(prepared), 6)
    assert made == []
    assert len(trainer.read()["noise"]) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "amp_fp16"])
def test_steps_never_wait_for_a_gpu(precision: str, tmp_path: Path, no_waits: Any) -> None:
    words = ("+recipe=resnet_digits", "micro_batches=4", "device=cuda", f"precision={precision}")
    trainer = NoiseTrainer(build_run(tmp_path, *words))
    batches = trainer.run.train_loader.steps(0, 20)
    trainer.train(batches, 5)
    with no_waits():
        trainer.train(batches, 20)
    assert len(trainer.read()["noise"]) == 20


def test_a_loss_that_diverges_ends_it(tmp_path: Path) -> None:
    run = build_run(tmp_path, *SMALL, *PLAIN, "optimizer.lr=1e30")
    losses = [loss for part in noise_of(run, 40) for loss in part["loss"]]
    assert 1 <= len(losses) < 40
    assert all(map(math.isfinite, losses))


def measured(rates: dict[int, float], folder: Path) -> BatchSearch:
    search = BatchSearch(SMALL, *read_config(SMALL), folder, 0.1)
    search.seen = {size: [{"samples_per_s": rate}] for size, rate in rates.items()}
    return search


def test_steps_samples_and_time_to_the_same_loss(tmp_path: Path) -> None:
    search = measured({32: 1000.0, 64: 1400.0, 128: 1500.0}, tmp_path)
    forecast = NoiseForecast(32, 1000, {"loss": [1.0] * 90, "signal": [], "noise": [], "square": []})
    forecast.critical = Critical(64.0, 8.0, 50.0)
    rows = {row["size"]: row for row in forecast.rows(search)}
    # S = S_min (1 + 64 / B), of which 90 at B = 32: S_min is 30, and E_min 1,920 samples.
    steps = {32: 90, 64: 60, 128: 45}
    assert {size: round(row["steps"]) for size, row in rows.items()} == steps
    assert rows[64]["samples"] == pytest.approx(1920 * 2)
    assert [rows[size]["time_s"] for size in (32, 64)] == [2.88, pytest.approx(2.743, abs=1e-3)]
    advised = forecast.advise(search)
    assert advised is not None
    assert advised[0] == 64
    assert advised[1] == pytest.approx(1.5)


def child(monkeypatch: pytest.MonkeyPatch, *results: dict[str, Any], fails: Exception | None = None) -> None:
    def measure_once(*arguments: Any) -> tuple[list[dict[str, Any]], str | None]:
        for result in results:
            arguments[5](result)
        if fails is not None:
            raise fails
        return list(results), None

    monkeypatch.setattr(gradient_noise, "measure_once", measure_once)


def segment(signal: list[float], **facts: Any) -> dict[str, Any]:
    length = len(signal)
    fixed = {"noise": [50.0] * length, "square": [2.0] * length, "loss": [1.0] * length}
    return {"signal": signal, **fixed, "total_steps": 500, **facts}


def test_a_swamped_gradient_is_said_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child(monkeypatch, segment([1.0, -0.9] * 20))
    forecast = forecast_noise(measured({32: 1000.0}, tmp_path), 40)
    out = capsys.readouterr().out
    assert "the noise swamps the true gradient" in out
    assert "the critical batch is above about 1" in out
    assert forecast.advise(measured({32: 1000.0}, tmp_path)) is None


def test_what_was_seen_before_an_end_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child(monkeypatch, segment([1.0, 1.1] * 10), {"no_room": "no memory for a tensor"})
    forecast = forecast_noise(measured({32: 1000.0}, tmp_path), 40)
    out = capsys.readouterr().out
    assert "ended early: out of memory: no memory for a tensor" in out
    assert "over the first 20 of 500 steps" in out
    assert forecast.critical is not None
    assert forecast.critical.batch == pytest.approx(50 / 1.05)


def test_flags_that_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["find", "lr", "--noise"]) == 2
    assert "--noise (command line): no such flag. Flags: --from, --to" in capsys.readouterr().err
    assert command_line.run(["find", "batch", *SMALL, "--noise", "parallel=fsdp"]) == 2
    assert "whole gradients, which no rank holds" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu_finds_what_the_processor_finds(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        run = build_run(tmp_path / device, *SMALL, "micro_batches=4", f"device={device}")
        found[device] = next(noise_of(run, 10, reads=1))
    for moment in ("signal", "noise", "square", "loss"):
        assert found["cuda"][moment] == pytest.approx(found["cpu"][moment], rel=0.02, abs=1e-4)


@pytest.mark.gpu
def test_memory_is_held_back_on_a_gpu() -> None:
    device = torch.device("cuda")
    free, total = torch.cuda.mem_get_info(device)
    with memory_to_spare(device):
        assert free - torch.cuda.mem_get_info(device)[0] >= 0.9 * SPARE * total


@pytest.mark.slow
def test_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    """And the recipe that is written trains."""
    flags = ["--from", "32", "--to", "64", "--seconds", "0.05", "--noise", "--steps", "40"]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **WITH_TESTS}
    found = {}
    for name, words in {"one": ["micro_batches=4"], "two": ["parallel=ddp", "parallel.nproc=2"]}.items():
        places = ["--out", name, "--write", f"{name}.yaml"]
        command = [sys.executable, "-m", "ptfast", "find", "batch", *SMALL, "device=cpu", *words]
        done = subprocess.run(
            [*command, *flags, *places],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "critical batch" in done.stdout
        found[name] = json.loads((tmp_path / name / "batch.json").read_text())["noise"]["moments"]
    for moment in ("signal", "noise", "square", "loss"):
        assert found["two"][moment] == pytest.approx(found["one"][moment], rel=1e-3, abs=1e-6)
