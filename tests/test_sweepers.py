"""What a sweep tells Hydra's sweepers, and what it refuses before its first job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from ptfast.config import multirun
from ptfast.errors import ConfigError


@pytest.fixture
def told(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides that reach Hydra; `hydra/sweeper=seeker` stands for a sweeper that optimises."""
    node = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper", "max_batch_size": None}
    ConfigStore.instance().store(
        group="hydra/sweeper", name="seeker", node={**node, "direction": "minimize"}, package="hydra.sweeper"
    )
    found: list[str] = []

    def record(self: Any, config_name: str, task_function: Any, overrides: list[str]) -> list[Any]:
        found.extend(overrides)
        return []

    monkeypatch.setattr(multirun.Hydra, "multirun", record)
    return found


@pytest.mark.parametrize(
    ("words", "direction"),
    [
        ("sweep.metric=val.accuracy", "maximize"),
        ("sweep.metric=val.loss", "minimize"),
        ("sweep.metric=mse", "minimize"),
        ("sweep.metric=train_samples_per_s", "maximize"),
        ("sweep.mode=max", "maximize"),
        ("sweep.metric=val.accuracy sweep.mode=min", "minimize"),
    ],
)
def test_a_sweeper_that_optimises_is_told_which_way(words: str, direction: str, told: list[str]) -> None:
    multirun.sweep(["hydra/sweeper=seeker", *words.split(), "seed=0,1"], lambda c, n: 0.0, Path("s"))
    assert [word for word in told if "direction" in word] == [f"hydra.sweeper.direction={direction}"]


def test_what_the_user_says_of_the_direction_stands(told: list[str]) -> None:
    words = ["hydra/sweeper=seeker", "hydra.sweeper.direction=minimize", "sweep.mode=max", "seed=0,1"]
    multirun.sweep(words, lambda c, n: 0.0, Path("s"))
    assert [word for word in told if "direction" in word] == ["hydra.sweeper.direction=minimize"]


def test_other_sweepers_are_told_nothing(told: list[str]) -> None:
    multirun.sweep(["seed=0,1", "sweep.mode=max"], lambda c, n: 0.0, Path("s"))
    assert not [word for word in told if "direction" in word]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("hydra/sweeper=seeker", "sweep.metric"),
        ("run.dir=here", "run.dir"),
        ("run.resume=auto", "run.resume"),
        ("run={dir:here}", "run.dir"),
    ],
)
def test_what_no_sweep_can_do_is_refused_before_its_first_job(
    words: str, key: str, told: list[str], in_tmp: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        multirun.sweep([*words.split(), "seed=0,1"], lambda c, n: 0.0, Path("s"))
    assert (caught.value.code, caught.value.key, told) == ("C014", key, [])
    assert list(in_tmp.iterdir()) == []
