"""Groups that train for a part of the run: frozen parameters that nothing moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, records, same_bits, summary, train, training_state, weights
from test_groups import SMALL

from ptfast.config.checks.validate import validate
from ptfast.config.compose import compose
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import Callback
from ptfast.optim.parameter_groups import keep_frozen_statistics
from ptfast.training.fit import fit


class Notes(Callback):
    """Notes after every step the weights and what takes a gradient."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.trained: list[set[str]] = []

    def on_step(self, run: Any, step: int) -> None:
        named = dict(run.model.named_parameters())
        self.weights.append({name: p.detach().clone() for name, p in named.items()})
        self.trained.append({name for name, p in named.items() if p.requires_grad})


@pytest.mark.parametrize("optimizer", ["sgd_cifar", "adamw", "lamb", "muon", "novograd", "adafactor"])
def test_frozen_parameters_stand_still_and_thaw(in_tmp: Path, optimizer: str) -> None:
    groups = (
        '[{match: "layers.1.*", trains_from: 3steps}, {match: "layers.3.*", trains_until: 5steps},'
        ' {match: "layers.5.bias", trains_until: 0}]'
    )
    words = (*SMALL, "steps=8", f"optimizer={optimizer}", "ema.decay=0.5", "gradients.clip_norm=1")
    run = build_run(in_tmp / "a", *words, f"optimizer.groups={groups}", "optimizer.weight_decay=0.1")
    notes = Notes()
    run.callbacks.append(notes)
    start = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    assert fit(run) == "finished"
    moved = [
        {name for name in start if not torch.equal(after[name], before[name])}
        for before, after in zip([start, *notes.weights], notes.weights, strict=False)
    ]
    first, middle, last = {"layers.1.weight", "layers.1.bias"}, {"layers.3.weight", "layers.3.bias"}, set()
    last = {"layers.5.weight"}
    assert moved == notes.trained == [middle | last] * 3 + [first | middle | last] * 2 + [first | last] * 3
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert id(run.model.get_parameter("layers.5.bias")) not in held


def test_batch_norm_of_a_frozen_layer_goes_on_measuring(in_tmp: Path) -> None:
    words = ("model=resnet_digits", "steps=1", "batch_size=32", "log_every=1")
    run = build_run(in_tmp / "a", *words, 'optimizer.groups=[{match: "norm.*", trains_until: 0}]')
    norm = run.model.get_submodule("norm")
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    fit(run)
    same = {name for name, value in norm.state_dict().items() if torch.equal(value, before[name])}
    assert same == {"weight", "bias"}


class Statistics(Callback):
    """Notes after every step the running means of each BatchNorm, and those in evaluation mode."""

    def __init__(self) -> None:
        self.means: list[dict[str, torch.Tensor]] = []
        self.kept: list[set[str]] = []

    def on_step(self, run: Any, step: int) -> None:
        norms = {name: m for name, m in run.model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
        self.means.append({name: norm.running_mean.clone() for name, norm in norms.items()})
        self.kept.append({name for name, norm in norms.items() if not norm.training})


@pytest.mark.parametrize("keeps", ["true", "false"])
def test_frozen_layers_keep_their_statistics_if_asked(in_tmp: Path, keeps: str) -> None:
    words = ("model=resnet_digits", "model.width=4", "steps=4", "batch_size=64", "gradients.accumulate=2")
    words = (*words, "optimizer.freeze_backbone=2steps", "eval.every=1steps")
    run = build_run(in_tmp / "a", *words, f"optimizer.freeze_backbone_stats={keeps}")
    run.callbacks.append(notes := Statistics())
    before = {name: run.model.get_submodule(name).running_mean.clone() for name in _norms(run.model)}
    assert fit(run) == "finished"
    frozen = set(before) if keeps == "true" else set()
    assert [len(kept) for kept in notes.kept] == [len(frozen)] * 2 + [0, 0]
    for name, mean in before.items():
        assert torch.equal(mean, notes.means[1][name]) is (keeps == "true")
        assert not torch.equal(notes.means[1][name], notes.means[3][name])


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_of_frozen_layers_without_a_frozen_layer_are_warned_of(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], frozen: bool
) -> None:
    group = ('optimizer.groups=[{match: "layers.1.*", trains_until: 0}]',) if frozen else ()
    assert train(*SMALL, "steps=1", "optimizer.freeze_backbone_stats=true", *group, "run.dir=a") == 0
    assert ("changes nothing, because no layer is frozen" in "".join(capsys.readouterr())) is not frozen


def _norms(model: torch.nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]


