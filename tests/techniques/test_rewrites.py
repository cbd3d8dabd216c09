"""Biases that a BatchNorm subtracts again, and RMS norms by hand: found by what the model does, rewritten."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted import RmsNorm
from running import build_run, same_bits, summary, train, training_state, weights
from torch import Tensor, nn

from ptfast.cli import command_line
from ptfast.techniques.rewrites.model_rewrites import (
    apply_fused_rms_norm,
    drop_biases,
    find_cancelled_biases,
    find_rms_norms,
)


class Residual(nn.Module):
    """A bottleneck of a ResNet whose convolutions have a bias, written with functions between its layers."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width, affine=False)
        self.shortcut = nn.Sequential(nn.Conv2d(width, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm3(self.conv3(F.relu(self.norm2(self.conv2(out)))))
        return F.relu(out + self.shortcut(x), inplace=True)


class ResNet(nn.Sequential):
    def __init__(self) -> None:
        stem = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 6)
        super().__init__(*stem, Residual(6, 1), Residual(6, 2), *head)


RESNET = {"0": "1"} | {
    f"{i}.{layer}": f"{i}.{norm}"
    for i in (3, 4)
    for layer, norm in (("conv1", "norm1"), ("conv3", "norm3"), ("shortcut.0", "shortcut.1"))
}


class Places(nn.Module):
    """One layer that qualifies, and many beside it that do not, each for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        names = ["plain", "relu", "inplace", "twice", "kept", "returned", "frozen", "detached", "shifted"]
        names += ["own", "sub", "shared", "hooked", "alone", "in_evaluation", "tied"]
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        self.norms = nn.ModuleDict({name: nn.BatchNorm1d(4) for name in names})
        self.layers["sub"] = Rectified(4, 4)
        self.layers["tied"].bias = self.layers["alone"].bias
        self.layers["hooked"].register_forward_hook(lambda module, inputs, output: output.relu())
        self.untracked, self.untracked_norm = nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)
        self.upsample, self.upsample_norm = nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4)
        self.history: list[Tensor] = []

    def train(self, mode: bool = True) -> Places:
        super().train(mode)
        self.norms["frozen"].eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layers, norms = self.layers, self.norms
        x = norms["plain"](layers["plain"](x))
        x = norms["relu"](F.relu(layers["relu"](x)))
        x = norms["inplace"](layers["inplace"](x).relu_())
        y = layers["twice"](x)
        x = norms["twice"](y) + y
        y = layers["kept"](x)
        self.history = [y]
        x = norms["kept"](y)
        returned = layers["returned"](x)
        x = norms["returned"](returned)
        x = norms["frozen"](layers["frozen"](x))
        y = layers["detached"](x)
        self.mean = y.detach().mean()
        x = norms["detached"](y)
        x = norms["shifted"](layers["shifted"](x)) + layers["shifted"].bias
        x = norms["own"](F.linear(x, layers["own"].weight, layers["own"].bias))
        x = norms["sub"](layers["sub"](x))
        x = norms["shared"](layers["shared"](norms["shared"](layers["shared"](x))))
        x = norms["hooked"](layers["hooked"](x))
        x = layers["alone"](x)
        y = layers["in_evaluation"](x)
        x = norms["in_evaluation"](y) if self.training else norms["in_evaluation"](y) + y
        x = norms["tied"](layers["tied"](x))
        x = self.untracked_norm(self.untracked(x))
        x = self.upsample_norm(self.upsample(x[:, :, None, None])).mean((2, 3))
        return x, returned


class Rectified(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def randomised(model: nn.Module) -> nn.Module:
    """With running statistics as after some training, in float64."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)  # type: ignore[arg-type]
    return model.double()


def both(images: Tensor) -> tuple[nn.Module, nn.Module]:
    """A ResNet, and its copy without the biases that BatchNorms cancel."""
    torch.manual_seed(0)
    plain = randomised(ResNet())
    rewritten = copy.deepcopy(plain)
    drop_biases(rewritten, find_cancelled_biases(rewritten, lambda: rewritten(images)))
    return plain, rewritten


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class TestFinding:
    def test_a_resnet(self, images: Tensor) -> None:
        model = ResNet().double()
        assert find_cancelled_biases(model, lambda: model(images)) == RESNET

    def test_some_places_only(self) -> None:
        model = Places()
        expected = {"layers.plain": "norms.plain"} | {
            name: f"{name}_norm" for name in ("untracked", "upsample")
        }
        x = torch.randn(4, 4)
        assert find_cancelled_biases(model, lambda: model(x)) == expected
        # What was kept while they were found must not keep them from being found again.
        assert find_cancelled_biases(model, lambda: model(x)) == expected

    def test_under_autocast(self, images: Tensor) -> None:
        model = ResNet()

        def forward() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                model(images.float())

        assert find_cancelled_biases(model, forward) == RESNET

    def test_it_leaves_the_model_and_the_generator_as_they_were(self, images: Tensor) -> None:
        model = nn.Sequential(ResNet(), nn.Dropout()).double()
        before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        assert find_cancelled_biases(model, lambda: model(images))
        assert same_bits(model.state_dict(), before)
        assert torch.equal(torch.get_rng_state(), generator)
        assert model.training
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_it_does_not_look_where_nothing_can_be(self) -> None:
        convolution = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 10)
        assert find_cancelled_biases(nn.Sequential(*convolution), lambda: pytest.fail("was run")) == {}


