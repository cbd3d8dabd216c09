"""A split's last, smaller batch over ranks, of which one may have no sample of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import LAST
from running import build_run
from torch.nn import functional as F


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_over_two_ranks_each_sample_counts_once(
    strategy: str, two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    built = build_run(tmp_path / "one", *LAST)
    batches = [batch.data for batch in built.eval_loaders["val"]]
    inputs, targets = map(torch.cat, zip(*batches, strict=True))
    with torch.no_grad():
        outputs = built.model.eval()(inputs)
    hits = (outputs.argmax(1) == targets).float().mean()
    expected = {"loss": float(F.cross_entropy(outputs, targets)), "accuracy": float(hits)}
    assert len(targets) == 45
    assert two_ranks[f"last {strategy}"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_without_samples_agrees_on_metrics_that_keep_them(
    strategy: str, two_ranks: dict[str, Any]
) -> None:
    figures = two_ranks[f"one {strategy}"]
    assert figures["f1"] == figures["accuracy"] in (0, 1)
    assert figures["auroc"] == 0
