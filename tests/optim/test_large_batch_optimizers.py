"""LARS, LAMB, NVLAMB and NovoGrad against timm and against their papers.

Run as a script, it writes the vectors that stand in where timm is not installed.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizers import wave
from torch import Tensor, nn

from ptfast.optim import layerwise
from ptfast.optim.lamb import Lamb
from ptfast.optim.lars import Lars
from ptfast.optim.novograd import Novograd

VECTORS = Path(__file__).with_name("large_batch_vectors.json")
STEPS = 20
SHAPES = ((4, 3, 2, 2), (4,), (3, 5), (3,), ())

LARS = {"lr": 2.0, "momentum": 0.9}
TRAJECTORIES: dict[str, tuple[Callable[..., Any], dict[str, Any], str, dict[str, Any]]] = {
    # Ours, and timm's class with its names for the same.
    "lars": (Lars, LARS, "Lars", {"always_adapt": True}),
    "lars-decay": (Lars, {**LARS, "weight_decay": 0.05}, "Lars", {"always_adapt": True}),
    "lars-nesterov": (
        Lars,
        {**LARS, "weight_decay": 0.05, "nesterov": True},
        "Lars",
        {"always_adapt": True},
    ),
    "lars-plain": (Lars, {**LARS, "momentum": 0.0, "weight_decay": 0.05}, "Lars", {"always_adapt": True}),
    "lamb": (
        Lamb,
        {"lr": 0.01, "weight_decay": 0.0},
        "Lamb",
        {"always_adapt": True, "max_grad_norm": None},
    ),
    "lamb-decay": (Lamb, {"lr": 0.01, "weight_decay": 0.05}, "Lamb", {"max_grad_norm": None}),
    "nvlamb": (Lamb, {"lr": 0.01, "weight_decay": 0.05, "max_grad_norm": 1.0}, "Lamb", {}),
    "nvlamb-norm": (Lamb, {"lr": 0.01, "weight_decay": 0.05, "max_grad_norm": 7.0}, "Lamb", {}),
    "novograd": (Novograd, {"lr": 0.01}, "NvNovoGrad", {}),
    "novograd-decay": (Novograd, {"lr": 0.01, "weight_decay": 0.05}, "NvNovoGrad", {}),
    "novograd-averaging": (
        Novograd,
        {"lr": 0.01, "weight_decay": 0.05, "grad_averaging": True},
        "NvNovoGrad",
        {},
    ),
}


def _turned(shape: torch.Size) -> list[int]:
    """Strides of a tensor whose first dimension is the innermost one."""
    return [math.prod(shape[:index]) for index in range(len(shape))]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda values: values,
    "gaps": lambda values: torch.stack([values, values], -1)[..., 0],
    "turned": lambda values: torch.empty_strided(
        values.shape, _turned(values.shape), dtype=values.dtype
    ).copy_(values),
}
"""Of parameters in memory."""


def trajectory(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], layout: str = "plain") -> Tensor:
    """The weights after each of some steps along given gradients, large ones first."""
    lay = LAYOUTS[layout]
    layers = [nn.Parameter(lay(wave(shape, index, 0.3))) for index, shape in enumerate(SHAPES)]
    optimizer = build(layers)
    weights = []
    for step in range(STEPS):
        for index, layer in enumerate(layers):
            layer.grad = wave(tuple(layer.shape), 10 * step + index + 0.1 * step**2, 3.0 if step < 3 else 0.1)
        optimizer.step()
        weights.append(torch.cat([layer.detach().flatten() for layer in layers]))
    return torch.stack(weights)


def timm_trajectory(name: str) -> Tensor:
    _, shared, cls, theirs = TRAJECTORIES[name]
    optimizers = importlib.import_module("timm.optim")
    default = torch.get_default_dtype()
    # It keeps NovoGrad's second moment in the default type.
    torch.set_default_dtype(torch.float64)
    try:
        return trajectory(lambda layers: getattr(optimizers, cls)(layers, **shared, **theirs))
    finally:
        torch.set_default_dtype(default)


def reference(name: str, p: Tensor, g: Tensor, state: dict[str, Any], t: int, h: dict[str, Any]) -> Tensor:
    """One layer's step as the paper writes it; returns the new weights."""
    decay = h.get("weight_decay", 0.0)
    if name == "lars":
        ratio = 1e-3 * p.norm() / (g.norm() + decay * p.norm() + 1e-8)
        state["v"] = h["momentum"] * state.get("v", 0.0) + h["lr"] * ratio * (g + decay * p)
        return p - state["v"]
    if name == "novograd":
        v = g.norm() ** 2 if t == 1 else 0.98 * state["v"] + 0.02 * g.norm() ** 2
        state["v"] = v
        state["m"] = 0.95 * state.get("m", 0.0) + (g / (v.sqrt() + 1e-8) + decay * p)
        return p - h["lr"] * state["m"]
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g**2
    r = state["m"] / (1 - 0.9**t) / ((state["v"] / (1 - 0.999**t)).sqrt() + 1e-6)
    u = r + decay * p
    low, high = h.get("norm_range", (0.0, float("inf")))
    return p - h["lr"] * p.norm().clamp(low, high) / u.norm() * u


