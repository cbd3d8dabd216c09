"""A first layer from the data: what it does to patches, where its weights come from, and that it stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from running import build_run, same_bits, train, training_state, weights

from ptfast.models.airbench import Whitening, whitening_filters

WORDS = (
    "model=airbench94",
    "model.widths=[4]",
    "model.whitening=3",
    "optimizer=sgd",
    "steps=6",
    "device=cpu",
)


def smooth_images(num: int = 300) -> torch.Tensor:
    """Images whose pixels are like their neighbors, in three channels that are alike."""
    torch.manual_seed(0)
    grey = F.avg_pool2d(torch.randn(num, 1, 16, 16), 3, 1)
    return grey + 0.1 * torch.randn(num, 3, 14, 14)


@pytest.mark.parametrize("side", [2, 3])
def test_outputs_are_uncorrelated_and_of_one_size(side: int) -> None:
    images = smooth_images()
    layer = Whitening(3, side)
    layer.init_from_data(images)
    outputs = F.conv2d(images, layer.weight)
    half = outputs.shape[1] // 2
    assert half == 3 * side**2
    assert torch.equal(outputs[:, :half], -outputs[:, half:])
    flat = outputs[:, :half].transpose(0, 1).flatten(1)
    torch.testing.assert_close(flat @ flat.T / flat.shape[1], torch.eye(half), atol=0.2, rtol=0)
    patches = F.unfold(images, side).transpose(1, 2).flatten(0, 1)
    assert (patches.T @ patches / len(patches) - torch.eye(half)).abs().max() > 0.5


def test_filters_are_those_of_a_singular_value_decomposition() -> None:
    """Of the patches as `unfold` gives them, up to signs."""
    images = smooth_images(60)
    patches = F.unfold(images.double(), 2).transpose(1, 2).flatten(0, 1)
    _, values, rows = torch.linalg.svd(patches, full_matrices=False)
    expected = rows / (values**2 / len(patches) + 5e-4).sqrt()[:, None]
    filters = whitening_filters(images, 2)[:12].flatten(1)
    signs = (filters * expected).sum(1).sign()[:, None]
    torch.testing.assert_close(filters, signs * expected)


def test_it_is_computed_once_and_never_trained(in_tmp: Path) -> None:
    assert train(*WORDS, "saving.every=3steps", "saving.keep=9", "run.dir=whole") == 0
    assert train(*WORDS, "run.dir=rest", "run.resume=whole/saved/step-3") == 0
    assert same_bits(training_state(Path("whole")), training_state(Path("rest")))
    assert same_bits(weights(Path("whole")), weights(Path("rest")))
    fresh = build_run(in_tmp / "fresh", *WORDS).model.state_dict()
    name = "whiten.weight"
    assert torch.equal(weights(Path("whole"))[name], fresh[name])
    assert not torch.equal(weights(Path("whole"))["whiten.bias"], fresh["whiten.bias"])
    warm = build_run(in_tmp / "warm", *WORDS, "model.weights=whole", "data.val=30%")
    assert torch.equal(warm.model.state_dict()[name], fresh[name])


def test_its_bias_can_be_frozen_later(in_tmp: Path) -> None:
    groups = 'optimizer.groups=[{match: "whiten.bias", trains_until: 3steps}]'
    assert train(*WORDS, groups, "saving.every=3steps", "saving.keep=9", "run.dir=run") == 0
    biases = [
        torch.load(f"run/saved/step-{step}/model.pt", weights_only=True)["whiten.bias"] for step in (3, 6)
    ]
    assert torch.equal(*biases)
