"""Stochastic depth: what is dropped, how often, and that nothing changes where it is off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import build_run, train
from torch import nn
from torch.nn import functional as F

from ptfast.models.gpt import Gpt
from ptfast.models.layers import drop_path, rate_of_block
from ptfast.models.resnet_cifar import ResNetCifar


def test_samples_are_dropped_whole_and_the_mean_stays() -> None:
    torch.manual_seed(0)
    x = torch.rand(4000, 3, 2) + 0.5
    out = drop_path(x, 0.2)
    kept = out.flatten(1).any(1)
    assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))
    torch.testing.assert_close(out[kept], x[kept] / 0.8)
    assert float(kept.float().mean()) == pytest.approx(0.8, abs=0.03)


def test_rates_rise_in_equal_parts_to_the_last_block() -> None:
    assert [rate_of_block(index, 4, 0.2) for index in range(4)] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    rates = [block.drop_path for block in ResNetCifar(3, depth=20, drop_path=0.9).blocks]
    assert rates == pytest.approx([0.1 * n for n in range(1, 10)])


def test_it_agrees_with_torchvision() -> None:
    from torchvision.ops import stochastic_depth

    x = torch.randn(64, 5, 3, 3)
    torch.manual_seed(3)
    expected = stochastic_depth(x, 0.3, "row")
    torch.manual_seed(3)
    torch.testing.assert_close(drop_path(x, 0.3), expected)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_the_models_skip_branches_in_training_only(drop: float) -> None:
    torch.manual_seed(0)
    models: list[tuple[nn.Module, torch.Tensor]] = [
        (ResNetCifar(3, in_channels=1, depth=14, drop_path=drop), torch.rand(16, 1, 8, 8)),
        (Gpt(20, 8, width=16, depth=3, heads=2, drop_path=drop), torch.randint(20, (16, 8))),
    ]
    for model, inputs in models:
        before = torch.get_rng_state()
        first, second = model(inputs), model(inputs)
        assert torch.equal(first, second) is (drop == 0)
        # Where it is off, not even a draw is made.
        assert torch.equal(torch.get_rng_state(), before) is (drop == 0)
        model.eval()
        assert torch.equal(model(inputs), model(inputs))


def test_a_dropped_block_is_its_shortcut() -> None:
    torch.manual_seed(0)
    block = ResNetCifar(3, in_channels=1, depth=8, drop_path=0.999999).blocks[2].train()
    x = torch.rand(8, 32, 4, 4)
    shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 16, 16))
    assert torch.equal(block(x), shortcut)


@pytest.mark.parametrize(
    ("words", "attribute"),
    [
        (("model=torchvision", "model.name=efficientnet_b0", "model.stochastic_depth_prob=0.3"), "p"),
        (("model=timm", "model.name=resnet10t", "model.drop_path_rate=0.3"), "drop_prob"),
    ],
)
def test_other_models_take_it_by_their_own_name(
    words: tuple[str, ...], attribute: str, tmp_path: Path
) -> None:
    if "model=timm" in words:
        pytest.importorskip("timm")
    run = build_run(tmp_path, *words)
    layers = [m for m in run.model.modules() if type(m).__name__ in ("StochasticDepth", "DropPath")]
    assert max(float(getattr(layer, attribute)) for layer in layers) > 0.2


@pytest.mark.parametrize("value", ["1", "-0.1", "true"])
def test_a_rate_that_is_none_is_refused(value: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("model=resnet_digits", f"model.drop_path={value}") == 2
    assert "model.drop_path" in capsys.readouterr().err
