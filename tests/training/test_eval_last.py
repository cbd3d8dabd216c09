"""A split's last, smaller batch is kept, left out, or filled up with samples that do not count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rank_cases import LAST
from running import build_run, summary, train
from torch import Tensor, nn
from torch.nn import functional as F

from ptfast.cli.command_line import run
from ptfast.core.errors import ConfigError, DataError, PtfastError
from ptfast.run import Run
from ptfast.training.evaluate import FullSize, evaluate

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


@pytest.mark.parametrize("words", [WORDS, (*WORDS, "eval.flip=true"), (*WORDS[1:], "model=resnet_digits")])
def test_stand_ins_change_shapes_and_no_figure(words: tuple[str, ...], tmp_path: Path) -> None:
    kept, sizes = evaluated(build_run(tmp_path / "keep", *words))
    padded, full_sizes = evaluated(build_run(tmp_path / "pad", *words, "eval.last=pad"))
    assert padded == pytest.approx(kept, rel=1e-5)
    assert set(full_sizes) == {8}
    assert set(sizes) == {8, 6}
    assert len(full_sizes) == len(sizes)


def test_what_is_dropped_is_left_out_of_every_figure(tmp_path: Path) -> None:
    dropped, sizes = evaluated(build_run(tmp_path / "drop", *WORDS, "eval.last=drop"))
    assert sizes == [8, 8, 8]
    whole = build_run(tmp_path / "keep", *WORDS)
    assert dropped == pytest.approx(figures_of_first(whole, 24), rel=1e-5)
    assert dropped != pytest.approx(figures_of_first(whole, 30), rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("last", "counted"), [("keep", 45), ("drop", 40), ("pad", 45)])
def test_over_two_ranks_each_sample_counts_once_or_not_at_all(
    strategy: str, last: str, counted: int, two_ranks: dict[str, Any], tmp_path: Path
) -> None:
    expected = figures_of_first(build_run(tmp_path / "one", *LAST), counted)
    assert two_ranks[f"{last} {strategy}"] == pytest.approx(expected, rel=1e-5)


def test_a_run_says_what_it_leaves_out(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*WORDS, "eval.last=drop", "run.dir=drop") == 0
    assert "without the samples of a last, smaller batch (6 of val)" in capsys.readouterr().out
    assert summary(Path("drop"))["left_out"] == {"val": 6}
    assert run(["eval", "drop"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == 6
    assert train(*WORDS, "eval.last=pad", "run.dir=pad") == 0
    assert "every batch filled up to 8 samples" in capsys.readouterr().out
    assert "left_out" not in summary(Path("pad"))
    assert run(["eval", "pad", "eval.last=keep"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["loss"] == pytest.approx(summary(Path("pad"))["val"]["loss"], rel=1e-5)


class Pair(NamedTuple):
    logits: Tensor
    more: dict[str, Tensor]


def test_nested_inputs_and_outputs_are_filled_up_and_cut_back() -> None:
    def model(tokens: Tensor, *, masks: dict[str, Tensor], scale: Tensor) -> Pair:
        assert tokens.shape == (5, 3)
        assert masks["mask"].shape == (5, 3)
        assert scale.shape == (2,)
        return Pair(tokens * masks["mask"] * scale[0], {"sums": tokens.sum(1)})

    tokens, mask, scale = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([2.0, 0.0])
    module = nn.Module()
    module.forward = model
    found = FullSize(module, 5)(tokens, masks={"mask": mask}, scale=scale)
    assert torch.equal(found.logits, tokens * mask * 2)
    assert torch.equal(found.more["sums"], tokens.sum(1))


def test_an_output_that_is_not_by_sample_is_refused() -> None:
    module = nn.Module()
    module.forward = lambda inputs: inputs.mean()
    with pytest.raises(
        ConfigError, match=r"eval\.last=pad: the padding cannot be cut from an output of shape \[\]"
    ) as caught:
        FullSize(module, 8)(torch.randn(3, 2))
    assert caught.value.code == "C011"
    assert FullSize(module, 3)(torch.ones(3, 2)) == 1


@pytest.mark.parametrize(
    ("words", "error", "code", "what"),
    [
        (
            ("eval.last=drop", "data.val=5samples"),
            DataError,
            "D006",
            "5 held-out samples do not fill a batch of 8",
        ),
        (("eval.last=pad", "task=hf"), ConfigError, "C011", "would count the padding"),
        (
            ("data=custom", "data._target_=streamed.WithHeldOut", "eval.last=drop"),
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
    assert (caught.value.code, caught.value.key) == (code, "eval.last")
