"""Steps predicted from their operators: each is timed by itself, and the parts add up."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from ptfast.profiling.limits.operators import Operators

sys.path.append(str(ROOT / "scripts"))

from operator_replay import Replays
from step_prediction import MicroBenchmarks, predict

CPU = torch.device("cpu")


def test_a_prediction_is_the_sum_of_its_parts() -> None:
    left, right = torch.ones(4, 5), torch.ones(5, 6)
    with Operators(near_bytes=10**6) as operators:
        for _ in range(3):
            (left @ right).relu()
    times = {operator: {"mm": 0.01, "relu": 0.002}[operator.name] for operator in operators}
    benchmarks = MicroBenchmarks(times, framework_s=1e-4, touch_s=1e-6, fetch_s=1e-5, near_bytes=10**6)
    found = predict(operators, 1000, benchmarks, steps=3)
    assert found.operators_s == pytest.approx(0.012)
    assert found.framework_s == pytest.approx(2e-4)
    # Each of the three tensors is fetched once, by the first product.
    assert found.memory_s == pytest.approx((1000e-6 + (80 + 120) * 1e-5) / 3)
    assert found.step_s == pytest.approx(found.operators_s + found.framework_s + found.memory_s)


def test_replays_time_products_at_their_shapes_and_the_rest_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def time(self: Replays, operator: Any) -> float:
        timed.append(operator.name)
        return float(operator.num_bytes)

    monkeypatch.setattr(Replays, "time", time)
    with Operators() as operators:
        for size in range(1, 11):
            torch.ones(size, 2) @ torch.ones(2, 3)
            torch.ones(size).exp()
    found = Replays(CPU).seconds(operators)
    assert timed.count("mm") == 10
    assert timed.count("exp") == 4
    assert {o.num_bytes for o in operators if o.name == "exp"} == {found[o] for o in found if o.name == "exp"}


def test_what_operators_take_is_found_by_running_them() -> None:
    weight, tokens = torch.randn(50, 4, requires_grad=True), torch.randint(0, 50, (6, 7))
    parameters = [torch.zeros(3, requires_grad=True)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    parameters[0].grad = torch.ones(3)
    with Operators() as operators:
        outputs = F.embedding(tokens, weight).mean(1)
        F.cross_entropy(outputs, torch.zeros(6, dtype=torch.int64)).backward()
        optimizer.step()
    found = Replays(CPU).seconds(operators)
    assert {"embedding", "embedding_dense_backward", "nll_loss_forward", "_fused_adamw_"} <= {
        operator.name for operator in found
    }
    assert all(0 < seconds < 1 for seconds in found.values())
