"""An export predicts what its run does: by ptfast, torch alone, ONNX Runtime, and libraries of the hub."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import train, training_state, weights, write_shards
from safetensors.torch import load_file
from toys import shapes

from ptfast.cli.command_line import run
from ptfast.core.distributed import Ranks
from ptfast.core.tensors.checkpoint_files import read_checkpoint
from ptfast.core.tensors.checkpoint_folders import find_to_resume
from ptfast.training.exports import export_run

DIGITS = ("recipe=resnet_digits", "model.width=4", "epochs=null", "steps=6", "batch_size=32")
PIXELS = ("data=custom", "data._target_=toys.shapes", "model=custom", "model._target_=toys.PixelNet")


def predicted(*words: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["predict", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def loaded(folder: str, *words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What `load.py` of an export prints, line by line."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["load.py", *words])
        runpy.run_path(f"{folder}/load.py", run_name="__main__")
    return capsys.readouterr().out.splitlines()


def differences(folder: str) -> dict[str, float]:
    return json.loads(Path(folder, "state.json").read_text())["export"]["differences"]


def test_an_export_predicts_what_its_run_does(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("ema=ema", "ema.decay=0.5", "precision=bf16", "eval.flip=true", "run.dir=r")
    assert train(*DIGITS, *words) == 0
    rng = np.random.default_rng(0)
    for name, size in (("same.png", (8, 8)), ("wide.png", (20, 31))):
        Image.fromarray(rng.integers(0, 255, (*size, 3), np.uint8)).save(name)
    deep = rng.integers(0, 65535, (9, 8)).astype(">u2")
    Path("deep.pgm").write_bytes(b"P5 8 9 65535\n" + deep.tobytes())
    Image.fromarray(deep.astype("f4") / 65535).save("float.tif")
    Image.fromarray(rng.integers(0, 255, (1, 30_000), np.uint8)).save("narrow.png")
    assert run(["export", "r", "--out", "e"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"model.pt2: logits (equal to|within \S+e-0[789] of) the model's", said)
    pictures = ("same.png", "wide.png", "deep.pgm", "float.tif", "narrow.png")
    assert predicted("e", *pictures, capsys=capsys) == predicted("r", *pictures, capsys=capsys)
    told = predicted("r", *pictures, "precision=fp32", capsys=capsys)
    wanted = [f"{each['input']}: {each['class']} {each['probability']:.4f}" for each in told]
    assert loaded("e", *pictures, capsys=capsys) == wanted
    script = Path("e/load.py").read_text()
    assert "ptfast" not in script
    assert len(script.splitlines()) < 110

    averages = training_state(Path("r"))["ema"]["averages"]
    kept = load_file("e/model.safetensors")
    assert all(torch.equal(kept[name], average) for name, average in averages.items())
    assert run(["export", "r/saved/best", "--out", "raw", "--weights", "last", "--weights-only"]) == 0
    raw = load_file("raw/model.safetensors")
    assert all(torch.equal(raw[name], value) for name, value in weights(Path("r"), "best").items())
    assert {path.name for path in Path("raw").iterdir()} == {
        *("config.yaml", "manifest.json", "model.safetensors", "state.json")
    }
    assert predicted("raw", *pictures, capsys=capsys) != predicted("r", *pictures, capsys=capsys)
    facts = json.loads(Path("e/state.json").read_text())
    assert facts["export"]["weights"] == "averaged"
    assert facts["export"]["input"]["shape"] == ["batch", 8, 8, 1]
    assert facts["export"]["logits"] == ["batch", 10]
    assert run(["eval", "e"]) == 0
    assert train(*DIGITS, "model.weights=e", "steps=1", "run.dir=warm") == 0


def test_a_text_and_a_mask_are_exported_too(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, size in (("train", 40), ("dev", 8)):
        lines = [f"{'good' if i % 2 else 'bad'} film {'very ' * (i % 5)}\t{i % 2}" for i in range(size)]
        Path(f"{split}.tsv").write_text("\n".join(["text\tlabel", *lines]))
    text = ("data=text_tsv", "data.root=.", "model=text_encoder", "model.width=8", "model.depth=1")
    assert train(*text, "steps=5", "batch_size=8", "run.dir=text") == 0
    assert run(["export", "text", "--out", "t"]) == 0
    Path("new.txt").write_text("a good film\nbad\n")
    told = predicted("text", "new.txt", capsys=capsys)
    said = loaded("t", "a good film", "bad", capsys=capsys)
    wanted = [f"{each['class']} {each['probability']:.4f}" for each in told]
    assert said == [f"{words}: {each}" for words, each in zip(("a good film", "bad"), wanted, strict=True)]

    Path("train.tsv").unlink()
    assert run(["export", "text", "--out", "late"]) == 3
    assert run(["export", "text", "--out", "late", "--weights-only"]) == 0

    assert train(*PIXELS, "steps=4", "batch_size=16", "run.dir=mask", "task.ignore_index=255") == 0
    assert run(["export", "mask", "--out", "m", "--hub", "h"]) == 0
    picture = shapes(1).tensors[0][0].permute(1, 2, 0).numpy()
    Image.fromarray(picture).save("shape.png")
    (record,) = predicted("m", "shape.png", capsys=capsys)
    (line,) = loaded("h", "shape.png", capsys=capsys)
    shares = {name: f"{record['shares'].get(name, 0):.4f}" for name in "012"}
    assert line == f"shape.png: {shares}"
    assert "pipeline_tag: image-segmentation" in Path("h/README.md").read_text()
    assert all(difference <= 1e-6 for folder in "tm" for difference in differences(folder).values())


def test_onnx_runtime_gives_the_same(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    assert train(*DIGITS, "steps=2", "run.dir=r") == 0
    capsys.readouterr()
    assert run(["export", "r", "--out", "e", "--onnx", "--json"]) == 0
    (*_, result) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (result["event"], result["out"], result["differences"]) == ("result", "e", differences("e"))
    assert differences("e").keys() == {"model.safetensors", "model.pt2", "model.onnx"}
    assert all(difference <= 1e-6 for difference in differences("e").values())
    assert {path.name for path in Path("e").iterdir() if "onnx" in path.name} == {"model.onnx"}


@pytest.mark.parametrize(("breaks", "code"), [("writing", 2), ("outputs", 5)])
def test_an_onnx_that_fails_leaves_no_folder(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, breaks: str, code: int
) -> None:
    assert train(*DIGITS, "steps=2", "run.dir=r") == 0

    def write(program: Any, file: Path) -> Any:
        for name in ("model.onnx", "model.onnx.data"):
            file.with_name(name).write_text("half")
        if breaks == "writing":
            raise RuntimeError("no operator")
        return lambda inputs: torch.zeros(len(inputs), 10) - 1

    monkeypatch.setattr(export_run, "import_extra", lambda *words: None)
    monkeypatch.setattr(export_run, "_write_onnx", write)
    assert run(["export", "r", "--out", "e", "--onnx"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert "onnx" in line
    assert not Path("e").exists()


def test_a_hub_folder_that_fails_leaves_no_folder(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(*DIGITS, "steps=2", "run.dir=r") == 0

    def fail(*given: Any) -> None:
        raise KeyError("crop")

    monkeypatch.setattr(export_run, "write_hub", fail)
    assert run(["export", "r", "--out", "e", "--hub", "h"]) == 2
    assert "error[C017]: --hub (command line): fails: KeyError" in (said := capsys.readouterr().err)
    assert said.endswith("No file is written; export without it.\n")
    assert not Path("e").exists()
    assert not Path("h").exists()


def tamper(saved: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the facts of a state as somebody would who hands it on, checksums included."""
    facts = json.loads((saved / "state.json").read_text())
    change(facts)
    (saved / "state.json").write_text(json.dumps(facts))
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = hashlib.sha256((saved / "state.json").read_bytes()).hexdigest()
    (saved / "manifest.json").write_text(json.dumps(manifest))