@pytest.fixture(params=[layerwise.CPU_CHUNK_SIZE, 7], ids=["whole", "cut"])
def chunk_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whole and together, and every layer in pieces."""
    monkeypatch.setattr(layerwise, "CPU_CHUNK_SIZE", request.param)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("name", TRAJECTORIES)
def test_agrees_with_timm(name: str) -> None:
    cls, shared, _, _ = TRAJECTORIES[name]
    ours = trajectory(lambda layers: cls(layers, **shared, exclude_1d=False))
    fixed = torch.tensor(json.loads(VECTORS.read_text())["last"][name], dtype=torch.float64)
    torch.testing.assert_close(ours[-1], fixed, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRAJECTORIES)
def test_agrees_with_the_installed_timm(name: str, layout: str) -> None:
    pytest.importorskip("timm", reason="timm is not installed; its fixed vectors are compared instead")
    cls, shared, _, _ = TRAJECTORIES[name]
    ours = trajectory(lambda layers: cls(layers, **shared, exclude_1d=False), layout)
    torch.testing.assert_close(ours, timm_trajectory(name), rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("chunk_size")
@pytest.mark.parametrize(
    ("name", "cls", "keywords"),
    [
        ("lars", Lars, {"lr": 2.0, "momentum": 0.9, "weight_decay": 0.05}),
        ("lamb", Lamb, {"lr": 0.01, "weight_decay": 0.05}),
        ("lamb", Lamb, {"lr": 0.01, "weight_decay": 0.05, "norm_range": (0.5, 0.8)}),
        ("novograd", Novograd, {"lr": 0.01, "weight_decay": 0.05}),
    ],
)
def test_agrees_with_the_paper(name: str, cls: Callable[..., Any], keywords: dict[str, Any]) -> None:
    class Reference(torch.optim.Optimizer):
        def __init__(self, layers: list[nn.Parameter]) -> None:
            super().__init__(layers, {})
            self.steps = 0

        def step(self, closure: Any = None) -> None:
            self.steps += 1
            for layer in self.param_groups[0]["params"]:
                new = reference(name, layer.detach(), layer.grad, self.state[layer], self.steps, keywords)
                layer.data.copy_(new)

    ours = trajectory(lambda layers: cls(layers, **keywords, exclude_1d=False))
    torch.testing.assert_close(ours, trajectory(Reference), rtol=1e-6, atol=1e-9)


def write_vectors() -> None:
    """Record timm's weights after the last step of every trajectory."""
    version = importlib.import_module("timm").__version__
    last = {name: timm_trajectory(name)[-1].tolist() for name in TRAJECTORIES}
    VECTORS.write_text(
        json.dumps({"timm": version, "torch": torch.__version__, "last": last}, indent=1) + "\n"
    )


if __name__ == "__main__":
    write_vectors()
