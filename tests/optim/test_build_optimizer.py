"""Optimizers built from targets: fused where that runs, refused where it does not, set at each step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ptfast.core.errors import ConfigError, MachineError
from ptfast.core.sections.targets import Target
from ptfast.optim.build_optimizer import (
    apply_lr,
    build_optimizer,
    build_step,
    has_momentum,
    load_optimizer,
    start_momentum,
)

CPU = torch.device("cpu")


class Plain(torch.optim.SGD):
    """An optimizer as users write them: without a fused step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)


class Stubborn(torch.optim.SGD):
    """Takes the keyword, and fails only when it steps."""

    refusal: type[Exception] = RuntimeError

    def step(self, closure=None):
        if self.defaults["fused"]:
            raise self.refusal("no fused kernel here")
        return super().step(closure)


class Asserting(Stubborn):
    """As torch 2.9 of weights that are shared out, where newer ones raise a RuntimeError."""

    refusal = AssertionError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> torch.Tensor:
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
        ("torch.optim.Adam", {"lr": 0.01}),
        ("torch.optim.AdamW", {"lr": 0.01, "weight_decay": 0.1}),
        ("torch.optim.Adagrad", {"lr": 0.01}),
    ],
)
def test_fused_takes_the_same_steps(path, kwargs):
    ours, theirs = net(), net()
    optimizer, note = build_optimizer(Target(path, {**kwargs, "fused": "auto"}), ours, CPU)
    assert note == "fused"
    reference = Target(path, kwargs).build(theirs.parameters())
    torch.testing.assert_close(trained(ours, optimizer), trained(theirs, reference))


@pytest.mark.parametrize(
    "target",
    [
        Target("torch.optim.SGD", {"lr": 0.1, "fused": False}),
        Target("torch.optim.SGD", {"lr": 0.1}),
        Target("torch.optim.RMSprop", {"fused": "auto"}),
        Target(f"{__name__}.Plain", {"fused": "auto"}),
        Target(f"{__name__}.Stubborn", {"fused": "auto"}),
    ],
    ids=lambda target: target.path.rpartition(".")[2],
)
def test_not_fused(target):
    model = net()
    optimizer, note = build_optimizer(target, model, CPU)
    assert note == "for-loop"
    before = trained(model, optimizer, steps=0)
    assert not torch.equal(before, trained(model, optimizer))


def test_foreach_is_respected():
    target = Target("torch.optim.AdamW", {"fused": "auto", "foreach": True})
    assert build_optimizer(target, net(), CPU)[1] == "foreach"


@pytest.mark.parametrize(
    "path", ["torch.optim.RMSprop", *(f"{__name__}.{name}" for name in ("Plain", "Stubborn", "Asserting"))]
)
def test_fused_that_was_asked_for_and_does_not_run(path):
    with pytest.raises(MachineError, match=r"no fused step.* on cpu") as caught:
        build_optimizer(Target(path, {"fused": True}), net(), CPU)
    assert (caught.value.code, caught.value.key) == ("E005", "optimizer.fused")


def test_values_that_the_optimizer_refuses():
    for kwargs in ({"lr": -1.0}, {"lr": 0.1, "nesterov": True, "fused": "auto"}):
        with pytest.raises(ConfigError) as caught:
            build_optimizer(Target("torch.optim.SGD", kwargs), net(), CPU)
        assert caught.value.code == "C005"


def test_frozen_parameters_are_left_out_and_tied_ones_taken_once():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    optimizer, _ = build_optimizer(Target("torch.optim.SGD", {"lr": 0.1}), model, CPU)
    held = optimizer.param_groups[0]["params"]
    assert [id(p) for p in held] == [id(model[0].weight), id(model[1].weight)]


def test_nothing_to_train():
    with pytest.raises(ConfigError, match="no parameter to train"):
        build_optimizer(Target("torch.optim.SGD", {}), net().requires_grad_(False), CPU)


def test_building_leaves_the_model_as_it_was():
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    build_optimizer(Target("torch.optim.AdamW", {"fused": "auto"}), model, CPU)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_rate_and_momentum_are_set_on_every_group():
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.4)]
    sgd = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    apply_lr(sgd, [0.1, 0.4], 0.5)
    assert [(g["lr"], g["momentum"]) for g in sgd.param_groups] == [(0.05, 0.9), (0.2, 0.9)]
    apply_lr(sgd, [0.1, 0.4], 1.0, 0.85)
    assert [(g["lr"], g["momentum"]) for g in sgd.param_groups] == [(0.1, 0.85), (0.4, 0.85)]
    adam = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], betas=(0.9, 0.98))
    apply_lr(adam, [1.0], 0.5, 0.8)
    assert adam.param_groups[0]["betas"] == (0.8, 0.98)


