"""Lazy layers: sized by the first samples, resumed, evaluated, predicted with and exported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from running import train
from torch import Tensor, nn

from ptfast.cli import command_line


class Lazy(nn.Module):
    """Layers that learn their input sizes from the first batch, among them a BatchNorm."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Sized(Lazy):
    """The same layers with their sizes written out."""

    def __init__(self, num_classes: int) -> None:
        nn.Module.__init__(self)
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes)
        )


WORDS = ("data=digits", "model=custom", "epochs=null", "steps=8", "batch_size=32", "device=cpu")
LAZY, SIZED = (f"model._target_={__name__}.{name}" for name in ("Lazy", "Sized"))


def weights(run: str) -> dict[str, Tensor]:
    return torch.load(f"{run}/saved/last/model.pt")


def test_lazy_layers_train_as_layers_of_the_same_sizes(in_tmp: Path):
    for model, name in ((LAZY, "lazy"), (SIZED, "sized")):
        assert train(*WORDS, model, f"run.dir={name}") == 0
    lazy, sized = weights("lazy"), weights("sized")
    assert lazy.keys() == sized.keys()
    assert all(lazy[name].shape == sized[name].shape for name in sized)
    assert lazy["layers.1.num_batches_tracked"] == 8, "the pass that sizes the layers is not counted"


def test_a_run_with_lazy_layers_resumes_to_the_same_bits_and_can_be_used(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
):
    words = (*WORDS, LAZY, "schedule=constant", "saving.every=4steps")
    assert train(*words, "run.dir=whole") == 0
    assert train(*words, "steps=4", "run.dir=half") == 0
    assert train(*words, "run.dir=half", "run.resume=auto") == 0
    whole, half = weights("whole"), weights("half")
    assert all(whole[name].equal(half[name]) for name in whole)
    np.save("digit.npy", np.zeros((1, 8, 8), np.uint8))
    capsys.readouterr()
    assert command_line.run(["eval", "whole"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["split"] == "val"
    assert command_line.run(["predict", "whole", "digit.npy"]) == 0
    assert command_line.run(["export", "whole", "--out", "out"]) == 0
