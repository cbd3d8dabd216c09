"""Images in the half type of a run: for models that cast them before anything else, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, same_bits, train, weights
from torch import Tensor, nn
from torch.nn import functional as F

from ptfast.techniques.precision.mixed_precision import apply_half_weights, casts_inputs
from ptfast.training.stages import model_stage

CONV, LINEAR = nn.Conv2d(3, 4, 3), nn.Linear(48, 2)


class Calls(nn.Module):
    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.calls = [call]

    def forward(self, images: Tensor) -> Any:
        return self.calls[0](images)


@pytest.mark.parametrize(
    ("forward", "casts"),
    [
        (CONV, True),
        (lambda x: LINEAR(x.flatten(1)), True),
        (lambda x: LINEAR(x.permute(0, 2, 3, 1).reshape(len(x), -1)), False),
        (lambda x: CONV(x) + CONV(x[:, :, :]), True),
        (lambda x: CONV(x) + x.mean(), False),
        (lambda x: CONV(F.pad(x, (1, 1))), False),
        (lambda x: CONV(x.mul_(2)), False),
        (lambda x: CONV(x.double().float()), False),
        (lambda x: x.norm() if float(x[0, 0, 0, 0]) > 9 else CONV(x), False),
        (lambda x: x, False),
    ],
)
def test_which_models_cast_their_inputs(forward: Callable[[Tensor], Any], casts: bool) -> None:
    model, images = Calls(forward), torch.randn(2, 3, 4, 4)

    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(images)

    assert casts_inputs(model, images, torch.bfloat16, autocast) is casts
    assert not casts_inputs(model, images, torch.bfloat16, lambda: forward(images))


def test_a_model_in_half_width_casts_them() -> None:
    model, images = apply_half_weights(nn.Sequential(nn.Flatten(), nn.Linear(48, 2))), torch.randn(2, 3, 4, 4)
    assert casts_inputs(model, images, torch.bfloat16, lambda: model(images))


RUN = ("recipe=resnet_digits", "steps=8", "epochs=null", "eval.every=8steps", "augment=crop_flip")


@pytest.mark.parametrize("kind", ["memory", "device"])
def test_a_run_keeps_its_bits(in_tmp: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*RUN, "precision=bf16", f"dataloader={kind}", "gradients.accumulate=2")
    assert train(*words, "run.dir=half") == 0
    monkeypatch.setattr(model_stage, "_find_input_type", lambda run: torch.float32)
    assert train(*words, "run.dir=single") == 0
    assert same_bits(weights(Path("half")), weights(Path("single")))


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("precision=bf16",), torch.bfloat16),
        (("precision=bf16_true",), torch.bfloat16),
        (("precision=fp32",), torch.float32),
        (("precision=bf16", "augment.mixup=0.2"), torch.float32),
        (("precision=bf16", "curriculum.image_size_from=4"), torch.float32),
        (("precision=bf16", "callbacks=[{_target_: toys.Recorder}]"), torch.float32),
        (("precision=bf16", "model._target_=nets.Net"), torch.float32),
    ],
)
def test_others_may_see_float32(tmp_path: Path, words: tuple[str, ...], kind: torch.dtype) -> None:
    loader = build_run(tmp_path, *RUN, *words).train_loader
    assert next(loader.steps(0, 1)).micro_batches[0].data[0].dtype == kind
    loader.close()
