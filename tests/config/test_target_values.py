"""Values of a target's keywords: their types, their ranges, and what an optimizer takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_targets import HERE, checked, refused
from torch import nn

from ptfast.config.checks.target_checks import check_target
from ptfast.core.durations import Duration
from ptfast.core.sections.targets import Target


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("depth", "two", "C004"),
        ("depth", 2.5, "C004"),
        ("depth", True, "C004"),
        ("depth", None, "C004"),
        ("dropout", float("nan"), "C005"),
        ("norm", "bacth", "C004"),
        ("sizes", [1], "C004"),
        ("sizes", [1, "x"], "C004"),
        ("sizes", 3, "C004"),
        ("folder", 5, "C004"),
        ("untyped", "abc", "C004"),
        ("untyped", True, "C004"),
        ("flag", 1, "C004"),
        ("flag", "yes please", "C004"),
    ],
)
def test_a_bad_value(name: str, value: Any, code: str) -> None:
    error = refused("model", f"{HERE}.Net", **{name: value})
    assert (error.code, error.key) == (code, f"model.{name}")


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("depth", 1e1, 10),
        ("depth", "12", 12),
        ("dropout", 0, 0.0),
        ("dropout", "1e-1", 0.1),
        ("norm", "layer", "layer"),
        ("sizes", [3, 4.0], (3, 4)),
        ("folder", "a/b", Path("a/b")),
        ("folder", None, None),
        ("untyped", 3, 3.0),
        ("flag", "false", False),
    ],
)
def test_values_take_the_type_of_the_annotation_or_default(name: str, given: Any, taken: Any) -> None:
    value = checked("model", f"{HERE}.Net", **{name: given}).kwargs[name]
    assert value == taken
    assert type(value) is type(taken)


class Focal(nn.Module):
    """A user's loss, whose words mean what it likes."""

    def __init__(self, alpha: float = 0.25, eps: float = 1e-8, lr: float = 0.1) -> None:
        super().__init__()


def test_words_of_a_users_class_have_no_range() -> None:
    target = Target(f"{__name__}.Focal", {"alpha": 1.0, "eps": 0, "lr": -1.0})
    assert check_target(target, "")[1] == []
    for path, section, bad in (
        ("torch.optim.AdamW", "optimizer", {"lr": -1.0}),
        ("ptfast.models.gpt.Gpt", "model", {"depth": 0}),
        ("ptfast.models.gpt.Gpt", "model", {"dropout": 1.0}),
    ):
        found = check_target(Target(path, bad), section)[1]
        assert [problem.code for problem in found if problem.key == f"{section}.{next(iter(bad))}"] == [
            "C005"
        ]


def test_a_default_outside_the_range_of_a_name_lifts_it() -> None:
    assert checked("", "torch.nn.ELU", alpha=2.0).kwargs == {"alpha": 2.0}


def test_bare_numbers_take_the_unit_of_the_default_else_epochs() -> None:
    target = checked("schedule", f"{HERE}.Shape", milestones=[30, "60epochs", "90%"], every=5)
    epochs = [Duration(30, "epochs"), Duration(60, "epochs")]
    assert target.kwargs == {
        "milestones": [*epochs, Duration(90, "percent")],
        "every": Duration(5, "percent"),
    }


def test_fused_auto_is_dropped_where_there_is_no_fused() -> None:
    assert checked("optimizer", "torch.optim.SGD", fused="auto").kwargs == {"fused": "auto"}
    assert checked("optimizer", "torch.optim.RMSprop", fused="auto").kwargs == {}
    assert refused("optimizer", "torch.optim.SGD", fused="always").code == "C004"


@pytest.mark.parametrize(
    "name", [name for name in dir(torch.optim) if name[0].isupper() and name != "Optimizer"]
)
def test_every_optimizer_of_torch_is_accepted(name: str) -> None:
    target = checked("optimizer", f"torch.optim.{name}", lr=0.01)
    weight = nn.Parameter(torch.zeros(2, 2))
    assert target.build([weight]).param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0), ("lr", -1), ("momentum", 1), ("momentum", -0.1), ("weight_decay", -1e-4), ("lr", "1e")],
)
def test_ranges_of_an_optimizer(name: str, value: Any) -> None:
    assert refused("optimizer", "torch.optim.SGD", **{name: value}).code in ("C004", "C005")


def test_pairs_of_an_optimizer() -> None:
    assert checked("optimizer", "torch.optim.AdamW", betas=[0.9, 0.95]).kwargs["betas"] == (0.9, 0.95)
    assert refused("optimizer", "torch.optim.AdamW", betas=[0.9, 1.0]).code == "C005"
    assert refused("optimizer", "torch.optim.AdamW", betas=0.9).code == "C004"
