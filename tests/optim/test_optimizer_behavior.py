"""Our own optimizers as torch expects optimizers to be: saved, scaled, given groups, or nothing to do."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import LAYERWISE, OURS, net, take_steps, wave, weights_of
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.core.sections.targets import Target
from ptfast.optim import Optimizer, layerwise
from ptfast.optim.build_optimizer import apply_lr, build_optimizer, load_optimizer
from ptfast.optim.lamb import Lamb
from ptfast.optim.lars import Lars
from ptfast.optim.muon import Muon
from ptfast.optim.novograd import Novograd


@pytest.fixture(params=[layerwise.CPU_CHUNK_SIZE, 7], ids=["whole", "cut"])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whole and together, and every layer in pieces."""
    monkeypatch.setattr(layerwise, "CPU_CHUNK_SIZE", request.param)


@pytest.mark.parametrize("name", OURS)
def test_reduces_the_loss(name: str) -> None:
    model = net()
    optimizer = OURS[name](model.parameters())
    first = take_steps(model, optimizer, 1)
    assert take_steps(model, optimizer, 60) < 0.8 * first


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", OURS)
def test_saved_and_loaded_it_goes_on_alike(name: str, layout: torch.memory_format, tmp_path: Path) -> None:
    model = net().to(memory_format=layout)
    optimizer = OURS[name](model.parameters())
    take_steps(model, optimizer, 4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    take_steps(model, optimizer, 4)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other = net().to(memory_format=layout)
    other.load_state_dict(saved["model"])
    resumed = OURS[name](other.parameters())
    resumed.load_state_dict(saved["optimizer"])
    take_steps(other, resumed, 4)
    assert torch.equal(weights_of(model), weights_of(other))
    assert str(optimizer.state_dict()) == str(resumed.state_dict())


@pytest.mark.parametrize("name", OURS)
def test_copied_it_goes_on_alike(name: str) -> None:
    model = net()
    optimizer = OURS[name](model.parameters())
    take_steps(model, optimizer, 2)
    other, twin = copy.deepcopy((model, optimizer))
    take_steps(model, optimizer, 2)
    take_steps(other, twin, 2)
    assert torch.equal(weights_of(model), weights_of(other))


@pytest.mark.parametrize("name", OURS)
def test_another_memory_layout_changes_nothing(name: str) -> None:
    """State saved under one layout, weights in another, gradients in a third."""
    model = net().double()
    optimizer = OURS[name](model.parameters())
    take_steps(model, optimizer, 2)
    other = net().double().to(memory_format=torch.channels_last)
    other.load_state_dict(model.state_dict())
    loaded = OURS[name](other.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        a.grad = torch.randn(a.shape, dtype=a.dtype)
        b.grad = a.grad.clone()
    before = weights_of(model)
    optimizer.step()
    loaded.step()
    moved, moved_too = weights_of(model) - before, weights_of(other) - before
    # Muon multiplies in bf16, and here in another order of columns.
    assert (moved_too - moved).norm() < (1e-9 if name in LAYERWISE else 0.3) * moved.norm()


@pytest.mark.parametrize("name", OURS)
def test_parameters_without_a_gradient_stay_as_they_are(name: str) -> None:
    layers = [nn.Parameter(wave((3, 4), phase)) for phase in range(4)]
    alone = [nn.Parameter(layer.detach().clone()) for layer in layers[:2]]
    optimizer, reference = OURS[name](layers), OURS[name](alone)
    for step in range(3):
        for some in (layers, alone):
            for index in range(2):
                some[index].grad = wave((3, 4), step + index)
        optimizer.step()
        reference.step()
    for layer, other in zip(layers, alone, strict=False):
        torch.testing.assert_close(layer, other)
    assert torch.equal(layers[3], wave((3, 4), 3))
    assert layers[3] not in optimizer.state
    layers[3].grad = wave((3, 4), 9)
    optimizer.step()
    assert not torch.equal(layers[3], wave((3, 4), 3))


@pytest.mark.parametrize("name", LAYERWISE)
def test_groups_have_rates_of_their_own(name: str) -> None:
    build = functools.partial(OURS[name], **({"max_grad_norm": None} if name == "nvlamb" else {}))
    one, two, alone = (nn.Parameter(wave((3, 4), 1)) for _ in range(3))
    optimizer, reference = build([{"params": [one]}, {"params": [two], "lr": 0.0}]), build([alone])
    for parameter in (one, two, alone):
        parameter.grad = wave((3, 4), 2)
    optimizer.step()
    reference.step()
    torch.testing.assert_close(one, alone)
    assert torch.equal(two, wave((3, 4), 1))


def test_nvlamb_clips_over_all_groups() -> None:
    layers, twins = ([nn.Parameter(wave((3, 4), phase)) for phase in (1, 2)] for _ in range(2))
    clipped = Lamb([{"params": [layer]} for layer in layers], max_grad_norm=0.5)
    reference = Lamb(twins)
    for step in range(3):
        for index in range(2):
            layers[index].grad = twins[index].grad = wave((3, 4), step + index)
        clipped.step()
        nn.utils.clip_grad_norm_(twins, 0.5)
        reference.step()
    torch.testing.assert_close(layers, twins, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cls", [Lars, Lamb])
def test_1d_parameters_are_neither_scaled_nor_decayed(cls: type[torch.optim.Optimizer]) -> None:
    bias, twin = (nn.Parameter(wave((5,), 1)) for _ in range(2))
    plain = torch.optim.SGD([twin], 0.1, 0.9) if cls is Lars else torch.optim.Adam([twin], 0.1, eps=1e-6)
    optimizer = cls([bias], lr=0.1, weight_decay=0.5)
    for step in range(3):
        bias.grad, twin.grad = wave((5,), step, 0.1), wave((5,), step, 0.1)
        optimizer.step()
        plain.step()
    torch.testing.assert_close(bias, twin)
    kept = nn.Parameter(wave((5,), 1))
    scaled = cls([kept], lr=0.1, weight_decay=0.5, exclude_1d=False)
    kept.grad = wave((5,), 0, 0.1)
    scaled.step()
    assert not torch.allclose(kept, bias)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("name", LAYERWISE)
def test_a_found_infinity_makes_the_step_do_nothing(name: str) -> None:
    model = net()
    optimizer = OURS[name](model.parameters())
    for trained in (False, True):
        if trained:
            take_steps(model, optimizer, 2)
        weights, state = weights_of(model), copy.deepcopy(optimizer.state_dict()["state"])
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.inf)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(1.0)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        assert torch.equal(weights_of(model), weights)
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(value, state[index][key] if trained else torch.zeros_like(value)), key


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("name", LAYERWISE)
def test_unscales_gradients_on_the_device(name: str) -> None:
    results = []
    for scale in (None, 1024.0):
        model = net()
        optimizer = OURS[name](model.parameters())
        for step in range(3):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = wave(tuple(parameter.shape), step + index, scale or 1.0).float()
            if scale:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
            optimizer.step()
        results.append(weights_of(model))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", LAYERWISE)
def test_grad_scaler_hands_over_scale_and_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = net(), net()
    optimizer, reference = OURS[name](model.parameters()), OURS[name](plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    # What the scaler calls for optimizers that need the host to look first.
    monkeypatch.setattr(scaler, "_maybe_opt_step", lambda *_: pytest.fail("the host waited"))
    for step in range(4):
        torch.manual_seed(step)
        inputs, targets = torch.randn(8, 2, 6, 6), torch.randint(3, (8,))
        overflows = step == 2
        for a_model, an_optimizer in ((model, optimizer), (plain, reference)):
            an_optimizer.zero_grad()
            loss = nn.functional.cross_entropy(a_model(inputs), targets)
            if a_model is model:
                (scaler.scale(loss) * (torch.inf if overflows else 1.0)).backward()
                scaler.step(an_optimizer)
                scaler.update()
            else:
                loss.backward()
                if not overflows:
                    an_optimizer.step()
    assert scaler.get_scale() == 128.0
    torch.testing.assert_close(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("name", OURS)
def test_a_closure_gives_the_loss(name: str) -> None:
    model, plain = net(), net()
    optimizer, reference = OURS[name](model.parameters()), OURS[name](plain.parameters())
    inputs = torch.randn(4, 2, 6, 6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    expected = plain(inputs).square().mean()
    expected.backward()
    reference.step()
    assert torch.equal(optimizer.step(closure), expected)
    assert torch.equal(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("name", OURS)
def test_sparse_gradients_are_refused(name: str) -> None:
    embedding = nn.Embedding(7, 4, sparse=True)
    optimizer = OURS[name](embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="support sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERWISE)
def test_half_precision_weights_have_float32_state(name: str, dtype: torch.dtype) -> None:
    layers = [nn.Parameter(wave(shape, 1).to(dtype)) for shape in ((4, 4), (4,))]
    twins = [nn.Parameter(layer.detach().float()) for layer in layers]
    optimizer, reference = OURS[name](layers), OURS[name](twins)
    for layer, twin in zip(layers, twins, strict=True):
        layer.grad = wave(tuple(layer.shape), 2).to(dtype)
        twin.grad = layer.grad.float()
    optimizer.step()
    reference.step()
    for layer, twin in zip(layers, twins, strict=True):
        assert torch.equal(layer, twin.to(dtype))
    values = [value for state in optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in values} == {torch.float32}
    loaded = OURS[name](layers)
    loaded.load_state_dict(optimizer.state_dict())
    assert all(torch.equal(loaded.state[p][k], v) for p in layers for k, v in optimizer.state[p].items())
    assert {v.dtype for state in loaded.state.values() for v in state.values()} == {torch.float32}


@pytest.mark.parametrize("name", LAYERWISE)
def test_a_parameter_with_gaps_in_memory(name: str) -> None:
    storage = wave((4, 6), 1).float()
    gappy = nn.Parameter(storage[:, :3])
    whole = nn.Parameter(storage[:, :3].clone())
    beside = storage[:, 3:].clone()
    optimizer, reference = OURS[name]([gappy]), OURS[name]([whole])
    for step in range(3):
        gappy.grad, whole.grad = (wave((4, 3), step).float() for _ in range(2))
        optimizer.step()
        reference.step()
    torch.testing.assert_close(gappy, whole)
    assert torch.equal(storage[:, 3:], beside)


@pytest.mark.parametrize("name", LAYERWISE)
def test_a_layer_or_gradient_of_zeros_is_finite(name: str) -> None:
    layers = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.ones(3, 4))]
    optimizer = OURS[name](layers)
    layers[0].grad, layers[1].grad = torch.ones(3, 4), torch.zeros(3, 4)
    optimizer.step()
    assert all(layer.isfinite().all() for layer in layers)
    assert not torch.equal(layers[0], torch.zeros(3, 4))


@pytest.mark.parametrize("name", LAYERWISE)
def test_gradients_are_left_as_they_are(name: str) -> None:
    layer = nn.Parameter(wave((3, 4), 1))
    layer.grad = wave((3, 4), 2, 50.0)
    OURS[name]([layer]).step()
    assert torch.equal(layer.grad, wave((3, 4), 2, 50.0))


@pytest.mark.parametrize(
    ("cls", "keywords"),
    [
        (Lars, {"lr": -1.0}),
        (Lars, {"momentum": 1.0}),
        (Lars, {"trust": 0.0}),
        (Lamb, {"betas": (0.9, 1.0)}),
        (Lamb, {"weight_decay": -0.1}),
        (Lamb, {"max_grad_norm": 0.0}),
        (Novograd, {"eps": float("nan")}),
        (Muon, {"momentum": 1.0}),
        (Muon, {"ns_steps": 0}),
        (Muon, {"lr": -1.0}),
    ],
)
def test_values_out_of_range(cls: type[torch.optim.Optimizer], keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keywords)).replace("lr", "(?i)lr|learning rate")):
        cls([nn.Parameter(torch.zeros(2, 2))], **keywords)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="floating-point"):
        Lamb([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


OPTIONS = ("lars", "lamb", "nvlamb", "novograd", "muon", "nadam", "radam", "adafactor")


@pytest.mark.parametrize("option", OPTIONS)
def test_option_file(option: str) -> None:
    """It sets what the class takes, and trains through the interface that the runner uses."""
    from ptfast.config.compose import compose

    tree = compose([f"optimizer={option}"]).tree["optimizer"]
    own = {"_target_", *Optimizer.model_fields}
    target = Target(tree["_target_"], {key: value for key, value in tree.items() if key not in own})
    names = inspect.signature(target.resolve()).parameters
    assert set(target.kwargs) - {"fused"} <= set(names)
    model = net()
    optimizer, _ = build_optimizer(target, model, torch.device("cpu"))
    first = take_steps(model, optimizer, 1)
    base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    apply_lr(optimizer, base_lrs, 0.0)
    weights = weights_of(model)
    take_steps(model, optimizer, 1)
    assert torch.equal(weights, weights_of(model))
    apply_lr(optimizer, base_lrs, 1.0)
    assert take_steps(model, optimizer, 100) < 0.8 * first


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERWISE)
def test_steps_on_a_gpu_without_a_wait(name: str, no_waits: Any) -> None:
    models = [net(), net().cuda()]
    optimizers = [OURS[name](model.parameters()) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = wave(tuple(parameter.shape), step + index).to(parameter)
            optimizer.grad_scale = torch.ones((), device=parameter.device)
            optimizer.found_inf = torch.zeros((), device=parameter.device)
        optimizers[0].step()
        torch.cuda.synchronize()
        with no_waits():
            optimizers[1].step()
    torch.testing.assert_close(weights_of(models[1]).cpu(), weights_of(models[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["NAdam", "RAdam", "ASGD", "Rprop", "Adafactor", "Adamax", "AdamW"])
def test_numbers_in_the_state_keep_their_digits(name: str, dtype: torch.dtype) -> None:
    ends = []
    for loads in (False, True):
        layer = nn.Parameter(wave((3, 4), 1).to(dtype))
        model = nn.ParameterList([layer])
        target = Target(f"torch.optim.{name}", {"lr": 0.05})
        optimizer, _ = build_optimizer(target, model, torch.device("cpu"))
        for step in range(6):
            if loads and step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer, _ = build_optimizer(target, model, torch.device("cpu"))
                load_optimizer(optimizer, state)
            layer.grad = wave((3, 4), step).to(dtype)
            optimizer.step()
        ends.append(layer.detach())
    assert torch.equal(*ends)


def test_nvlamb_clips_gradients_of_several_types() -> None:
    layers = [nn.Parameter(wave((3, 4), 1).to(dtype)) for dtype in (torch.float64, torch.bfloat16)]
    twins = [nn.Parameter(layer.detach().double()) for layer in layers]
    for some in (layers, twins):
        for layer in some:
            layer.grad = wave((3, 4), 2).bfloat16().to(layer.dtype)
    Lamb(layers, max_grad_norm=0.1).step()
    Lamb(twins, max_grad_norm=0.1).step()
    torch.testing.assert_close(layers[0], twins[0])
