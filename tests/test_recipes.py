"""Every recipe that needs a user's data or a network trains, at small sizes and from random weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import stand_ins
from running import build_run

from ptfast.training.fit import fit

TINY_BERT = ("model.dim=16", "model.hidden_dim=16", "model.n_layers=1", "model.n_heads=2")
SMALL_IMAGES = ("data.image_size=32", "batch_size=8", "model.weights=null")
TINY_CIFAR = ("data.root=FILES/cifar10", "batch_size=8", "model.widths=[4,8]")
SMALL = {
    "cifar_speedrun": TINY_CIFAR,
    "cifar_speedrun_96": TINY_CIFAR,
    "distilbert_text": (
        *("data.root=FILES", "data.tokenizer=words", "model.name=distilbert", "model.weights=null"),
        *("batch_size=8", *TINY_BERT),
    ),
    "finetune_image": ("data.root=FILES/images", *SMALL_IMAGES, "model.name=resnet18"),
    "gpt2_124m": (
        *("data.path=FILES/text.txt", "data.tokenizer=characters", "data.context_length=16", "batch_size=8"),
        *("data.val=10%", "model.width=24", "model.depth=2"),
    ),
    "resnet50_imagenet": (
        *("data.root=FILES/images", *SMALL_IMAGES[1:], "model.name=resnet18"),
        # At 16 pixels a strided convolution gets 1 x 1, where oneDNN's bf16 weight gradient may be NaN.
        *("data.image_size=64", "curriculum.image_size_from=32"),
    ),
    "segmentation": ("data.root=FILES/masked", *SMALL_IMAGES, "model.name=lraspp_mobilenet_v3_large"),
}
"""What makes each recipe small; FILES is the folder of stand-ins."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-ins")
    stand_ins.write(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    # Importing transformers takes seconds.
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "distilbert_text")) for name in SMALL],
)
def test_a_recipe_trains(name: str, files: Path, tmp_path: Path) -> None:
    if name == "distilbert_text":
        pytest.importorskip("transformers", reason="needs the package transformers")
    small = [word.replace("FILES", str(files)) for word in SMALL[name]]
    words = (f"recipe={name}", *small, "epochs=null", "steps=2", "device=cpu", "dataloader=plain")
    run = build_run(tmp_path / "run", *words)
    try:
        assert fit(run) == "finished"
        assert run.progress.step == 2
    finally:
        run.close()