def test_a_norm_without_parameters_belongs_to_the_layers_around_it() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2, affine=False))
    model = torch.nn.Sequential(block, torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 2))
    block.requires_grad_(False)
    keep_frozen_statistics(model)
    assert (block[1].training, model[1].training, block[0].training) == (False, True, True)


def test_kept_statistics_are_resumed_across_the_unfreeze(in_tmp: Path) -> None:
    words = ("model=resnet_digits", "model.width=4", "steps=5", "batch_size=64", "saving.every=1steps")
    words = (
        *words,
        "saving.keep=9",
        "optimizer.freeze_backbone=3steps",
        "optimizer.freeze_backbone_stats=true",
    )
    assert train(*words, "run.dir=whole") == 0
    for step in (2, 3):
        assert train(*words, f"run.resume=whole/saved/step-{step}", f"run.dir=from{step}") == 0
        assert same_bits(weights(Path(f"from{step}")), weights(Path("whole")))


def test_the_former_name_of_a_key_is_answered_with_the_new_one(in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=r"renamed: use optimizer\.freeze_backbone") as caught:
        build_run(in_tmp / "a", *SMALL, "optimizer.backbone_from=2steps")
    assert (caught.value.code, caught.value.key) == ("C002", "optimizer.backbone_from")
    # The configs of earlier runs name it.
    assert validate(
        {**compose().tree, "optimizer": {**compose().tree["optimizer"], "backbone_from": None}}, str
    )


def test_backward_ends_where_the_front_is_frozen(in_tmp: Path) -> None:
    groups = '[{match: "layers.[13].*", trains_until: 0}]'
    run = build_run(in_tmp / "a", *SMALL, "steps=1", f"optimizer.groups={groups}")
    outputs = run.forward(torch.zeros(2, 1, 8, 8))
    # Of the whole graph, only the last layer's own node is left.
    nodes, seen = [outputs.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    assert sum(type(node).__name__ == "AddmmBackward0" for node in seen) == 1


def test_a_run_resumed_across_an_unfreeze_ends_with_the_same_bits(in_tmp: Path) -> None:
    groups = '[{match: "layers.1.*", trains_from: 6steps}, {match: "*.bias", trains_until: 10steps}]'
    rhythm = ("model.hidden=[16,8]", "model.dropout=0.2", "batch_size=128", "steps=13", "log_every=4")
    words = (*rhythm, "saving.every=1steps", "saving.keep=20", f"optimizer.groups={groups}", "ema.decay=0.5")
    words = (*words, "gradients.log_norm=true", "optimizer=sgd_cifar")
    assert train(*words, "run.dir=whole") == 0
    for step in (5, 6, 10):
        state = f"run.resume=whole/saved/step-{step}"
        assert train(*words, state, f"run.dir=from{step}") == 0
        folder = Path(f"from{step}")
        assert same_bits(weights(folder), weights(Path("whole")))
        assert same_bits(training_state(folder), training_state(Path("whole")))
    assert summary(Path("whole"))["steps"] == 13
    assert all("grad_norm" in line for line in records(Path("whole")) if line["split"] == "train")


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ('[{match: "*", trains_from: 3steps}]', "no parameter trains at step 0"),
        ('[{match: "*.bias", trains_from: 3steps, trains_until: 2steps}]', "is no step of"),
        ('[{match: "*.bias", trains_from: 30steps}]', "is no step of"),
        ('[{match: "*", trains_until: 0}]', "every parameter is frozen"),
    ],
)
def test_windows_that_train_nothing(in_tmp: Path, groups: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        build_run(in_tmp / "a", *SMALL, "steps=8", f"optimizer.groups={groups}")
    assert (caught.value.code, caught.value.key) == ("C011", "optimizer.groups")


def test_all_below_the_last_layer_waits(in_tmp: Path) -> None:
    by_name = '[{match: "layers.1.*", trains_from: 2steps}, {match: "layers.3.*", trains_from: 2steps}]'
    runs = [
        build_run(in_tmp / key, *SMALL, "steps=4", f"optimizer.{key}={value}")
        for key, value in (("freeze_backbone", "50%"), ("groups", by_name))
    ]
    notes = Notes()
    runs[0].callbacks.append(notes)
    assert [fit(run) for run in runs] == ["finished", "finished"]
    assert notes.trained == [{"layers.5.weight", "layers.5.bias"}] * 2 + [{*notes.weights[0]}] * 2
    assert same_bits(*(run.model.state_dict() for run in runs))
    with pytest.raises(ConfigError, match="is no step of 4") as caught:
        build_run(in_tmp / "late", *SMALL, "steps=4", "optimizer.freeze_backbone=9steps")
    assert caught.value.key == "optimizer.freeze_backbone"
