"""Private names of other libraries are imported in one place, and is there in the installed versions."""

from __future__ import annotations

import re

from conftest import ROOT

from ptfast.config import hydra_loader


def test_all_of_it_is_there() -> None:
    assert all(hasattr(hydra_loader, name) for name in hydra_loader.__all__)
    overridden = ("_load_single_config", "_compose_config_from_defaults_list")
    for name in (*overridden, "_apply_overrides_to_config"):
        assert callable(getattr(hydra_loader.ConfigLoaderImpl, name))
    assert callable(hydra_loader.OmegaConfDumper.str_representer)


def test_nothing_else_imports_it() -> None:
    private = re.compile(
        r"\b(hydra|omegaconf)\.(\w+\.)*_\w+ import|\bhydra\.core\.utils import .*setup_globals"
    )
    found = [file.name for file in (ROOT / "ptfast").rglob("*.py") if private.search(file.read_text("utf-8"))]
    assert found == ["hydra_loader.py"]