@pytest.mark.parametrize(
    ("optimizer_class", "keywords", "expected"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.SGD, {}, False),
        (torch.optim.AdamW, {}, True),
        (torch.optim.Adam, {"betas": (0.0, 0.99)}, False),
        (torch.optim.Adagrad, {}, False),
    ],
)
def test_which_optimizers_have_a_momentum_to_cycle(optimizer_class, keywords, expected):
    optimizer = optimizer_class([torch.zeros(1, requires_grad=True)], lr=0.1, **keywords)
    assert has_momentum(optimizer) is expected


def test_groups_keep_their_base_rate():
    optimizer, _ = build_optimizer(Target("torch.optim.SGD", {"lr": 0.3}), net(), CPU)
    apply_lr(optimizer, [0.3], 0.1)
    assert optimizer.param_groups[0]["initial_lr"] == 0.3


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9, "fused": "auto"}),
        ("torch.optim.AdamW", {"lr": 0.01, "fused": "auto"}),
        ("torch.optim.Adam", {"lr": 0.01, "amsgrad": True}),
        ("torch.optim.RMSprop", {"lr": 0.01}),
        ("torch.optim.NAdam", {"lr": 0.01, "foreach": True}),
        (f"{__name__}.Plain", {"lr": 0.1}),
    ],
)
def test_lean_steps_are_the_public_ones(path, kwargs):
    weights, states = [], []
    for lean in (True, False):
        model = net()
        optimizer, _ = build_optimizer(Target(path, kwargs), model, CPU)
        step = build_step(optimizer) if lean else optimizer.step
        torch.manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,))).backward()
            step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        states.append(optimizer.state_dict())
        assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(*weights)
    assert str(states[0]) == str(states[1])


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {}),
        ("Adam", {"weight_decay": 0.1}),
        ("AdamW", {}),
    ],
)
def test_lists_of_fused_steps_are_made_anew_when_stale(path, kwargs):
    """As parameters freeze and thaw, and as a state is loaded in between."""
    found = []
    for lean in (True, False):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(5)) for _ in range(3)]
        groups = [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.2}]
        optimizer = getattr(torch.optim, path)(groups, lr=0.1, fused=True, **kwargs)
        step = build_step(optimizer) if lean else optimizer.step
        for number in range(8):
            for weight in weights:
                weight.grad = weight.detach() * number + 1
            if number in (3, 4):
                weights[1].grad = None
            if number == 6:
                load_optimizer(optimizer, optimizer.state_dict())
            step()
        found.append([*weights, *(value for kept in optimizer.state.values() for value in kept.values())])
    assert all(map(torch.equal, *([v for v in values if v is not None] for values in found)))


def test_lean_steps_heed_hooks_added_later():
    model, calls = net(), []
    optimizer, _ = build_optimizer(Target("torch.optim.SGD", {"lr": 0.1}), model, CPU)
    step = build_step(optimizer)
    step()
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    step()
    assert calls == ["post"]


def test_an_optimizer_that_runs_the_model_itself_is_refused():
    with pytest.raises(ConfigError, match="forward and backward itself") as caught:
        build_optimizer(Target("torch.optim.LBFGS", {"lr": 0.1}), net(), torch.device("cpu"))
    assert (caught.value.code, caught.value.key) == ("C009", "optimizer._target_")


def test_a_first_step_that_is_left_out_leaves_no_momentum():
    model = net()
    optimizer, _ = build_optimizer(
        Target("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}), model, torch.device("cpu")
    )
    start_momentum(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert all(not optimizer.state[parameter]["momentum_buffer"].any() for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize(("fused", "note"), [("auto", "fused"), (True, "fused"), (False, "foreach")])
def test_notes_on_cuda(fused, note):
    target = Target("torch.optim.AdamW", {"fused": fused})
    assert build_optimizer(target, net().cuda(), torch.device("cuda"))[1] == note


def test_a_state_saved_in_another_memory_layout_steps_the_same_weights():
    def steps(layouts):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        optimizer, _ = build_optimizer(Target("torch.optim.AdamW", {"lr": 0.1, "fused": True}), model, CPU)
        for layout in layouts:
            state = optimizer.state_dict()
            model.to(memory_format=layout)
            optimizer, _ = build_optimizer(
                Target("torch.optim.AdamW", {"lr": 0.1, "fused": True}), model, CPU
            )
            load_optimizer(optimizer, state)
            for parameter in model.parameters():
                parameter.grad = torch.arange(parameter.numel()).reshape(parameter.shape) / parameter.numel()
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
            optimizer.step()
        return model.weight.detach().contiguous()

    plain, last = torch.contiguous_format, torch.channels_last
    torch.testing.assert_close(steps([plain, last, plain]), steps([plain, plain, plain]))


def test_a_resumed_run_steps_by_the_kernels_it_asks_for():
    def build(fused):
        target = Target("torch.optim.AdamW", {"lr": 0.1, "fused": fused})
        return build_optimizer(target, nn.Linear(2, 2), CPU)[0]

    optimizer = build(True)
    load_optimizer(optimizer, build(False).state_dict())
    assert optimizer.param_groups[0]["fused"]
    optimizer = build(False)
    load_optimizer(optimizer, build(True).state_dict())
    assert not optimizer.param_groups[0]["fused"]
