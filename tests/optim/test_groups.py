"""Parameter groups: equal to torch with groups made by hand, scaled rates, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from config_trees import check, refused, to_tree
from optimizers import OURS, take_steps
from running import build_run, records, same_bits, train
from torch import nn

from ptfast.config.read import load_config, read_config
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import Logger
from ptfast.core.sections.targets import Target
from ptfast.models.gpt import Gpt
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.optim import Optimizer, ParameterGroup
from ptfast.optim.build_optimizer import build_optimizer, start_momentum
from ptfast.optim.parameter_groups import Grouping, layer_depths, reference_lr, scale_for_batch
from ptfast.training.fit import fit

CPU = torch.device("cpu")
SMALL = ("model.hidden=[16,8]", "batch_size=128", "log_every=4", "saving.every=1000steps")


def entry(match: str, **keys: Any) -> ParameterGroup:
    return ParameterGroup(match=match, **keys)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    convolution = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*convolution, nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    take_steps(model, optimizer, 5)
    return list(model.state_dict().values())


def grouped(path: str, kwargs: dict[str, Any], **asked: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    section = Optimizer(target=Target(path, kwargs), **asked)
    return model, build_optimizer(section.target, model, CPU, Grouping(model, section).parts())[0]


def asking(**keys: Any) -> Optimizer:
    return Optimizer(target=Target("torch.optim.SGD"), **keys)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
        ("NAdam", {"lr": 0.01, "weight_decay": 0.1}),
        ("RAdam", {"lr": 0.01, "weight_decay": 0.1}),
        ("Adafactor", {"lr": 0.01, "weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_torch_with_groups_made_by_hand(name: str, kwargs: dict[str, Any]) -> None:
    entries = [entry("*.bias", lr_scale=8), entry("4.*", lr_scale=0.5), entry("6.bias", weight_decay=0.3)]
    model, optimizer = grouped(f"torch.optim.{name}", kwargs, decay_1d=False, groups=entries)
    other, lr = net(), kwargs["lr"]
    p = dict(other.named_parameters())
    by_hand = [
        {"params": [p["0.weight"], p["6.weight"]]},
        {"params": [p["1.weight"]], "weight_decay": 0.0},
        {"params": [p["0.bias"], p["1.bias"]], "lr": 8 * lr, "weight_decay": 0.0},
        {"params": [p["4.weight"]], "lr": 0.5 * lr},
        # Entries refine each other, key by key: the later one counts.
        {"params": [p["4.bias"]], "lr": 0.5 * lr, "weight_decay": 0.0},
        {"params": [p["6.bias"]], "lr": 8 * lr, "weight_decay": 0.3},
    ]
    reference = getattr(torch.optim, name)(by_hand, **kwargs)
    assert same_bits(stepped(model, optimizer), stepped(other, reference))
    assert reference_lr(optimizer) == lr


@pytest.mark.parametrize("name", [name for name in OURS if name != "lars-nesterov"])
def test_our_own_optimizers_take_groups(name: str) -> None:
    made = OURS[name]
    path = f"{made.func.__module__}.{made.func.__name__}"  # type: ignore[attr-defined]
    kwargs: dict[str, Any] = dict(made.keywords)  # type: ignore[attr-defined]
    alone, nothing_asked = grouped(path, kwargs, groups=[entry("*", lr_scale=1)])
    plain = net()
    optimizer, _ = build_optimizer(Target(path, kwargs), plain, CPU)
    torch.testing.assert_close(stepped(alone, nothing_asked), stepped(plain, optimizer))
    model, optimizer = grouped(path, kwargs, decay_1d=False, groups=[entry("6.*", lr_scale=0.5)])
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for known, parameter in model.named_parameters():
        assert rates[id(parameter)] == kwargs["lr"] * (0.5 if known.startswith("6.") else 1)
        assert (decays[id(parameter)] == 0) == (parameter.ndim == 1)
    before = next(iter(model.state_dict().values())).clone()
    assert not torch.equal(stepped(model, optimizer)[0], before)


def test_muon_keeps_its_own_choice_within_groups() -> None:
    kwargs = {"lr": 0.02}
    _, whole = grouped("ptfast.optim.muon.Muon", kwargs)
    _, split = grouped("ptfast.optim.muon.Muon", kwargs, decay_1d=False, groups=[entry("4.*", lr_scale=2)])

    def chosen(optimizer: torch.optim.Optimizer) -> list[tuple[int, ...]]:
        return sorted(tuple(p.shape) for g in optimizer.param_groups if g["muon"] for p in g["params"])

    assert chosen(whole) == chosen(split) == [(16, 64)]


def test_weight_decay_that_an_optimizer_would_not_take() -> None:
    for path, kwargs in (("ptfast.optim.lamb.Lamb", {}), ("torch.optim.Rprop", {})):
        with pytest.raises(ConfigError) as caught:
            grouped(path, kwargs, groups=[entry("*.bias", weight_decay=0.1)])
        assert caught.value.code == "C011"
    grouped("ptfast.optim.lamb.Lamb", {"exclude_1d": False}, groups=[entry("*.bias", weight_decay=0.1)])


@pytest.mark.parametrize(
    ("pattern", "near"), [("*.biass", ".bias"), ("head.*", "6."), ("0.Weight", "0.weight")]
)
def test_a_pattern_that_matches_nothing(pattern: str, near: str) -> None:
    with pytest.raises(ConfigError, match="matches no parameter") as caught:
        Grouping(net(), asking(groups=[entry("*"), entry(pattern)]))
    assert (caught.value.key, caught.value.value) == ("optimizer.groups.1.match", pattern)
    assert "The nearest are" in str(caught.value)
    assert near in str(caught.value)


def test_a_pattern_may_match_what_a_rewrite_has_dropped() -> None:
    section, model = (
        asking(groups=[entry("0.bias", lr_scale=2)]),
        nn.Sequential(nn.Conv2d(1, 2, 3, bias=False)),
    )
    (part,) = Grouping(model, section, ["0.bias"]).parts() or ()
    assert part["lr_scale"] == 1
    with pytest.raises(ConfigError, match="matches no parameter"):
        Grouping(nn.Sequential(nn.Linear(2, 2)), asking(groups=[entry("1.bias")]), ["0.bias"])


def test_a_shared_parameter_goes_by_any_of_its_names() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    (part,) = Grouping(model, asking(groups=[entry("1.weight", lr_scale=2)])).parts() or ()
    assert (part["lr_scale"], len(part["params"])) == (2, 1)


def test_depths_of_a_residual_network_a_transformer_and_a_plain_one() -> None:
    depths = layer_depths(ResNetCifar(num_classes=10, in_channels=3, depth=20))
    values = list(depths.values())
    assert (values[0], values[-1], sorted(set(values))) == (0, 10, list(range(11)))
    depths = layer_depths(Gpt(vocab_size=11, context_length=8, depth=3, width=16, heads=2))
    assert depths["token_embedding.weight"] == depths["position_embedding.weight"] == 0
    assert (depths["blocks.0.feed_in.weight"], depths["blocks.2.feed_norm.bias"]) == (1, 3)
    assert depths["norm.weight"] == depths["head.weight"] == 4
    assert layer_depths(net()) == {"0.weight": 0, "0.bias": 0, "1.weight": 0, "1.bias": 0} | {
        "4.weight": 1,
        "4.bias": 1,
        "6.weight": 2,
        "6.bias": 2,
    }


def test_layer_decay_scales_a_vision_transformer_as_timm_does() -> None:
    timm = pytest.importorskip("timm")
    optim = pytest.importorskip("timm.optim")
    model = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=32, num_classes=5)
    theirs = {
        id(p): group["lr_scale"]
        for group in optim.param_groups_layer_decay(model, layer_decay=0.7)
        for p in group["params"]
    }
    parts = Grouping(model, asking(layer_decay=0.7)).parts() or ()
    ours = {id(p): part["lr_scale"] for part in parts for p in part["params"]}
    for name, parameter in model.named_parameters():
        # timm counts the last norm with the block before it, BEiT's own code with the head, as here.
        expected = 1.0 if name.startswith("norm.") else theirs[id(parameter)]
        assert ours[id(parameter)] == pytest.approx(expected), name


def test_layers_that_are_not_there() -> None:
    for asked in ({"layer_decay": 0.5}, {"freeze_backbone": Duration(1, "epochs")}):
        with pytest.raises(ConfigError, match="one layer only") as caught:
            Grouping(nn.Sequential(nn.Linear(2, 2)), asking(**asked))
        assert caught.value.key == f"optimizer.{next(iter(asked))}"


@pytest.mark.parametrize(
    ("name", "rule", "lr", "decay"),
    [
        ("SGD", "linear", 4, 1),
        ("SGD", "sqrt", 2, 2),
        ("AdamW", "sqrt", 2, 2),
        ("AdamW", "linear", 4, 1),
        ("Adam", "sqrt", 2, 1),
        ("Adafactor", "sqrt", 2, 2),
        ("AdamW", "none", 1, 1),
    ],
)
def test_scaling_for_the_batch(name: str, rule: Any, lr: float, decay: float) -> None:
    kwargs = {"lr": 0.1, "weight_decay": 0.01}
    _, optimizer = grouped(f"torch.optim.{name}", kwargs, groups=[entry("6.*", lr_scale=3)])
    note = scale_for_batch(optimizer, asking(lr_scaling=rule, reference_batch=64), 256)
    assert (note is None) == (rule == "none")
    assert ("weight decay x" in str(note)) == (decay != 1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * lr, 0.3 * lr])
    assert [group["initial_lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * lr, 0.3 * lr])
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01 * decay}
    assert reference_lr(optimizer) == pytest.approx(0.1 * lr)


def test_entries_are_checked() -> None:
    config = check(optimizer__groups=[{"match": "*.bias", "lr_scale": 64, "trains_until": 0}])
    (group,) = config.optimizer.groups
    assert (group.lr_scale, group.trains_until, group.weight_decay) == (64.0, Duration(0, "epochs"), None)
    again = check(**{f"optimizer__{k}": v for k, v in to_tree(config)["optimizer"].items()})
    assert again.optimizer.groups == config.optimizer.groups
    for wrong, code, said in (
        ([{"match": "*", "lr_scael": 2}], "C002", "Did you mean optimizer.groups.0.lr_scale?"),
        ([{"lr_scale": 2}], "C016", "required"),
        ([{"match": "*", "lr_scale": True}], "C004", "a number"),
        ([{"match": "*", "weight_decay": -1}], "C005", "at least 0"),
        ([{"match": "*", "trains_from": "5s"}], "C004", "wall time"),
        (["*.bias"], "C004", "expected keys such as optimizer.groups.0.match"),
        ("*.bias", "C004", "expected a list. Write [...] around it"),
    ):
        error = refused(optimizer__groups=wrong)
        assert error.code == code
        assert said in str(error)


def test_an_entry_without_brackets_is_the_command_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(("data=digits", "model=mlp", "epochs=1", 'optimizer.groups={match: "*"}'))
    assert (caught.value.code, caught.value.key) == ("C004", "optimizer.groups")
    assert caught.value.place == "command line"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__lr_scaling": "sqrt"},
        {"gradients__clip_adaptive": 0.01, "gradients__clip_norm": 1},
        {"gradients__clip_adaptive": 0.01, "gradients__clip_value": 1},
        {"gradients__clip_norm": 1, "gradients__clip_value": 1},
    ],
)
def test_contradictions(changes: dict[str, Any]) -> None:
    assert refused(**changes).code == "C011"


def test_a_whole_list_in_a_recipe_and_on_the_command_line(in_tmp: Path) -> None:
    Path("mine.yaml").write_text(
        "defaults:\n  - override /data: digits\noptimizer:\n  decay_1d: false\n  groups:\n"
        '    - match: "*.bias"\n      lr_scale: 64\n    - {match: "layers.1.*", trains_until: 50%}\n'
    )
    asked = '[{match: "*.bias", lr_scale: 64}, {match: layers.1.*, trains_until: 50%}]'
    words = (*SMALL, "steps=6")
    from_recipe = read_config(("recipe=./mine.yaml", *words))[1].optimizer
    assert (
        from_recipe
        == read_config((*words, "optimizer.decay_1d=false", f"optimizer.groups={asked}"))[1].optimizer
    )
    assert train("recipe=./mine.yaml", *words, "run.dir=recipe") == 0
    frozen = load_config(Path("recipe/config.yaml"), trusted=True)[1].optimizer
    assert frozen == from_recipe


def test_nothing_asked_is_one_group_in_the_models_order(in_tmp: Path) -> None:
    run = build_run(in_tmp / "a", *SMALL, "steps=2")
    (group,) = run.optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in run.model.parameters()]
    assert "lr_scale" not in group
    assert run.freezing is None


@pytest.mark.parametrize("optimizer", ["sgd_cifar", "adamw", "lamb"])
def test_scaled_gradients_are_unscaled_once_for_all_groups(in_tmp: Path, optimizer: str) -> None:
    groups = '[{match: "layers.1.*", lr_scale: 0.5}, {match: "*.bias", lr_scale: 2, trains_from: 3steps}]'
    words = (*SMALL, "steps=6", f"optimizer={optimizer}", f"optimizer.groups={groups}")
    words = (*words, "gradients.clip_norm=0.1", "gradients.log_norm=true", "optimizer.fused=auto")
    run = build_run(in_tmp / "scaled", *words)
    # What scaling and unscaling does to float32 gradients: nothing, a power of two being exact.
    run.precision = replace(run.precision, scaler=torch.amp.GradScaler("cpu"))
    start_momentum(run.optimizer)
    plain = build_run(in_tmp / "plain", *words)
    logged: dict[str, list[float]] = {}
    for one, name in ((run, "scaled"), (plain, "plain")):
        one.logger = Lines(logged.setdefault(name, []))
        fit(one)
    assert logged["scaled"] == logged["plain"]
    torch.testing.assert_close(run.model.state_dict(), plain.model.state_dict())


class Lines(Logger):
    """A logger that keeps the gradients' norms."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    def log(self, record: dict[str, Any]) -> None:
        if record["split"] == "train":
            self.norms.append(record["grad_norm"])


def test_the_logged_rate_is_the_unscaled_one(in_tmp: Path) -> None:
    words = (*SMALL, "steps=4", "schedule=constant", "optimizer.lr=0.01")
    assert train(*words, 'optimizer.groups=[{match: "*", lr_scale: 3}]', "run.dir=a") == 0
    (line,) = [line for line in records(Path("a")) if line["split"] == "train"]
    assert math.isclose(line["lr"], 0.01)
