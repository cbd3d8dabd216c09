"""LoRA: what trains and is saved, that it is the formula, and that all that follows training works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import assert_refused
from running import build_run, same_bits, train, training_state, weights
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from ptfast.api import load as load_run
from ptfast.cli import command_line
from ptfast.core.auto_choices import read_choices
from ptfast.core.errors import ConfigError
from ptfast.models import Lora
from ptfast.models.gpt import Gpt
from ptfast.models.lora import add_adapters, merged
from ptfast.models.mlp import Mlp
from ptfast.training.fit import fit

pytest.importorskip("peft", reason="needs the package peft")

DIGITS = (
    "data=digits",
    "model.hidden=[16,12]",
    "batch_size=32",
    "steps=8",
    "schedule=constant",
)
LORA = (
    *DIGITS,
    "model.weights=base",
    "model.lora.rank=2",
    "ema.decay=0.5",
    "optimizer.lr=0.01",
    "saving.every=4steps",
)
LONGER = (*(word for word in LORA if word != "steps=8"), "steps=12", "run.dir=a", "run.resume=auto")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `base`, and a run `a` that adapts it."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train(*DIGITS, "run.dir=base") == 0
        assert train(*LORA, "run.dir=a") == 0
    return folder


@pytest.fixture
def runs(trained: Path, in_tmp: Path) -> Path:
    """The runs, in the test's folder."""
    return shutil.copytree(trained, in_tmp, symlinks=True, dirs_exist_ok=True)


def evaluated(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert command_line.run(["eval", *words]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def adapted(model: nn.Module, *, trains_head: bool = True, **keys: Any) -> list[str]:
    layers = add_adapters(model, Lora(**{"rank": 3, **keys}), trains_head=trains_head)
    # Else the factors would add nothing.
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter)
    return layers


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trains(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("alpha", "scale"), [(None, 2.0), (1.5, 0.5)])
def test_outputs_and_gradients_are_those_of_the_formula(alpha: float | None, scale: float) -> None:
    torch.manual_seed(0)
    model = Mlp((5,), 4, hidden=(6,))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    (layer,) = adapted(model, alpha=alpha)
    assert layer == "layers.1"
    assert trains(model) == {f"layers.1.lora_{x}.default.weight" for x in "AB"} | {
        "layers.3.weight",
        "layers.3.bias",
    }
    down, up = (p.detach().clone().requires_grad_() for n, p in model.named_parameters() if ".lora_" in n)
    x = torch.randn(7, 5)
    weight = plain[f"{layer}.weight"] + scale * up @ down
    hidden = F.linear(x, weight, plain[f"{layer}.bias"]).relu()
    expected = F.linear(hidden, plain["layers.3.weight"], plain["layers.3.bias"])
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    model(x).square().sum().backward()
    expected.square().sum().backward()
    named = dict(model.named_parameters())
    for factor, name in ((down, "lora_A"), (up, "lora_B")):
        given = named[f"{layer}.{name}.default.weight"].grad
        torch.testing.assert_close(given, factor.grad, rtol=1e-5, atol=1e-5)
    joined = merged(model, copied(model))
    assert joined.keys() == plain.keys()
    torch.testing.assert_close(joined[f"{layer}.weight"], weight.detach(), rtol=1e-6, atol=1e-6)


def test_only_the_factors_and_the_head_train_and_are_saved(runs: Path) -> None:
    base, own, training = weights(runs / "base"), weights(runs / "a"), training_state(runs / "a")
    factors = [f"layers.{n}.lora_{letter}.default.weight" for n in (1, 3) for letter in "AB"]
    assert [*own] == [*factors, "layers.5.weight", "layers.5.bias"]
    assert own.keys() == training["ema"]["averages"].keys()
    assert len(training["optimizer"]["state"]) == len(own)
    assert not torch.equal(own["layers.5.weight"], base["layers.5.weight"])
    frozen = load_run("a").state_dict()
    assert all(
        torch.equal(frozen[f"layers.{n}.base_layer.weight"], base[f"layers.{n}.weight"]) for n in (1, 3)
    )
    assert read_choices(runs / "a")["LoRA"].value == 2


def test_a_killed_run_resumes_to_the_same_bits(runs: Path) -> None:
    assert train(*LORA, "steps=4", "run.dir=half") == 0
    assert train(*LORA, "run.dir=half", "run.resume=auto") == 0
    assert same_bits(weights(runs / "a"), weights(runs / "half"))
    assert same_bits(training_state(runs / "a"), training_state(runs / "half"))


def test_a_trained_run_is_evaluated_predicted_with_loaded_and_exported(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = evaluated("a", capsys=capsys)
    np.save("digit.npy", np.zeros((1, 8, 8), np.uint8))
    assert command_line.run(["predict", "a", "digit.npy"]) == 0
    predicted = capsys.readouterr().out
    assert command_line.run(["export", "a", "--out", "merged"]) == 0
    assert load_file("merged/model.safetensors").keys() == weights(runs / "base").keys()
    # An export needs neither the run nor its base.
    shutil.rmtree("base")
    given = evaluated("merged", capsys=capsys)
    assert given["loss"] == pytest.approx(figures["loss"], rel=1e-5)
    assert given["accuracy"] == figures["accuracy"]
    capsys.readouterr()
    assert command_line.run(["predict", "merged", "digit.npy"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] == json.loads(predicted)["class"]
    assert train(*DIGITS, "model.weights=merged", "run.dir=further") == 0


def test_a_loaded_model_computes_with_its_factors(runs: Path) -> None:
    model = load_run("a")
    assert command_line.run(["export", "a", "--out", "merged", "--weights", "averaged"]) == 0
    inputs = torch.randn(3, 1, 8, 8)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs), load_run("merged")(inputs))


@pytest.mark.parametrize("words", [["eval", "a"], ["train", *LONGER]])
def test_another_base_than_that_of_training_is_rejected(
    runs: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*DIGITS, "seed=5", "run.dir=other") == 0
    shutil.rmtree("base")
    (runs / "other").rename("base")
    capsys.readouterr()
    assert command_line.run(words) == 6
    said = capsys.readouterr().err
    assert "error[S002]: model.weights=base" in said
    assert "not the weights that the adapters were trained with" in said


def test_a_base_that_is_gone_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "base").rename("moved")
    assert_refused(["eval", "a"], "S004", ("model.weights=base",), capsys)
    assert evaluated("a", "model.weights=moved", capsys=capsys)["split"] == "val"


