"""A split's last, smaller batch is kept or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import LAST
from running import build_run, summary, train
from torch import Tensor, nn
from torch.nn import functional as F

from ptfast.cli.command_line import run
from ptfast.core.errors import ConfigError, DataError, PtfastError
from ptfast.run import Run
from ptfast.training.evaluate import evaluate

WORDS = ("model.hidden=[8]", "steps=2", "data.val=30samples", "eval.batch_size=8")


class Seen(nn.Module):
    """Remembers how many samples it was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.sizes: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.sizes.append(len(inputs))
        return self.model(inputs)


def evaluated(built: Run) -> tuple[dict[str, float], list[int]]:
    """Figures of an untrained model, and how many samples each of its forward passes had."""
    built.model = model = Seen(built.model)
    built.outputs_checked = True  # which takes two forward passes more
    return evaluate(built, built.eval_loaders["val"]), model.sizes


def figures_of_first(built: Run, num_samples: int) -> dict[str, float]:
    """Loss and accuracy of a classifier over the first validation samples, by other means."""
    batches = [batch.data for batch in built.eval_loaders["val"]]
    inputs, targets = (torch.cat(parts)[:num_samples] for parts in zip(*batches, strict=True))
    built.model.eval()
    with torch.no_grad():
        outputs = built.model(inputs)
    hits = (outputs.argmax(1) == targets).float().mean()
    return {"loss": float(F.cross_entropy(outputs, targets)), "accuracy": float(hits)}


def test_what_is_dropped_is_left_out_of_every_figure(tmp_path: Path) -> None:
    dropped, sizes = evaluated(build_run(tmp_path / "drop", *WORDS, "eval.drop_last=true"))
    assert sizes == [8, 8, 8]
    whole = build_run(tmp_path / "keep", *WORDS)
    assert dropped == pytest.approx(figures_of_first(whole, 24), rel=1e-5)
    assert dropped != pytest.approx(figures_of_first(whole, 30), rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("drop_last", "counted"), [("false", 45), ("true", 40)])
def test_over_two_ranks_each_sample_counts_once_or_not_at_all(
    strategy: str, drop_last: str, counted: int, two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    expected = figures_of_first(build_run(tmp_path / "one", *LAST), counted)
    assert two_ranks[f"drop_last={drop_last} {strategy}"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_without_samples_agrees_on_metrics_that_keep_them(
    strategy: str, two_ranks: dict[str, Any]
) -> None:
    figures = two_ranks[f"one {strategy}"]
    assert figures["f1"] == figures["accuracy"] in (0, 1)
    assert figures["auroc"] == 0


def test_a_run_says_what_it_leaves_out(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*WORDS, "eval.drop_last=true", "run.dir=drop") == 0
    assert "without the samples of a last, smaller batch (6 of val)" in capsys.readouterr().out
    assert summary(Path("drop"))["left_out"] == {"val": 6}
    assert run(["eval", "drop"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == 6


@pytest.mark.parametrize(
    ("words", "error", "code", "what"),
    [
        (
            ("eval.drop_last=true", "data.val=5samples"),
            DataError,
            "D006",
            "5 held-out samples do not fill a batch of 8",
        ),
        (
            ("data=custom", "data._target_=streamed.WithHeldOut", "eval.drop_last=true"),
            ConfigError,
            "C011",
            "the last batch of a stream is not known beforehand",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_training(
    words: tuple[str, ...], error: type[PtfastError], code: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=what) as caught:
        build_run(tmp_path / "run", "model.hidden=[8]", "steps=2", "eval.batch_size=8", *words)
    assert (caught.value.code, caught.value.key) == (code, "eval.drop_last")
