"""Each precision resolves to the right type, and autocast neither nests, leaks nor goes stale."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ptfast.config.read import read_config
from ptfast.core import devices
from ptfast.core.auto_choices import AutoChoices
from ptfast.core.errors import MachineError
from ptfast.techniques.precision import Precision as Section
from ptfast.techniques.precision import mixed_precision as precision_module
from ptfast.techniques.precision.mixed_precision import build_precision, kept_conversions

CPU = torch.device("cpu")


def test_fp32_enters_nothing():
    precision = build_precision(Section(mode="fp32"), CPU)
    assert precision.autocast_dtype is None
    assert precision.scaler is None
    with precision.autocast:
        assert not torch.is_autocast_enabled("cpu")
    assert precision.note == "fp32"


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """Have ptfast take this machine's CPU for one that is described so."""

    def describe(text):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")

    return describe


def test_bf16_computes_in_it_on_any_cpu(cpu):
    for flags in ("avx2", "avx2 avx512_bf16"):
        cpu(f"flags\t\t: {flags}\n")
        precision = build_precision(Section(mode="bf16"), CPU)
        assert precision.scaler is None
        with precision.autocast:
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")
        assert precision.note == "bf16 autocast"


@pytest.mark.parametrize(
    ("mode", "native", "remedy"),
    [
        ("bf16", "avx512_bf16", "Use precision=amp, which is fp32 here"),
        ("bf16_true", "amx_bf16", "Use precision=amp, which is fp32 here"),
        ("amp_fp16", "avx512_fp16", "Use precision=amp"),
    ],
)
def test_a_cpu_without_the_instructions_is_warned_of(cpu, mode, native, remedy):
    cpu(f"flags\t\t: avx2 {native}\n")
    assert build_precision(Section(mode=mode), CPU).warning is None
    cpu("flags\t\t: fpu avx2 fma f16c\n")
    lack = "this CPU has no float16 instructions" if mode == "amp_fp16" else "bf16 is no faster on this CPU"
    assert build_precision(Section(mode=mode), CPU).warning == f"precision={mode}: {lack}. {remedy}"


@pytest.mark.parametrize(
    ("text", "has_bf16"),
    [
        ("model name: bf16\nflags\t\t: fpu avx512_bf16\n", True),
        ("flags\t\t: fpu amx_tile amx_bf16\nflags\t\t: fpu\n", True),
        ("processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd svebf16 i8mm bf16\nCPU part\t: 0xd40\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd evtstrm crc32\nCPU implementer\t: 0x41\n", False),
        ("model name: bf16\nflags\t\t: fpu avx2\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx512_bf16 avx512_fp16\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: avx512_bf16 avx512_fp16 amx_bf16\n", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx512_bf16 avx512_fp16\n", True),
    ],
)
def test_amp_on_a_cpu_goes_by_its_instructions(cpu, text, has_bf16):
    cpu(text)
    choices = AutoChoices()
    precision = build_precision(Section(mode="amp"), CPU, choices=choices)
    assert (precision.autocast_dtype is not None) is has_bf16
    assert precision.warning is None
    assert precision.note == ("bf16 autocast" if has_bf16 else "fp32")
    fp32 = "precision.mode=fp32 because amp is on, and bf16 is no faster on this CPU"
    bf16 = "precision.mode=bf16 because amp is on, and this CPU multiplies bf16"
    assert str(choices.made["precision.mode"]) == (bf16 if has_bf16 else fp32)
    cpu("flags\t\t: avx2\n" if has_bf16 else "flags\t\t: avx512_bf16\n")
    choices.choose("device", "cpu")
    resumed = AutoChoices(choices.made)
    assert (
        build_precision(Section(mode="amp"), CPU, choices=resumed).autocast_dtype is precision.autocast_dtype
    )
    assert resumed.made["precision.mode"] == choices.made["precision.mode"]


@pytest.mark.parametrize("text", [None, "", "flags\t\t:\n", "\0\xff: :\n:\n", "no colon at all"])
def test_where_linux_says_nothing_torch_is_asked(monkeypatch, tmp_path, text):
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    if text is not None:
        (tmp_path / "cpuinfo").write_text(text, encoding="latin-1")
    for capabilities in ({"arm_bf16": True}, {"avx2": True, "avx512_bf16": False, "num_sockets": 1}, None):
        if capabilities is None:
            monkeypatch.delattr(torch.cpu, "get_capabilities")
        else:
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda c=capabilities: c, raising=False)
        autocast_dtype = build_precision(Section(mode="amp"), CPU).autocast_dtype
        assert (autocast_dtype is not None) is ("arm_bf16" in (capabilities or ()))


