"""Limits of other devices: float64 on Apple's GPUs, copies in the background out of any memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from running import build_run
from torch.utils._python_dispatch import TorchDispatchMode

from ptfast.config.compose import compose
from ptfast.core import devices
from ptfast.core.protocols import DataInfo
from ptfast.data.loaders.pipeline import LoaderOptions, Prepare
from ptfast.training import fit


class NoFloat64(TorchDispatchMode):
    """Refuses what an Apple GPU would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert getattr(result, "dtype", None) is not torch.float64, func
        return result


def test_sums_are_float64_where_there_is_such_a_thing() -> None:
    assert devices.sum_dtype(torch.device("mps")) is torch.float32
    assert devices.sum_dtype(torch.device("cpu")) is devices.sum_dtype(torch.device("cuda")) is torch.float64


RECIPES = sorted(f"recipe={path.stem}" for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("word", [*RECIPES, "preset=safe", "preset=fast"])
def test_recipes_and_presets_name_nothing_that_a_common_cpu_lacks(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "CPU_INFO", ROOT / "tests/support/cpuinfo_avx2.txt")
    tree = compose([word], complete=False).tree
    assert devices.check_precision("bf16", "cpu") is not None
    assert devices.check_precision(tree["precision"]["mode"], "cpu") is None
    assert tree["compile"]["mode"] == "none"


def test_the_loop_keeps_all_sums_in_the_type_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(tmp_path, "steps=3", "model.hidden=[8]", "eval.every=1steps", "batch_size=16")
    monkeypatch.setattr(devices, "sum_dtype", lambda device: torch.float32)
    with NoFloat64():
        assert fit.fit(run) == "finished"
    assert 0 < run.metrics["val"]["loss"] < 10


@pytest.mark.parametrize("pin", [False, True])
def test_only_pinned_memory_is_copied_in_the_background(monkeypatch: pytest.MonkeyPatch, pin: bool) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, device, non_blocking=False: seen.append(non_blocking)
    )
    info = DataInfo(kind="features", task="classification")
    prepare = Prepare(LoaderOptions(torch.device("mps")), info, images=False)
    prepare.pin = pin
    prepare.move(torch.zeros(2))
    assert seen == [pin]