def test_a_base_of_random_weights_is_saved_with_the_factors(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*DIGITS, "model.lora.rank=2", "run.dir=a") == 0
    assert "layers.1.base_layer.weight" in weights(in_tmp / "a")
    assert evaluated("a", capsys=capsys)["split"] == "val"
    assert train(*DIGITS, "model.lora.rank=2", "steps=10", "run.dir=a", "run.resume=auto") == 0


def test_a_run_with_factors_is_no_start_for_a_plain_model(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *DIGITS, "model.weights=a"]
    assert_refused(words, "S002", ("trained with LoRA: give what `ptfast export` makes",), capsys)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("model.lora.targets=[layer.1]", "C005", "matches no linear layer. Did you mean layers.1?"),
        ("model.lora.targets=layers.0", "C005", "matches no linear layer"),
        ("model.lora.targets='layers.(1'", "C005", "no regular expression"),
        ("model.hidden=[]", "C011", "no linear layers below the last one"),
        ("model.lora.rank=0", "C005", "at least 1"),
        ("model.lora.dropout=1", "C005", "at least 0 and below 1"),
        ("model.lora.rnk=2", "C002", "Did you mean model.lora.rank?"),
        ("model.lora=2", "C004", "model.lora.rank"),
    ],
)
def test_targets_and_keys_that_make_no_sense_are_rejected(
    in_tmp: Path, words: str, code: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = () if ".ran" in words or "lora=" in words else ("model.lora.rank=2",)
    assert_refused(
        ["train", *rank, *(["model.hidden=[8]"] if "hidden" not in words else []), words],
        code,
        (says,),
        capsys,
    )


def test_keys_without_a_rank_are_warned_of(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*DIGITS, "steps=1", "model.lora.alpha=4") == 0
    assert (
        "model.lora.alpha=4.0 (command line): means nothing to model.lora.rank=null"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("auto", ["attention_in", "attention_out", "feed_in", "feed_out"]),
        ("attention_in", ["attention_in"]),
        (["feed_in", r"blocks\.\d\.feed_out"], ["feed_in", "feed_out"]),
        ("head", ["head"]),
    ],
)
def test_targets_are_names_ends_of_names_or_regular_expressions(targets: Any, found: list[str]) -> None:
    model = Gpt(11, 8, width=8, depth=2, heads=2)
    expected = [f"blocks.{n}.{name}" for n in range(2) for name in found] if found != ["head"] else ["head"]
    assert adapted(model, targets=targets, trains_head=False) == expected
    assert all(".lora_" in name for name in trains(model)), (
        "a language model's last layer is part of the base"
    )


def test_a_weight_that_two_layers_share_is_not_adapted() -> None:
    model = Gpt(11, 8, width=8, depth=2, heads=2, tied_head=True)
    with pytest.raises(ConfigError, match="matches no linear layer"):
        adapted(model, targets="head")


class Encoder(nn.Module):
    """Torch's own layers, which evaluation would compute fused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(1))


def test_torchs_fused_layers_do_not_skip_the_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, plain, x = Encoder().eval(), Encoder().eval(), torch.randn(3, 4, 8)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", True)
    assert [name.rpartition(".")[2] for name in adapted(model)] == ["linear1", "linear2"] * 2
    plain.load_state_dict(merged(model, copied(model)))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_of_transformers_are_adapted_and_merged(name: str) -> None:
    from ptfast.core.protocols import DataInfo
    from ptfast.models.transformers import build

    info = DataInfo("text", "classification", vocab_size=20, num_classes=2)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2} if name == "gpt2" else {"num_hidden_layers": 2}
    if name == "bert":
        sizes |= {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    model, plain = (build(name, info, num_classes=2, pad_id=0, **sizes).eval() for _ in range(2))
    layers = adapted(model)
    assert len(layers) == {"gpt2": 8, "bert": 12}[name]
    head = {"gpt2": "model.score.weight", "bert": "model.classifier.weight"}[name]
    assert head in trains(model)
    plain.load_state_dict(merged(model, copied(model)))
    tokens = torch.randint(1, 20, (3, 5))
    torch.testing.assert_close(model(tokens), plain(tokens))


@pytest.mark.parametrize("words", [("checkpointing=full",), ("gradients.accumulate=4",), ("optimizer=muon",)])
def test_other_techniques_train_the_factors_too(in_tmp: Path, words: tuple[str, ...]) -> None:
    Path("text.txt").write_text("to be or not to be " * 60)
    text = ("data=text_file", "data.path=text.txt", "data.context_length=16", "model=gpt", "model.depth=2")
    text = (*text, "model.width=16", "model.heads=2", "batch_size=8", "steps=3", "model.lora.rank=2")
    found = []
    for index, more in enumerate(((), words)):
        run = build_run(in_tmp / str(index), *text, *more)
        fit(run)
        found.append(run.model.state_dict())
    for name, value in found[0].items():
        if ".lora_" in name and "optimizer=muon" not in words:
            torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6)
        elif ".lora_" not in name:
            assert torch.equal(found[1][name], value), "the base is frozen"
