"""Another target in a section: what the option file meant for the former goes, what the user said stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ptfast.config.compose import compose
from ptfast.config.files.frozen import freeze
from ptfast.config.read import load_config, read_config
from ptfast.core.errors import ConfigError


class Net(nn.Linear):
    def __init__(self, num_classes: int, dropout: float = 0.5) -> None:
        super().__init__(64, num_classes)


@pytest.mark.parametrize(
    ("words", "section", "kept"),
    [
        ("optimizer._target_=torch.optim.RMSprop", "optimizer", {"lr": 1e-3, "weight_decay": 0.01}),
        ("optimizer._target_=torch.optim.LBFGS", "optimizer", {"lr": 1e-3}),
        (
            "optimizer=sgd optimizer._target_=torch.optim.RMSprop optimizer.lr=0.5 preset=plain",
            "optimizer",
            {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.0},
        ),
        ("optimizer={_target_:torch.optim.RMSprop,alpha:0.5}", "optimizer", {"alpha": 0.5, "lr": 1e-3}),
        ("schedule._target_=ptfast.techniques.schedule.lr_schedules.Constant", "schedule", {}),
        ("model._target_=test_inherited.Net", "model", {"dropout": 0.0}),
    ],
)
def test_only_what_the_new_target_takes_is_inherited(words: str, section: str, kept: dict[str, Any]) -> None:
    _, config = read_config(words.split())
    kwargs = getattr(config, section).target.kwargs
    assert kwargs == {**kwargs, **kept}
    assert not {"betas", "nesterov", "fused", "end", "hidden"} & set(kwargs)
    assert str(config.schedule.warmup) == "5%"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("optimizer._target_=torch.optim.RMSprop optimizer.betas=[0.9,0.9]", "optimizer.betas"),
        ("optimizer={_target_:torch.optim.RMSprop,betas:[0.9,0.9]}", "optimizer.betas"),
        ("recipe=./mine.yaml optimizer._target_=torch.optim.RMSprop", "optimizer.amsgrad"),
        ("optimizer=mine", "optimizer.betas"),
    ],
)
def test_what_the_user_wrote_is_still_rejected(words: str, key: str, in_tmp: Path) -> None:
    Path("mine.yaml").write_text("optimizer:\n  amsgrad: true\n")
    Path("conf/optimizer").mkdir(parents=True)
    own = "defaults:\n  - adamw\n  - _self_\n\n_target_: torch.optim.SGD\nbetas: [0.9, 0.9]\n"
    Path("conf/optimizer/mine.yaml").write_text(own)
    with pytest.raises(ConfigError) as caught:
        read_config(words.split())
    assert (caught.value.code, caught.value.key) == ("C002", key)


def test_a_recipe_may_put_in_a_target_too(in_tmp: Path) -> None:
    Path("mine.yaml").write_text("optimizer:\n  _target_: torch.optim.RMSprop\n  alpha: 0.5\n")
    kwargs = read_config(["recipe=./mine.yaml"])[1].optimizer.target.kwargs
    assert kwargs == {"lr": 1e-3, "weight_decay": 0.01, "alpha": 0.5}


def test_so_may_the_command_line_over_a_whole_config(in_tmp: Path) -> None:
    freeze(compose(["optimizer.lr=0.25"]), Path("config.yaml"))
    _, config = load_config(Path("config.yaml"), ["optimizer._target_=torch.optim.RMSprop"])
    assert config.optimizer.target.kwargs == {"lr": 0.25, "weight_decay": 0.01}


def test_a_mapping_sets_the_keys_inside_it() -> None:
    composed = compose(["optimizer={lr: 0.5, weight_decay: 0}"])
    assert composed.place("optimizer.lr") == "command line"
    assert composed.place("optimizer.betas").endswith("adamw.yaml:4")
