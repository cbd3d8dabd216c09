"""The models: shapes, sizes, what they refuse, and how they are built from facts about the data."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptfast.core.errors import ConfigError, MachineError
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.targets import Target
from ptfast.models.build_model import build_model
from ptfast.models.gpt import Gpt
from ptfast.models.layers import Block, attention
from ptfast.models.mlp import Mlp
from ptfast.models.resnet9 import ResNet9
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.models.text_encoder import TextEncoder
from ptfast.models.torchvision import build as build_torchvision
from ptfast.profiling.operator_counting import Operators

IMAGES = DataInfo("image", "classification", num_classes=5, input_shape=(3, 16, 16), in_channels=3)
TOKENS = DataInfo("tokens", "language_modelling", vocab_size=50, context_length=12)


class Stub:
    """A target as the config gives it: a factory and the keywords that the user set."""

    path = "tests.stub"

    def __init__(self, factory: Callable[..., Any], **kwargs: Any) -> None:
        self.factory, self.kwargs = factory, kwargs

    def resolve(self) -> Callable[..., Any]:
        return self.factory

    def build(self, *args: Any, **facts: Any) -> Any:
        wanted = inspect.signature(self.factory).parameters
        facts = {name: value for name, value in facts.items() if name in wanted}
        return self.factory(*args, **{**facts, **self.kwargs})


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Table 6 of the paper, in millions.
@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_resnet_sizes_are_those_of_the_paper(depth: int, millions: float) -> None:
    model = ResNetCifar(10, depth=depth)
    assert count(model) / 1e6 == pytest.approx(millions, rel=0.02)
    convolutions = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert len(convolutions) == depth


@pytest.mark.parametrize("size", [8, 15, 32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("make", [lambda c: ResNetCifar(7, c, depth=8), lambda c: ResNet9(7, c, width=8)])
def test_image_models_take_any_size(make: Callable[[int], nn.Module], channels: int, size: int) -> None:
    model = make(channels)
    images = torch.randn(2, channels, size, size)
    assert model(images).shape == (2, 7)
    model.eval()
    last = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(last, model(images), rtol=1e-4, atol=1e-5)


def test_resnet_shortcuts_carry_the_input_through() -> None:
    model = ResNetCifar(2, in_channels=1, depth=8, width=4).eval()
    block = model.blocks[1]
    block.norm2.weight.data.zero_()
    x = torch.rand(1, 4, 6, 6)
    out = block(x)
    assert out.shape == (1, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert out[:, :2].abs().sum() == 0
    assert out[:, 6:].abs().sum() == 0


@pytest.mark.parametrize("depth", [7, 21, 0, -4])
def test_a_depth_that_is_no_resnet_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=r"model.depth=.*6n \+ 2.*nearest is (8|20)") as caught:
        ResNetCifar(10, depth=depth)
    assert caught.value.code == "C005"


def test_mlp_flattens_and_a_single_layer_is_linear() -> None:
    assert Mlp((3, 4, 4), 5, hidden=[7], dropout=0.1)(torch.randn(2, 3, 4, 4)).shape == (2, 5)
    assert count(Mlp((6,), 5, hidden=[])) == 6 * 5 + 5


def test_text_encoder_ignores_padding() -> None:
    for depth in (0, 1):
        model = TextEncoder(20, 3, pad_id=0, width=8, depth=depth, heads=2, context_length=16).eval()
        tokens = torch.randint(1, 20, (2, 5))
        padded = torch.cat([tokens, torch.zeros(2, 4, dtype=torch.long)], dim=1)
        torch.testing.assert_close(model(tokens), model(padded))


@pytest.mark.parametrize("depth", [0, 1])
def test_text_encoder_stays_finite_without_words(depth: int) -> None:
    model = TextEncoder(20, 3, pad_id=0, width=8, depth=depth, heads=2, context_length=16, word_dropout=0.99)
    tokens = torch.tensor([[0, 0, 0], [5, 0, 0], [5, 6, 7]])
    loss = model(tokens).square().sum()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.embedding.weight.grad is not None
    assert model.embedding.weight.grad[0].abs().sum() == 0


def test_gpt_sees_no_future() -> None:
    model = Gpt(50, 12, width=16, depth=2, heads=2).eval()
    tokens = torch.randint(0, 50, (2, 12))
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 50)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_gpt_starts_near_a_uniform_guess_and_can_tie_its_head() -> None:
    tokens, targets = torch.randint(0, 50, (2, 8, 12))
    for tied in (False, True):
        model = Gpt(50, 12, width=32, depth=2, heads=2, tied_head=tied)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        assert loss.item() == pytest.approx(torch.tensor(50.0).log().item(), abs=0.3)
        assert (model.head.weight is model.token_embedding.weight) == tied


def test_gpt_refuses_sequences_it_has_no_positions_for() -> None:
    with pytest.raises(ValueError, match="13 tokens exceed the context length 12"):
        Gpt(50, 12, width=8, depth=1, heads=2)(torch.zeros(1, 13, dtype=torch.long))


@pytest.mark.parametrize(
    "make", [lambda: Gpt(9, 9, width=10, heads=4), lambda: TextEncoder(9, 2, width=10, depth=1)]
)
def test_heads_must_divide_the_width(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match="heads=4"):
        make()


def test_gradients_of_query_key_and_value_are_joined_by_one_copy() -> None:
    with Operators() as operators:
        Block(16, 2, dropout=0.0)(torch.randn(2, 5, 16)).sum().backward()
    counts = operators.calls
    assert counts["stack"] + counts["cat"] == 1
    assert not counts["clone"] + counts["copy_"]


@pytest.mark.parametrize("length", [1, 7, 64])
def test_plain_attention_equals_the_fused_kernel(length: int) -> None:
    query, key, value = (torch.randn(2, 3, length, 8).bfloat16().requires_grad_() for _ in range(3))
    ours = attention(query, key, value, causal=True)
    ours.sum().backward()
    ours_grad = query.grad
    query.grad = None
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    theirs = nn.functional.scaled_dot_product_attention(*exact, is_causal=True)
    theirs.sum().backward()
    torch.testing.assert_close(ours.double(), theirs, rtol=0.03, atol=0.03)
    assert ours_grad is not None
    assert exact[0].grad is not None
    torch.testing.assert_close(ours_grad.double(), exact[0].grad, rtol=0.05, atol=0.05)


def test_facts_about_the_data_fill_what_the_config_leaves_open() -> None:
    model = build_model(Stub(ResNetCifar, depth=8), IMAGES)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 5)
    assert (
        build_model(Stub(Gpt, width=8, heads=2), TOKENS)(torch.zeros(1, 12, dtype=torch.long)).shape[-1] == 50
    )
    assert build_model(Stub(Mlp, num_classes=9), IMAGES)(torch.randn(1, 3, 16, 16)).shape == (1, 9)
    regression = DataInfo("features", "regression", input_shape=(4,))
    assert build_model(Stub(Mlp), regression)(torch.randn(2, 4)).shape == (2, 1)


def test_a_model_that_does_not_fit_the_data_says_what_is_missing() -> None:
    with pytest.raises(
        ConfigError, match="needs vocab_size and context_length, which image data does not determine"
    ) as caught:
        build_model(Stub(Gpt), IMAGES)
    assert caught.value.code == "C011"


@pytest.mark.parametrize("make", [ResNetCifar, ResNet9])
def test_image_models_refuse_data_without_channels(make: Callable[..., nn.Module]) -> None:
    text = DataInfo("text", "classification", num_classes=2, vocab_size=9, pad_id=0)
    with pytest.raises(ConfigError, match="needs in_channels, which text data does not determine"):
        build_model(Stub(make), text)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gives a dict, not a torch.nn.Module") as caught:
        build_model(Stub(lambda num_classes: {}), IMAGES)
    assert caught.value.code == "C009"


def test_pretrained_reaches_the_builder_and_is_refused_elsewhere() -> None:
    seen: list[bool] = []

    def build(num_classes: int, pretrained: bool = False) -> nn.Module:
        seen.append(pretrained)
        return nn.Linear(1, num_classes)

    build_model(Stub(build), IMAGES, pretrained=True)
    build_model(Stub(build), IMAGES)
    assert seen == [True, False]
    with pytest.raises(ConfigError, match="there are no published weights"):
        build_model(Stub(Mlp), IMAGES, pretrained=True)


def test_torchvision_classifiers_by_name() -> None:
    model = build_model(Stub(build_torchvision, name="squeezenet1_1"), IMAGES)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    torch.manual_seed(0)
    color = build_torchvision("squeezenet1_1", 5).eval()
    torch.manual_seed(0)
    grey = build_torchvision("squeezenet1_1", 5, in_channels=1).eval()
    image = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(grey(image), color(image.expand(2, 3, 32, 32)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"model.name=resnet5: .* Did you mean resnet50\?") as caught:
        build_torchvision("resnet5", 10)
    assert caught.value.code == "C003"
    with pytest.raises(ConfigError, match="is neither a classifier nor a segmentation model") as caught:
        build_torchvision("ssdlite320_mobilenet_v3_large", 10)
    assert caught.value.code == "C003"
    with torch.device("meta"):
        # No weights of a backbone are downloaded, and there is one head.
        masks = build_torchvision("fcn_resnet50", 3)
        scores = build_torchvision("inception_v3", 3)(torch.zeros(2, 3, 96, 96))
    assert not any(name.startswith("aux") for name, _ in masks.named_modules())
    assert scores.shape == (2, 3)


@pytest.mark.parametrize("package", ["timm", "transformers"])
def test_an_absent_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptfast.models import timm as timm_models
    from ptfast.models import transformers

    monkeypatch.setitem(__import__("sys").modules, package, None)
    build, extra = {"timm": (timm_models.build, "timm"), "transformers": (transformers.build, "hf")}[package]
    with pytest.raises(MachineError, match=rf"pip install 'ptfast\[{extra}\]'") as caught:
        build("resnet18", num_classes=10)
    assert caught.value.code == "E004"


@pytest.mark.parametrize(
    ("tokenizer", "remedy"),
    [
        ({"kind": "words", "entries": []}, "data.tokenizer=distilbert-base-uncased"),
        ({"kind": "hub", "source": "gpt2"}, "data.tokenizer=distilbert-base-uncased"),
        ({"kind": "hub", "source": "distilbert-base-uncased"}, None),
        ({"kind": "hub", "source": "mine/tokenizer.json"}, None),
        (None, None),
    ],
)
def test_published_weights_need_their_own_tokenizer(
    tokenizer: dict[str, Any] | None, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ptfast.models import transformers

    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    info = DataInfo("text", "classification", 2, vocab_size=9, extra={"tokenizer": tokenizer})
    target = Stub(transformers.build, name="distilbert-base-uncased")
    with pytest.raises(ConfigError if remedy else MachineError) as caught:
        build_model(target, info, pretrained=True)
    assert caught.value.code == ("C011" if remedy else "E004")
    assert not remedy or remedy in str(caught.value)
    with pytest.raises(MachineError):
        build_model(target, info)


def test_transformers_models_take_and_give_tensors() -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    from ptfast.models.transformers import build

    sizes = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2}
    model = build("distilbert", num_classes=3, vocab_size=50, pad_id=0, **sizes).eval()
    tokens = torch.randint(1, 50, (2, 4))
    padded = torch.cat([tokens, torch.zeros(2, 3, dtype=torch.long)], dim=1)
    assert model(tokens).shape == (2, 3)
    torch.testing.assert_close(model(tokens), model(padded))
    with pytest.raises(ConfigError, match=r"model.dimm=3: the config .* Did you mean model.dim\?"):
        build("distilbert", num_classes=3, dimm=3)


def test_the_config_of_a_transformers_model_derives_sizes_from_those_given(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    from ptfast.models.transformers import build

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    written = {
        "model_type": "llama",
        "vocab_size": 30,
        **sizes,
        "hidden_size": 32,
        "id2label": {0: "a", 1: "b"},
    }
    written["rope_parameters"] = {"rope_type": "default", "rope_theta": 99.0, "partial_rotary_factor": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(written))
    info = DataInfo("text", "classification", 3, vocab_size=20)
    nested = {"rope_parameters": {"rope_theta": 7.0}}
    for name, vocabulary in (("llama", 32000), (str(tmp_path), 30)):
        config = build(name, info, 3, **sizes, **(nested if vocabulary == 30 else {})).model.config  # type: ignore[union-attr]
        assert (config.head_dim, config.num_labels, config.vocab_size) == (16, 3, vocabulary)
        assert build(name, info, 3, **sizes, vocab_size=25).model.config.vocab_size == 25  # type: ignore[union-attr]
        larger = replace(info, vocab_size=40_000)
        assert build(name, larger, 3, **sizes).model.config.vocab_size == 40_000  # type: ignore[union-attr]
    assert config.rope_parameters == written["rope_parameters"] | {"rope_theta": 7.0}
    with pytest.raises(
        ConfigError, match=r"model.hidden_size=wide: the config of llama rejects this"
    ) as caught:
        build("llama", info, 3, hidden_size="wide")
    assert caught.value.code == "C005"
    with pytest.raises(ConfigError, match=r"model.vocab_size=19: too few: the data has 20 token ids"):
        build_model(Target("ptfast.models.transformers.build", {"name": "llama", "vocab_size": 19}), info)


def test_a_library_that_fails_to_build_a_model_is_reported_in_a_line() -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    target = Target("ptfast.models.transformers.build", {"name": "glm", **sizes, "vocab_size": 60})
    with pytest.raises(ConfigError, match="AssertionError: Padding_idx must be within") as caught:
        build_model(target, DataInfo("tokens", "language_modelling", vocab_size=20))
    assert caught.value.code == "C005"


class Open(nn.Module):
    """Hands its keywords on, as torchvision's functions do."""

    def __init__(self, num_classes: int = 10, **kwargs: Any) -> None:
        super().__init__()
        self.head = Mlp((4,), num_classes, **kwargs)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            Target(f"{__name__}.Open", {"num_clases": 3}),
            "num_clases=3: unknown key. Did you mean model.num_classes?",
        ),
        (
            Target("ptfast.models.torchvision.build", {"name": "vit_b_16", "dropuot": 0.1}),
            "dropuot=0.1: unknown key. Did you mean model.dropout?",
        ),
        (
            Target("ptfast.models.torchvision.build", {"name": "resnet18", "weihgts": "x"}),
            "weihgts=x: unknown key. Did you mean model.weights?",
        ),
        (Target(f"{__name__}.Open", {"zzz": 3}), "zzz=3: unknown key."),
        (
            Target("torchvision.models.resnet18", {"num_clases": 5, "weights": "DEFAULT"}),
            "num_clases=5: unknown key. Did you mean model.num_classes?",
        ),
    ],
)
def test_a_keyword_that_a_signature_hides_is_named_where_the_model_is_built(
    target: Target, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(target, IMAGES)
    assert caught.value.code == "C002"
    assert str(caught.value) == f"model.{says}"


def test_a_transformers_model_of_other_sizes_can_be_saved_and_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    from ptfast.models.transformers import build

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    model: Any = build("beit", IMAGES, 5, **sizes, image_size=32).model
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_timm_models_by_name() -> None:
    pytest.importorskip("timm", reason="needs the package timm")
    from ptfast.models.timm import build

    assert build("resnet18", 5, in_channels=1)(torch.randn(2, 1, 32, 32)).shape == (2, 5)
    with pytest.raises(ConfigError, match="timm has no such model"):
        build("resnet1", 5)
    for name, key, said in (
        ("resnet18", "drop_rat", r"unknown key. Did you mean model.drop_rate\?"),
        ("mvitv2_tiny", "depths", r"unknown key. Did you mean model.depth\?"),
        ("convmixer_768_32", "dim", "the library sets this itself"),
        ("poolformer_s12", "layers", "unknown key"),
    ):
        with pytest.raises(ConfigError, match=rf"model.{key}=8: {said}"):
            build_model(Target("ptfast.models.timm.build", {"name": name, key: 8}), IMAGES)