class TestDropping:
    def test_training_gives_the_same_outputs_and_gradients(self, images: Tensor) -> None:
        plain, rewritten = both(images)
        for model in (plain, rewritten):
            for _ in range(2):
                outputs = model(images)
            (outputs * images[:, 0, :6, 0]).sum().backward()
        torch.testing.assert_close(rewritten(images), plain(images), rtol=1e-6, atol=1e-6)
        expected = {name: p.grad for name, p in plain.named_parameters()}
        found = {name: p.grad for name, p in rewritten.named_parameters()}
        assert set(expected) - set(found) == {f"{name}.bias" for name in RESNET}
        for name, grad in found.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(rewritten.eval()(images), plain.eval()(images), rtol=1e-6, atol=1e-6)

    def test_a_relu_between_keeps_every_bit(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.BatchNorm2d(6))
        before = copy.deepcopy(model.state_dict())
        drop_biases(model, find_cancelled_biases(model, lambda: model(torch.randn(2, 3, 5, 5))))
        assert same_bits(model.state_dict(), before)
        assert isinstance(model[0].bias, nn.Parameter)

    def test_the_plain_model_loads_its_state(self, images: Tensor) -> None:
        plain, rewritten = both(images)
        rewritten(images)
        state = rewritten.state_dict()
        assert list(state) == list(plain.state_dict())
        plain.load_state_dict(state)
        torch.testing.assert_close(plain.eval()(images), rewritten.eval()(images), rtol=1e-12, atol=1e-12)

    def test_it_loads_the_plain_model_s_state(self, images: Tensor) -> None:
        plain, _ = both(images)
        rewritten = copy.deepcopy(both(images)[1])
        randomised(plain)
        before = copy.deepcopy(state := plain.state_dict())
        rewritten.load_state_dict(state)
        assert same_bits(state, before)
        torch.testing.assert_close(rewritten.eval()(images), plain.eval()(images), rtol=1e-12, atol=1e-12)

    def test_its_own_state_comes_back_to_the_bit(self, images: Tensor) -> None:
        _, rewritten = both(images)
        _, other = both(images + 1)
        other.load_state_dict(rewritten.state_dict())
        assert same_bits(other.state_dict(), rewritten.state_dict())

    def test_a_missing_bias_is_told(self, images: Tensor) -> None:
        _, rewritten = both(images)
        state = rewritten.state_dict()
        del state["0.bias"]
        with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
            rewritten.load_state_dict(state)


class TestRun:
    words = ("model=mlp", "model.batch_norm=true", "model.hidden=[12,8]", "steps=6", "optimizer=sgd")
    on = (*words, "rewrites.bias_before_norm=false", "ema=ema", "saving.every=3steps", "saving.keep=9")

    def test_a_run_resumes_evaluates_and_loads(
        self, in_tmp: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert train(*self.on, "run.dir=whole") == 0
        assert "dropped biases  2 before a BatchNorm" in capsys.readouterr().out
        assert train(*self.on, "run.dir=rest", "run.resume=whole/saved/step-3") == 0
        assert same_bits(weights(Path("whole")), weights(Path("rest")))
        assert same_bits(training_state(Path("whole")), training_state(Path("rest")))
        state = weights(Path("whole"))
        assert not state["layers.1.bias"].any()
        assert state["layers.2.running_mean"].any()
        capsys.readouterr()
        assert command_line.run(["eval", "whole"]) == 0
        figures: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert figures["loss"] == pytest.approx(summary(Path("whole"))["val"]["loss"], rel=1e-6)
        last = "model.weights=whole/saved/last/model.pt"
        kept = build_run(Path("kept"), *self.words, "rewrites=none", last)
        assert same_bits(dict(kept.model.state_dict()), state)
        dropped = build_run(Path("dropped"), *self.on, last)
        assert same_bits(dict(dropped.model.state_dict()), state)
        assert dict(dropped.model.named_parameters()).keys() < dict(kept.model.named_parameters()).keys()

    def test_iterable_data_is_not_looked_at(self, tmp_path: Path) -> None:
        data = "data=custom", "data._target_=test_iterable.Noise", "data.val=0"
        assert build_run(tmp_path, *self.on, *data).choices.get("dropped_biases") == {}


class CenteredNorm(RmsNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class NarrowNorm(RmsNorm):
    """Its results have the type of its inputs, whatever that of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class GatedNorm(RmsNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x * gate)


class TestRmsNorms:
    def test_only_what_computes_one_is_found(self) -> None:
        norms = [RmsNorm(4), RmsNorm(6, eps=1e-3), RmsNorm(4), CenteredNorm(4), GatedNorm(4), RmsNorm(4, 1.0)]
        norms.append(NarrowNorm(4))
        model = nn.Sequential(*norms, nn.RMSNorm(4), nn.LayerNorm(4))
        model[2].register_forward_hook(lambda *_: None)
        assert find_rms_norms(model) == {"0": 1e-5, "1": 1e-3}

    @pytest.mark.parametrize(
        "types", [(torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)]
    )
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu("fused RMS norm"))])
    def test_results_gradients_and_states_stay(
        self, types: tuple[torch.dtype, torch.dtype], device: str
    ) -> None:
        torch.manual_seed(0)
        by_hand = nn.Sequential(RmsNorm(64)).to(device, types[1])
        fused = copy.deepcopy(by_hand)
        assert apply_fused_rms_norm(fused) == ["0"]
        assert same_bits(fused.state_dict(), by_hand.state_dict())
        inputs = torch.randn(8, 5, 64, device=device, dtype=types[0])
        results = []
        for model in (by_hand, fused):
            leaf = inputs.clone().requires_grad_()
            outputs = model(leaf)
            outputs.backward(torch.linspace(-1, 1, 64, device=device, dtype=outputs.dtype).expand_as(outputs))
            results.append([outputs.detach(), leaf.grad, model[0].weight.grad])
        # By hand, a half type is rounded before it is multiplied by the weight, too.
        within = {"rtol": 2e-2, "atol": 2e-2} if torch.bfloat16 in types else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(results[1], results[0], **within)
