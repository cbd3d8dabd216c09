"""A trained model is used without ptfast, as the page on it shows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shown import fences

from ptfast.cli.command_line import run

PAGE = "docs/how-to/operate/deploy.md"


@pytest.mark.filterwarnings("ignore:The image decoding")
def test_the_program_on_the_page_predicts_what_ptfast_predicts(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for name, brightness in (("cat", 0), ("dog", 60)):
        for index in range(10):
            photo = Path("photos", name, f"{index}.jpg")
            photo.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 128, (40 + index, 50, 3)) + brightness
            Image.fromarray(pixels.astype(np.uint8)).save(photo)
    (command,) = fences(PAGE, "")
    assert run(shlex.split(command)[1:]) == 0
    capsys.readouterr()
    assert run(["predict", "runs/photos", "photos/cat/0.jpg"]) == 0
    told = json.loads(capsys.readouterr().out)
    (program,) = fences(PAGE, "python")
    assert "ptfast" not in program
    exec(program, {})
    name, probability = capsys.readouterr().out.split()
    assert name == told["class"]
    assert float(probability) == pytest.approx(told["probability"], abs=2e-4)
