"""Keys of the version before: typed, they are answered with today's; in a run's own config, renamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from config_trees import refused

from ptfast.config.checks.former_keys import in_todays_keys
from ptfast.config.read import load_config

STORED = Path(__file__).parent.parent / "training" / "golden" / "version_0_1" / "config.yaml"


@pytest.mark.parametrize(
    ("former", "value", "answer"),
    [
        ("dataloader.last", "drop", "renamed: use dataloader.drop_last=true"),
        ("dataloader.last", "keep", "renamed: use dataloader.drop_last=false"),
        ("dataloader.last", "pad", "renamed: use dataloader.drop_last=pad"),
        ("eval.last", "drop", "this key is gone"),
        ("debug.torch_check", "all", "this key is gone"),
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


@pytest.mark.parametrize(("former", "today"), [("auto", {}), ("drop", {"dataloader.drop_last": True})])
def test_configs_are_compared_in_todays_keys(former: str, today: dict[str, Any]) -> None:
    assert in_todays_keys({"dataloader.last": former, "seed": 1}) == {"seed": 1, **today}