def test_one_context_serves_every_step():
    precision = build_precision(Section(mode="bf16"), CPU)
    with pytest.raises(RuntimeError, match="inside"), precision.autocast:
        raise RuntimeError("inside")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("keep", [nullcontext, kept_conversions])
def test_converted_weights_follow_the_optimizer(keep):
    precision, layer = build_precision(Section(mode="bf16"), CPU), nn.Linear(4, 1, bias=False)
    inputs = torch.ones(1, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    outputs = []
    for _ in range(2):
        with keep():
            for _ in range(2):
                with precision.autocast:
                    outputs.append(layer(inputs).sum())
                outputs[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert outputs[0] == outputs[1]
    assert outputs[2].item() == pytest.approx(outputs[0].item() - 8, abs=0.1)


@pytest.mark.parametrize(("mode", "device"), [("amp_fp16", "mps"), ("tf32", "cpu"), ("tf32", "mps")])
def test_what_a_device_has_not(mode, device):
    with pytest.raises(MachineError, match=rf"precision={mode}: .* {device}") as caught:
        build_precision(Section(mode=mode), torch.device(device))
    assert caught.value.code == "E005"


def test_fp16_on_a_cpu_scales_its_loss():
    precision = build_precision(Section(mode="amp_fp16"), CPU)
    with precision.autocast:
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float16
    assert precision.scaler is not None


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_amp_on_cuda_is_bf16_where_the_gpu_multiplies_it(monkeypatch, native, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: device)
    monkeypatch.setattr(torch, "autocast", lambda device, dtype: SimpleNamespace(fast_dtype=dtype))
    precision = build_precision(Section(mode="amp"), torch.device("cuda"))
    assert precision.autocast_dtype is dtype
    assert precision.scaler == (None if native else "cuda")
    name = "bf16 autocast" if native else "fp16 autocast with gradient scaling"
    assert precision.note == name


@pytest.mark.parametrize("emulates", [True, False])
def test_bf16_on_an_older_gpu_is_emulated_or_refused(monkeypatch, emulates):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation and emulates
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch, "autocast", lambda device, dtype: SimpleNamespace(fast_dtype=dtype))
    if emulates:
        warning = build_precision(Section(mode="bf16"), torch.device("cuda")).warning
        remedy = "Use precision=amp, which is fp16 here"
        assert warning == f"precision=bf16: Tesla T4 has no bf16. {remedy}"
        return
    with pytest.raises(MachineError, match=r"Tesla T4 has no bf16\. Use precision=amp") as caught:
        build_precision(Section(mode="bf16"), torch.device("cuda"))
    assert caught.value.code == "E005"


def test_no_setting_outlives_its_run():
    for matmul in ("medium", "highest"):
        build_precision(Section(mode="fp32", matmul_precision=matmul), CPU)
        assert torch.get_float32_matmul_precision() == matmul
    assert (
        build_precision(Section(matmul_precision="medium"), CPU).note == "fp32, matrix products at `medium`"
    )
    build_precision(Section(), CPU)


@pytest.mark.parametrize(
    ("words", "rounds"),
    [((), True), (("preset=plain",), True), (("precision=bf16_true",), True), (("precision=fp32",), False)],
)
def test_convolutions_round_as_torch_has_it_unless_fp32_is_asked_for(words, rounds, monkeypatch):
    _, config = read_config(words)
    monkeypatch.setattr(precision_module, "check_precision", lambda mode, device: None)
    precision = build_precision(config.precision, torch.device("cuda"))
    assert torch.backends.cudnn.allow_tf32 is rounds
    assert ("TF32 convolutions, torch's default" in precision.note) == (rounds and not precision.half_weights)


@pytest.mark.gpu("TF32")
def test_tf32_rounds_products_and_convolutions():
    device = torch.device("cuda")
    exact = build_precision(Section(tf32_convolutions=False), device)
    tf32 = build_precision(Section(mode="tf32", matmul_precision="high"), device)
    assert torch.backends.cudnn.allow_tf32
    assert (exact.matmul, tf32.matmul) == ("highest", "high")
    assert tf32.note == "fp32 with TF32 products"
    build_precision(Section(tf32_convolutions=False), device)
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["amp", "amp_fp16"])
def test_half_width_on_cuda(mode):
    precision, layer = build_precision(Section(mode=mode), torch.device("cuda")), nn.Linear(8, 8).cuda()
    with precision.autocast:
        outputs = layer(torch.ones(2, 8, device="cuda"))
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert outputs.dtype is (torch.bfloat16 if mode == "amp" and native else torch.float16)
    assert (precision.scaler is None) == (outputs.dtype is torch.bfloat16)
    if precision.scaler is None:
        return
    precision.scaler.scale(outputs.float().sum()).backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    precision.scaler.step(optimizer)
    precision.scaler.update()
    assert precision.scaler.get_scale() > 0
