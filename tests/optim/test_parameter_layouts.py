"""Optimizers over parameters of every memory layout and type, against torch's unfused steps and our own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import LAYERWISE, OURS, wave
from torch import Tensor, nn

from ptfast.core.errors import ConfigError, MachineError
from ptfast.core.sections.targets import Target
from ptfast.optim.build_optimizer import build_optimizer, build_step, load_optimizer

CPU = torch.device("cpu")
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows with gaps": lambda: wave((6, 16), 1)[:, :5],
    "columns with gaps": lambda: wave((4, 3, 8), 1)[:, :, ::2],
    "a filter with gaps": lambda: wave((4, 3, 5, 5), 1)[:, :, 1:4, 1:4],
    "a vector with gaps": lambda: wave((12,), 1)[::3],
    "one column": lambda: wave((6, 16), 1)[:, :1],
    "transposed": lambda: wave((6, 5), 1).t(),
    "permuted": lambda: wave((3, 4, 5), 1).permute(2, 0, 1),
    "channels last": lambda: wave((4, 3, 2, 2), 1).to(memory_format=torch.channels_last),
    "part of a storage": lambda: wave((8, 5), 1)[2:6],
    "0-d": lambda: wave((1,), 1)[0],
    "empty": lambda: wave((0,), 1),
    "no rows": lambda: wave((0, 4), 1),
    "no columns": lambda: wave((4, 0), 1),
}
TORCHS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "adam": ("Adam", {"lr": 0.1, "weight_decay": 0.1}),
    "adamw": ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    "amsgrad": ("AdamW", {"lr": 0.1, "amsgrad": True}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "nadam": ("NAdam", {"lr": 0.1}),
    "radam": ("RAdam", {"lr": 0.1}),
    "rmsprop": ("RMSprop", {"lr": 0.1}),
    "adafactor": ("Adafactor", {"lr": 0.1}),
}


MUON = "ptfast.optim.muon.Muon"
REST: dict[str, tuple[str, dict[str, Any]]] = {
    "muon, the rest fused": (MUON, {"lr": 0.02, "rest_names": ["weight_*"], "fused": "auto"}),
    "muon, the rest by fused sgd": (
        MUON,
        {"lr": 0.02, "rest": "sgd", "rest_names": ["weight_*"], "fused": "auto"},
    ),
}
TARGETS = {
    **{
        name: (f"torch.optim.{path}", {**keywords, "fused": "auto"})
        for name, (path, keywords) in TORCHS.items()
    },
    **{name: (f"{made.func.__module__}.{made.func.__name__}", made.keywords) for name, made in OURS.items()},
    **REST,
}


class Holding(nn.Module):
    """A parameter of some layout before and behind plain ones."""

    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.weight_a, self.weight_b = (nn.Parameter(wave((5, 6), phase).to(odd)) for phase in (2, 3))
        self.weight_odd = nn.Parameter(odd)
        self.weight_c = nn.Parameter(wave((5,), 4).to(odd))


def take_steps(model: nn.Module, step: Callable[[], Any], numbers: range) -> None:
    for number in numbers:
        for index, parameter in enumerate(model.parameters()):
            # In the layout that autograd gives gradients.
            parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(wave(tuple(parameter.shape), number + index))
        step()


def whole_storage(tensor: Tensor) -> Tensor:
    """All that its memory holds."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).detach().clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_layout_changes_no_step(name: str, layout: str) -> None:
    """In float64; a state is saved and loaded half-way, and nothing beside the parameter moves."""
    odd = LAYOUTS[layout]()
    if name == "adafactor" and not odd.numel():
        pytest.skip("torch's Adafactor divides by the number of entries")
    before = whole_storage(odd)
    model, twin = Holding(odd), Holding(odd.clone(memory_format=torch.contiguous_format))
    path, keywords = TARGETS[name]
    plain = {key: value for key, value in keywords.items() if key != "fused"}
    if path == MUON:
        plain["model"] = twin
    take_steps(twin, Target(path).resolve()(twin.parameters(), **plain).step, range(4))
    optimizer, _ = build_optimizer(Target(path, keywords), model, CPU)
    take_steps(model, build_step(optimizer), range(2))
    again, _ = build_optimizer(Target(path, keywords), model, CPU)
    load_optimizer(again, copy.deepcopy(optimizer.state_dict()))
    take_steps(model, build_step(again), range(2, 4))
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
    beside = torch.ones(len(before), dtype=torch.bool)
    beside.as_strided(odd.shape, odd.stride(), odd.storage_offset()).fill_(False)
    assert torch.equal(whole_storage(odd)[beside], before[beside])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_a_type_is_stepped_as_without_fused_kernels_or_rejected(name: str, dtype: torch.dtype) -> None:
    """Parameters with gaps and of other layouts together, beside ones of float64."""
    model, twin = (nn.ParameterDict(_of_type(dtype)) for _ in range(2))
    path, keywords = TARGETS[name]
    plain = {key: value for key, value in keywords.items() if key != "fused"}
    if name in LAYERWISE and dtype.is_complex:
        with pytest.raises(ConfigError, match=r"floating-point parameters, not torch\.complex64"):
            build_optimizer(Target(path, keywords), model, CPU)
        return
    optimizer, _ = build_optimizer(Target(path, keywords), model, CPU)
    if name == "adafactor" and dtype.is_complex:
        with pytest.raises(RuntimeError, match="complex"):
            take_steps(model, build_step(optimizer), range(1))
        return
    if path == MUON:
        plain["model"] = twin
    take_steps(model, build_step(optimizer), range(3))
    take_steps(twin, Target(path).resolve()(twin.parameters(), **plain).step, range(3))
    # Fused kernels compute in float32.
    rounding = {"rtol": 2e-2, "atol": 5e-3} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, **rounding)


