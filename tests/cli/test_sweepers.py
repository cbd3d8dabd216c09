"""Sweeps: the objective returned to Hydra's sweepers, and refusals before the first job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from ptfast.config import multirun
from ptfast.config.compose import Composed
from ptfast.config.overrides import parse
from ptfast.core.errors import ConfigError


@pytest.fixture(scope="module")
def _seeker() -> None:
    node = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper", "max_batch_size": None}
    ConfigStore.instance().store(
        group="hydra/sweeper", name="seeker", node={**node, "direction": "minimize"}, package="hydra.sweeper"
    )


@pytest.fixture
def told(_seeker: None, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides that reach Hydra; `hydra/sweeper=seeker` stands for a sweeper that optimises."""
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
    multirun.sweep(["hydra/sweeper=seeker", *words.split(), "seed=0,1"], lambda c, n: lambda: 0.0, Path("s"))
    assert [word for word in told if "direction" in word] == [f"hydra.sweeper.direction={direction}"]


def test_what_the_user_says_of_the_direction_stands(told: list[str]) -> None:
    words = ["hydra/sweeper=seeker", "hydra.sweeper.direction=minimize", "sweep.mode=max", "seed=0,1"]
    multirun.sweep(words, lambda c, n: lambda: 0.0, Path("s"))
    assert [word for word in told if "direction" in word] == ["hydra.sweeper.direction=minimize"]


def test_other_sweepers_are_told_nothing(told: list[str]) -> None:
    multirun.sweep(["seed=0,1", "sweep.mode=max"], lambda c, n: lambda: 0.0, Path("s"))
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
def test_what_no_sweep_can_do_is_rejected_before_its_first_job(
    words: str, key: str, told: list[str], in_tmp: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        multirun.sweep([*words.split(), "seed=0,1"], lambda c, n: lambda: 0.0, Path("s"))
    assert (caught.value.code, caught.value.key, told) == ("C014", key, [])
    assert list(in_tmp.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("launcher=submitit_slurm", "Install it with pip install hydra-submitit-launcher."),
        ("launcher=joblib", "pip install hydra-joblib-launcher."),
        ("sweeper=optuna", "pip install hydra-optuna-sweeper."),
        ("launcher=slurm", "Did you mean submitit_slurm?"),
        ("launcher=optuna", "Options of hydra/launcher: basic."),
    ],
)
def test_plugins_that_are_not_there_are_named_by_their_package(word: str, hint: str, in_tmp: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        multirun.sweep([f"hydra/{word}", "seed=0,1"], lambda c, n: lambda: 0.0, Path("s"))
    assert (caught.value.code, caught.value.key) == ("C003", f"hydra/{word.partition('=')[0]}")
    assert str(caught.value).endswith(hint)


def test_a_sweep_runs_every_point_and_survives_a_failure(tmp_path: Path) -> None:
    seen: list[tuple[int, float, str]] = []
    checked: list[tuple[float, str]] = []

    def job(composed: Composed, number: int) -> Callable[[], float]:
        lr, preset = composed.tree["optimizer"]["lr"], composed.tree["preset"]
        assert composed.tree["precision"]["mode"] == ("amp" if preset == "fast" else "fp32")
        seen.append((number, lr, preset))
        if number == 1:
            raise RuntimeError("out of memory")
        return lambda: lr

    results = multirun.sweep(
        ["recipe=resnet_digits", "optimizer.lr=0.1,0.2", "preset=plain,fast"],
        job,
        tmp_path / "a sweep",
        lambda c: checked.append((c.tree["optimizer"]["lr"], c.tree["preset"])),
    )
    assert seen == [(0, 0.1, "plain"), (1, 0.1, "fast"), (2, 0.2, "plain"), (3, 0.2, "fast")]
    assert checked == [(0.1, "plain"), (0.2, "plain"), (0.1, "fast")]
    assert [results[0], *results[2:]] == [0.1, 0.2, 0.2]
    assert isinstance(results[1], multirun.JobFailure)
    assert str(results[1].error) == "out of memory"
    assert list((tmp_path / "a sweep").iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["a sweep"]


def test_a_bad_point_stops_a_sweep_before_its_first_job(tmp_path: Path) -> None:
    def check(composed: Composed) -> None:
        if composed.tree["optimizer"]["lr"] == "abc":
            raise ConfigError("C004", "not a number", key="optimizer.lr")

    started: list[int] = []

    def job(composed: Composed, number: int) -> Callable[[], None]:
        started.append(number)
        return lambda: None

    with pytest.raises(ConfigError, match="not a number"):
        multirun.sweep(["optimizer.lr=0.1,abc"], job, tmp_path / "s", check)
    assert started == []


@pytest.mark.parametrize(
    "argument",
    ["optimizer.lr=choice()", "optimizer.lr=range(0,0)", "seed=range(0,1,0)", "optimizer=glob(zz*)"],
)
def test_a_sweep_of_no_points(argument: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([argument], sweep=True)
    assert caught.value.code == "C014"


def test_a_sweep_over_an_unknown_option() -> None:
    with pytest.raises(ConfigError, match="Did you mean optimizer=adam"):
        parse(["optimizer=sgd,adma"], sweep=True)


def test_an_interval_needs_another_sweeper(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hydra/sweeper=optuna"):
        multirun.sweep(["optimizer.lr=interval(0,1)"], lambda c, n: lambda: None, tmp_path / "s")
