"""Activation checkpointing under the compiler, on models of other packages, and on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checkpointed import CASES, MODES, assert_same, pair, saved_bytes, step
from torch import Tensor, nn

from ptfast.models.gpt import Gpt
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.checkpointing.activation_checkpointing import apply_checkpointing, apply_memory_budget
from ptfast.techniques.compile.compilation import Compilation


@pytest.mark.slow
def test_a_budget_of_the_compiler() -> None:
    """The partitioner that the budget steers, without the C++ compiler behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.GELU())
    inputs, counts, grads = torch.randn(64, 8), {}, {}
    for budget in (None, 0.2):
        apply_memory_budget(budget)
        try:
            compiled = copy.deepcopy(model)
            compiled.compile(backend="aot_eager_decomp_partition")
            with saved_bytes() as found:
                loss = compiled(inputs).square().sum()
            loss.backward()
        finally:
            apply_memory_budget(None)
        counts[budget], grads[budget] = found[0], [p.grad for p in compiled.parameters()]
    assert counts[0.2] < 0.7 * counts[None]
    torch.testing.assert_close(grads[0.2], grads[None], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["batch norm", "gpt"])
def test_a_compiled_model(case: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = ResNetCifar(4, 3, depth=8, width=4) if case == "batch norm" else Gpt(11, 12, 16, 2, 2)
    inputs = torch.randn(4, 3, 8, 8) if case == "batch norm" else torch.randint(11, (2, 12))
    expected = copy.deepcopy(model)
    expected.compile()
    step(expected, inputs)
    for mode in ("full", "selective", "budget"):
        other = copy.deepcopy(model)
        apply_checkpointing(other, Checkpointing(mode=mode))  # type: ignore[arg-type]
        apply_memory_budget(0.3 if mode == "budget" else None)
        other.compile()
        step(other, inputs)
        apply_memory_budget(None)
        torch.testing.assert_close(other.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
        for one, two in zip(other.parameters(), expected.parameters(), strict=True):
            scale = two.grad.abs().max()
            torch.testing.assert_close(one.grad / scale, two.grad / scale, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_in_parts(mode: Any) -> None:
    plain, other = pair(lambda: ResNetCifar(4, 3, depth=8, width=4), mode)
    Compilation("blocks", "cpu").apply(other)
    inputs = torch.randn(4, 3, 8, 8)
    assert torch.allclose(step(plain, inputs), step(other, inputs))
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    for one, two in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5 * float(two.grad.abs().max()))


class Dropped(nn.Module):
    """Where an output is not zero, the gradient of its weight is not, if the same draws made both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(500)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.weight * x).sin().sin()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_of_a_compiled_model(mode: Any) -> None:
    model = nn.Sequential(Dropped())
    apply_checkpointing(model, Checkpointing(mode=mode, blocks="0"))
    model.compile()
    output = model(torch.rand(500) + 0.5)
    output.sum().backward()
    assert 0.3 < (output != 0).float().mean() < 0.7
    assert torch.equal(output != 0, model[0].weight.grad != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "distilbert"])
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
        "llama": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
    }[name]
    config = transformers.AutoConfig.for_model(name, vocab_size=13, **small)
    tokens = torch.randint(13, (2, 7))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModel.from_config(config)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(input_ids=tokens).last_hidden_state

    for mode in MODES:
        plain, other = pair(Last, mode)
        assert torch.equal(step(plain, tokens), step(other, tokens))
        assert_same(plain, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "vit_tiny_patch16_224", "convnext_atto"])
def test_models_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    images = torch.randn(2, 3, 64, 64)
    size = {"img_size": 64} if name.startswith("vit") else {}
    for mode in MODES:
        plain, other = pair(lambda: timm.create_model(name, num_classes=4, drop_path_rate=0.2, **size), mode)
        assert torch.equal(step(plain, images), step(other, images))
        assert_same(plain, other)


@pytest.mark.gpu("triton")
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(mode: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward adds up in any order
    try:
        for make, draw in CASES.values():
            plain, other = pair(lambda make=make: make().cuda(), mode)
            inputs = draw().cuda()
            with torch.autocast("cuda", torch.bfloat16):
                assert torch.equal(step(plain, inputs), step(other, inputs))
            assert_same(plain, other)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.use_deterministic_algorithms(False)