def _of_type(dtype: torch.dtype) -> dict[str, Tensor]:
    made = {f"weight_{layout}": make() for layout, make in LAYOUTS.items() if make().numel()}
    return {name: nn.Parameter(odd.to(dtype)) for name, odd in made.items()} | {
        "weight_of_float64": nn.Parameter(wave((3, 4), 5))
    }


def test_the_parameter_that_rules_fused_steps_out_is_named() -> None:
    model = Holding(LAYOUTS["rows with gaps"]())
    target = Target("torch.optim.AdamW", {"fused": "auto"})
    assert build_optimizer(target, model, CPU)[1] == "for-loop: weight_odd has gaps in memory"
    with pytest.raises(MachineError, match="on cpu: weight_odd has gaps in memory") as caught:
        build_optimizer(Target("torch.optim.AdamW", {"fused": True}), model, CPU)
    assert (caught.value.code, caught.value.key) == ("E005", "optimizer.fused")
    model.weight_odd.requires_grad_(False)
    assert build_optimizer(target, model, CPU)[1] == "fused"


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_an_expanded_parameter_is_rejected(name: str) -> None:
    model = Holding(wave((1, 4), 1).expand(3, 4))
    with pytest.raises(ConfigError, match="the parameter weight_odd is expanded") as caught:
        build_optimizer(Target(*TARGETS[name]), model, CPU)
    assert (caught.value.code, caught.value.key) == ("C017", "model")
    model.weight_odd.requires_grad_(False)
    build_optimizer(Target(*TARGETS[name]), model, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in TARGETS if "muon" not in name])
def test_parameters_of_one_memory_take_both_steps(name: str, dtype: torch.dtype) -> None:
    """As one optimizer for each takes them in turn."""
    ends = []
    for together in (True, False):
        memory = wave((4, 8), 1).to(dtype)
        model = nn.ParameterDict({"a": nn.Parameter(memory[:, :5]), "b": nn.Parameter(memory[:, 3:])})
        path, keywords = TARGETS[name]
        # A norm of all gradients is no step of one.
        target = Target(path, {**keywords, **({"max_grad_norm": 1e9} if name == "nvlamb" else {})})
        if together:
            built = [build_optimizer(target, model, CPU)[0]]
        else:
            built = [build_optimizer(target, nn.ParameterList([p]), CPU)[0] for p in model.values()]
        take_steps(model, lambda built=built: [build_step(each)() for each in built], range(3))
        ends.append(memory)
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad"])
def test_gradients_of_a_tasks_own_step_may_lie_anyhow(name: str) -> None:
    path, keywords = TARGETS[name]
    layers = [nn.Parameter(wave((6, 4), 1)) for _ in range(2)]
    optimizers = [
        build_optimizer(Target(path, keywords), nn.ParameterList([each]), CPU)[0] for each in layers
    ]
    steps = [build_step(optimizers[0], own_grads=True), build_step(optimizers[1])]
    for number in range(3):
        layers[0].grad, layers[1].grad = wave((4, 6), number).t(), wave((4, 6), number).t().contiguous()
        for step in steps:
            step()
    torch.testing.assert_close(*layers)


class Words(nn.Module):
    """An embedding whose gradient is sparse, with a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.layer(self.embedding(words))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("path", "keywords"),
    [
        ("torch.optim.SGD", {"lr": 0.1}),
        ("torch.optim.Adagrad", {"lr": 0.1}),
        (MUON, {"lr": 0.1, "rest": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}),
    ],
)
def test_sparse_gradients_take_the_steps_of_dense_ones(path: str, keywords: dict[str, Any]) -> None:
    weights = []
    for sparse in (True, False):
        model = Words()
        model.embedding.sparse = sparse
        optimizer, note = build_optimizer(Target(path, {**keywords, "fused": "auto"}), model, CPU)
        assert (note == "for-loop: embedding.weight has sparse gradients") is sparse
        step = build_step(optimizer)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.tensor([number, 3])).square().sum().backward()
            step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights)
