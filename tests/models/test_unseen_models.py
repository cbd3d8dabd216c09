"""Models that nothing here was made for: trained for some steps, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import stand_ins
from running import summary

from ptfast.cli.command_line import run

TIMM, TORCHVISION = ("recipe=finetune_image", "model=timm"), ("recipe=finetune_image",)
MASKS = ("recipe=segmentation",)
Case = tuple[tuple[str, ...], str, tuple[str, ...], str]
CASES: list[Case] = [
    (TIMM, "vit_tiny_patch16_224", ("model.img_size=32",), ""),
    (TIMM, "vit_tiny_patch16_224", (), "error[C"),
    (TIMM, "mixer_s32_224", ("data.image_size=224",), ""),
    (TIMM, "convnext_atto", (), ""),
    (TIMM, "mobilevit_xxs", (), ""),
    (TIMM, "efficientformer_l1", ("data.image_size=224",), ""),
    (TIMM, "maxvit_pico_rw_256", ("model.img_size=64", "data.image_size=64"), ""),
    (TIMM, "coat_tiny", ("model.img_size=32",), ""),
    (TIMM, "regnety_002", (), ""),
    (TIMM, "xcit_nano_12_p16_224", (), ""),
    (TIMM, "deit_tiny_distilled_patch16_224", ("model.img_size=32",), ""),
    (TIMM, "inception_v4", (), "error[C"),
    (TIMM, "inception_v4", ("data.image_size=96",), ""),
    (TIMM, "levit_128s", ("data.image_size=224",), ""),
    (TIMM, "volo_d1_224", ("model.img_size=64", "data.image_size=64"), ""),
    (TIMM, "sequencer2d_s", (), ""),
    (TORCHVISION, "googlenet", (), ""),
    (TORCHVISION, "vit_b_16", (), "error[C"),
    (MASKS, "fcn_resnet50", (), ""),
    (MASKS, "deeplabv3_mobilenet_v3_large", ("model.aux_loss=true",), ""),
    (MASKS, "lraspp_mobilenet_v3_large", (), ""),
    (TORCHVISION, "fcn_resnet50", (), "error[C"),
    (MASKS, "resnet18", (), "error[C"),
    (MASKS, "ssdlite320_mobilenet_v3_large", (), "error[C003]"),
    (TORCHVISION, "fasterrcnn_mobilenet_v3_large_320_fpn", (), "error[C003]"),
]
"""Recipe, model, further words, and what the line of a refusal holds; of a training nothing."""
SMALL = ("data.image_size=32", "batch_size=8", "epochs=null", "steps=20", "model.weights=null", "device=cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "name", "further", "refused"), CASES, ids=lambda part: str(part)[:40])
def test_it_trains_or_is_refused_in_one_line(
    recipe: tuple[str, ...],
    name: str,
    further: tuple[str, ...],
    refused: str,
    in_tmp: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "model=timm" in recipe:
        pytest.importorskip("timm", reason="needs the package timm")
    stand_ins.write(in_tmp)
    root = "masked" if recipe == MASKS else "images"
    words = [*recipe, f"model.name={name}", f"data.root={root}", *SMALL, *further]
    code = run(["train", *{word.partition("=")[0]: word for word in words}.values(), "run.dir=run"])
    lines = capsys.readouterr().err.splitlines()
    if refused:
        assert code == 2
        assert len(lines) == 1
        assert refused in lines[0]
    else:
        assert code == 0, lines
        assert summary(Path("run"))["steps"] == 20