CODE = "0) or __import__('pathlib').Path('pwned').touch("


@pytest.mark.parametrize(
    "path",
    [
        *("tokenizer.unknown_id", "tokenizer.kind", "tokenizer.entries.0", "max_length", "max_value"),
        *("normalize", "input_shape"),
    ],
)
def test_a_strangers_facts_are_checked_by_type(
    exported_text: Path, in_tmp: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    shutil.copytree(exported_text, "text", symlinks=True)
    *way, last = path.split(".")

    def change(facts: dict[str, Any]) -> None:
        target: Any = facts["info"]["extra"]
        for name in way:
            target = target[int(name) if isinstance(target, list) else name]
        target[int(last) if isinstance(target, list) else last] = 7 if path.endswith("entries.0") else CODE

    state = Path("text/saved/last").resolve()
    tamper(state, change)
    for words in (["export", "text", "--out", "t", "--weights-only"], ["predict", "text", "new.txt"]):
        assert run(words) == 6, words
        error = capsys.readouterr().err
        assert "error[S001]" in error
        assert path.split(".")[0] in error
    assert not Path("t").exists()


@pytest.fixture(scope="module")
def exported_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a text classifier."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("train.tsv").write_text("text\tlabel\n" + "good film\t1\nbad film\t0\n" * 20)
        words = ("data=text_tsv", f"data.root={folder}", "model=text_encoder", "model.width=8")
        assert train(*words, "model.depth=1", "steps=2", "batch_size=8", "run.dir=text") == 0
    return folder / "text"


def test_a_strangers_names_stay_text_on_the_hub(exported_text: Path, in_tmp: Path) -> None:
    shutil.copytree(exported_text, "text", symlinks=True)
    names = ["a\n---\n<script>alert(1)</script>", "`![x](http://host)`"]

    def change(facts: dict[str, Any]) -> None:
        facts["info"]["class_names"] = names
        facts["figures"] = {"val\n# Title": {"[click](http://host)": 0.5}}

    tamper(Path("text/saved/last").resolve(), change)
    assert run(["export", "text", "--out", "e", "--hub", "h", "--weights-only"]) == 0
    page = Path("h/README.md").read_text()
    assert page.count("---\n") == 2
    assert "\n# Title" not in page
    assert r"`a\n---\n<script>alert(1)</script>`, `'![x](http://host)'`" in page
    assert "`[click](http://host) 0.5000`" in page


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_the_libraries_of_the_hub_load_a_folder(library: str, in_tmp: Path) -> None:
    module = pytest.importorskip(library)
    if library == "timm":
        words = [*DIGITS, "model=timm", "model.name=test_resnet"]
        words = [word for word in words if "width" not in word]
    else:
        Path("text.txt").write_text("to be or not to be " * 40)
        sizes = ("n_embd=16", "n_layer=1", "n_head=2", "n_positions=16")
        words = [
            "data=text_file",
            "data.path=text.txt",
            "data.context_length=8",
            "model=hf",
            "model.name=gpt2",
        ]
        words += [*(f"model.{size}" for size in sizes), "batch_size=8"]
    assert train(*words, "steps=2", "run.dir=r") == 0
    assert run(["export", "r", "--out", "e", "--hub", "h"]) == 0
    kept = load_file("e/model.safetensors")
    if library == "timm":
        model = module.create_model("local-dir:h", pretrained=True)
        assert model.pretrained_cfg["label_names" if "label_names" in model.pretrained_cfg else "input_size"]
    else:
        model = module.AutoModelForCausalLM.from_pretrained("h")
        kept = {name.removeprefix("model."): value for name, value in kept.items()}
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert f"library_name: {library}" in Path("h/README.md").read_text()


BRANCHES = """
import torch

class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layer = torch.nn.Linear(64, num_classes)
    def forward(self, images):
        return self.layer(images.flatten(1)) if images.sum() > -1e9 else images
"""


def test_what_cannot_be_exported_is_rejected_and_leaves_nothing(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("branching.py").write_text(BRANCHES)
    assert train("model=custom", "model._target_=branching.Net", "steps=2", "run.dir=r") == 0
    Path("there").mkdir()
    before = {*Path().iterdir()}
    for words, code, said in (
        (["r"], 2, "--out (command line): an argument is missing"),
        (["r", "--out", "there"], 2, "--out=there (command line): exists already"),
        (["r", "--out", "e", "--hub", "there"], 2, "--hub=there (command line): exists already"),
        (["r", "--out", "e", "--weights", "averaged"], 2, "no averaged weights. Use --weights last"),
        (["r", "--out", "e", "--weights", "best"], 2, "Use averaged or last"),
        (["r", "--out", "e", "--onnx", "--weights-only"], 2, "cannot be combined with --onnx"),
        (["r", "e", "--out", "e"], 2, "e: one argument too many"),
        (["there", "--out", "e"], 6, "no checkpoint there"),
        (["r", "--out", "e", "data.val=nothing"], 2, "data.val"),
        (["r", "--out", "e"], 2, "torch.export cannot trace it"),
        (["r", "--out", "r/config.yaml/e", "--weights-only"], 4, "error[E001]"),
    ):
        assert run(["export", *words]) == code, words
        assert said in (error := capsys.readouterr().err)
        assert error.count("error[") == 1
    assert run(["export", "r", "--out", "e", "--weights-only", "--hub", "h"]) == 0
    assert "load_state_dict" in Path("h/README.md").read_text()
    for folder in "eh":
        shutil.rmtree(folder)
    # Without the extra, and where a form gives something else.
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert run(["export", "r", "--out", "e", "--onnx"]) == 4
        patch.setattr(export_run, "LIMIT", -1.0)
        assert run(["export", "r", "--out", "e"]) == 5
    said = capsys.readouterr().err
    assert "pip install 'ptfast[onnx]'" in said
    assert "error[N003]: model.safetensors: its logits differ" in said
    assert {path for path in Path().iterdir() if path.name != "__pycache__"} == before - {Path("__pycache__")}


def test_an_export_from_elsewhere_is_no_more_trusted_than_a_run(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("branching.py").write_text(BRANCHES)
    assert train("model=custom", "model._target_=branching.Net", "steps=2", "run.dir=r") == 0
    assert run(["export", "r", "--out", "e", "--weights-only"]) == 0
    np.save("digits.npy", np.zeros((1, 8, 8), np.uint8))
    assert run(["predict", "e", "digits.npy"]) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", "another")
    assert run(["predict", "e", "digits.npy"]) == 2
    assert "error[C009]: model._target_=branching.Net" in capsys.readouterr().err
    assert run(["predict", "e", "digits.npy", "trust=[branching]"]) == 0
    file = Path("e/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert run(["predict", "e", "digits.npy", "trust=[branching]"]) == 6
    assert "model.safetensors: the file has changed" in capsys.readouterr().err
    assert run(["train", *DIGITS, "run.resume=e"]) == 6


def test_a_state_of_several_ranks_is_exported_whole(in_tmp: Path) -> None:
    assert train(*DIGITS, "steps=2", "run.dir=r") == 0
    state = find_to_resume(Path("r"))
    whole = read_checkpoint(state)
    shutil.rmtree(state)
    write_shards(Path("r/saved"), 2, whole, Ranks())
    assert run(["export", "r", "--out", "e", "--weights-only"]) == 0
    assert all(
        torch.equal(value, whole.model[name]) for name, value in load_file("e/model.safetensors").items()
    )
