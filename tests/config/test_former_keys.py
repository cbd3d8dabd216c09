"""Keys of the version before: typed, they are answered with today's; in a run's own config, renamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from config_trees import refused

from ptfast.config.checks.former_keys import in_todays_keys
from ptfast.config.read import load_config
from ptfast.core.errors import ConfigError

STORED = Path(__file__).parent.parent / "training" / "golden" / "version_0_1" / "config.yaml"


@pytest.mark.parametrize(
    ("former", "value", "answer"),
    [
        ("dataloader.last", "drop", "renamed: use dataloader.drop_last=true"),
        ("dataloader.last", "keep", "renamed: use dataloader.drop_last=false"),
        ("dataloader.last", "pad", "renamed: use dataloader.drop_last=pad"),
        ("eval.last", "drop", "this key is gone"),
        ("debug.torch_check", "all", "this key is gone"),
        ("precision.matmul_precision", "auto", "this value is gone: use precision.matmul_precision=highest"),
        ("compile.mode", "pointwise", "this value is gone: use compile.mode=none"),
    ],
)
def test_a_former_key_is_answered_with_today_s(former: str, value: str, answer: str) -> None:
    error = refused(**{former.replace(".", "__"): value})
    assert (error.code, error.key, error.what) == ("C002", former, answer)


def test_the_config_of_an_earlier_run_is_read_with_its_values(tmp_path: Path) -> None:
    config = yaml.safe_load(STORED.read_text())
    config["dataloader"]["last"] = "drop"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert load_config(tmp_path / "config.yaml", trusted=True)[1].dataloader.drop_last is True


GONE: dict[str, dict[str, Any]] = {
    "compile": {"keep": True},
    "schedule": {"_target_": "ptfast.techniques.schedule.lr_schedules.Cyclic", "rise": "12.5%"},
    "optimizer": {"groups": [{"match": "*.bias", "lr_scale": 2.0, "clip_norm": 1.0}]},
}


@pytest.mark.parametrize("section", GONE)
def test_a_model_trained_in_a_way_that_is_gone_is_used_and_not_trained_on(
    section: str, tmp_path: Path
) -> None:
    config = yaml.safe_load(STORED.read_text())
    config[section] |= GONE[section]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    used = load_config(tmp_path / "config.yaml", trusted=True, trains=False)[1]
    assert [group.lr_scale for group in used.optimizer.groups] == [2.0] * (section == "optimizer")
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.yaml", trusted=True)


def test_former_values_that_computed_the_same_are_no_change() -> None:
    before = {"precision.matmul_precision": "auto", "compile.mode": "pointwise"}
    assert in_todays_keys(before) == {"precision.matmul_precision": "highest", "compile.mode": "none"}


@pytest.mark.parametrize(("former", "today"), [("auto", {}), ("drop", {"dataloader.drop_last": True})])
def test_configs_are_compared_in_todays_keys(former: str, today: dict[str, Any]) -> None:
    assert in_todays_keys({"dataloader.last": former, "seed": 1}) == {"seed": 1, **today}
