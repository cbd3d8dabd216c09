"""Models that do not fit their data are rejected with the key that mends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from running import train
from torch import Tensor, nn

from ptfast.core.protocols import DataInfo
from ptfast.core.sections.targets import Target
from ptfast.models.build_model import remedy

HERE = __name__
IMAGES = DataInfo("image", "classification", num_classes=10, input_shape=(3, 8, 8), in_channels=3)
GREY = replace(IMAGES, input_shape=(1, 8, 8), in_channels=1)
FOLDER = Target("ptfast.data.sources.imagefolder.ImageFolder", {"root": "images"})
DIGITS = Target("ptfast.data.sources.digits.Digits")


class Patches(nn.Module):
    """Takes images of one size, as a vision transformer does."""

    def __init__(self, num_classes: int, image_size: int = 32, in_chans: int = 3) -> None:
        super().__init__()
        self.image_size = image_size
        self.layers = nn.Sequential(nn.Conv2d(in_chans, 4, 4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        assert images.shape[-1] == self.image_size, f"expected {self.image_size} pixels"
        return self.head(self.layers(images))


class Rgb(nn.Module):
    """Has three channels written into it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images))


class Columns(nn.Module):
    """Takes rows of one width."""

    def __init__(self, num_classes: int, in_dim: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(in_dim, num_classes)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(rows)


@pytest.mark.parametrize(
    ("name", "keywords", "data", "info", "says"),
    [
        ("Patches", {"image_size": 8, "in_chans": 3}, DIGITS, GREY, "Set model.in_chans=1"),
        ("Patches", {}, FOLDER, IMAGES, "Set model.image_size=8 or data.image_size=32"),
        ("Patches", {}, DIGITS, IMAGES, "Set model.image_size=8"),
        ("Patches", {"image_size": 8}, DIGITS, IMAGES, None),
        (
            "Columns",
            {},
            DIGITS,
            DataInfo("features", "classification", 2, input_shape=(5,)),
            "Set model.in_dim=5",
        ),
        ("Rgb", {}, DIGITS, GREY, None),
    ],
)
def test_the_remedy_names_settings_that_contradict_the_data(
    name: str, keywords: dict[str, int], data: Target, info: DataInfo, says: str | None
) -> None:
    target = Target(f"{HERE}.{name}", keywords)
    assert remedy(target, data, info) == says


def test_a_run_is_rejected_with_the_key_that_mends_it(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model=custom", f"model._target_={HERE}.Patches", "model.image_size=8", "steps=1", "run.dir=a")
    assert train(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"ptfast: error[C017]: model._target_={HERE}.Patches (command line): forward raises"
    )
    assert line.endswith("given a Tensor of float32 (64, 1, 8, 8). Set model.in_chans=1.")
    assert not Path("a").exists()
    assert train(*words, "model.in_chans=1") == 0
    assert train("model=resnet20", "model.in_channels=3", "steps=1", "run.dir=c") == 2
    assert capsys.readouterr().err.endswith("Set model.in_channels=1.\n")
