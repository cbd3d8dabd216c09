"""What each precision resolves to, and that autocast neither nests, leaks nor goes stale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptfast import devices
from ptfast.errors import MachineError
from ptfast.precision import build_precision

CPU = torch.device("cpu")


def test_fp32_enters_nothing():
    precision = build_precision("fp32", CPU)
    assert not precision.enabled
    assert precision.scaler is None
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")
    assert precision.describe() == "fp32"


@pytest.mark.parametrize("mode", ["bf16", "amp"])
def test_cpu_runs_bf16(mode, monkeypatch):
    monkeypatch.setattr(devices, "CPU_INFO", devices.CPU_INFO / "nowhere")
    precision = build_precision(mode, CPU)
    assert precision.enabled
    assert precision.scaler is None
    with precision.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert "bf16" in precision.describe()


def test_amp_on_cpu_says_what_it_became(monkeypatch, tmp_path):
    cpu_info = tmp_path / "cpuinfo"
    monkeypatch.setattr(devices, "CPU_INFO", cpu_info)
    notes = []
    for flags in (
        "flags\t\t: fpu avx512_bf16",
        "Features\t: asimd bf16",
        "processor: 0",
        "flags\t\t: fpu avx2",
    ):
        cpu_info.write_text(f"model name: bf16\n{flags}\n")
        precision = build_precision("amp", CPU)
        notes.append(precision.describe())
        assert precision.enabled is ("bf16 autocast" in notes[-1])
    assert notes == ["bf16 autocast (amp on cpu)"] * 3 + ["fp32 (amp: this CPU has no bf16 instructions)"]


def test_one_context_serves_every_step():
    precision = build_precision("bf16", CPU)
    assert precision.autocast() is precision.autocast()
    with pytest.raises(RuntimeError, match="inside"), precision.autocast():
        raise RuntimeError("inside")
    assert not torch.is_autocast_enabled("cpu")


def test_converted_weights_follow_the_optimizer():
    precision, layer = build_precision("bf16", CPU), nn.Linear(4, 1, bias=False)
    inputs = torch.ones(1, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    outputs = []
    for _ in range(2):
        for _ in range(2):
            with precision.autocast():
                outputs.append(layer(inputs).sum())
            outputs[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert outputs[0] == outputs[1]
    assert outputs[2].item() == pytest.approx(outputs[0].item() - 8, abs=0.1)


@pytest.mark.parametrize(("mode", "device"), [("amp_fp16", "mps"), ("tf32", "cpu"), ("tf32", "mps")])
def test_what_a_device_has_not(mode, device):
    with pytest.raises(MachineError, match=rf"precision={mode}: .* {device}") as caught:
        build_precision(mode, torch.device(device))
    assert caught.value.code == "E005"


def test_fp16_on_a_cpu_runs_and_is_warned_of():
    precision = build_precision("amp_fp16", CPU)
    with precision.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float16
    assert precision.scaler is not None
    assert "slow on a CPU" in (precision.warning or "")
    assert build_precision("bf16", CPU).warning is None


def test_bf16_needs_hardware_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(MachineError, match=r"Tesla T4 has no bf16\. Use precision=amp") as caught:
        build_precision("bf16", torch.device("cuda"))
    assert caught.value.code == "E005"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["amp", "amp_fp16"])
def test_cuda_amp_is_fp16_with_a_scaler(mode):
    precision = build_precision(mode, torch.device("cuda"))
    assert precision.scaler is not None
    layer = nn.Linear(8, 8).cuda()
    with precision.autocast():
        loss = layer(torch.ones(2, 8, device="cuda"))
        assert loss.dtype is torch.float16
    precision.scaler.scale(loss.float().sum()).backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    precision.scaler.step(optimizer)
    precision.scaler.update()
    assert precision.scaler.get_scale() > 0
