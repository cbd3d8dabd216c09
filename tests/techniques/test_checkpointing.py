"""Activation checkpointing: the gradients and buffers of a model without it, from fewer saved tensors."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import CASES, MODES, assert_same, gpt, pair, resnet, saved_bytes, step
from config_trees import check, refused
from running import build_run, same_bits, train, weights
from torch import Tensor, nn

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError
from ptfast.models.mlp import Mlp
from ptfast.techniques.checkpointing import Checkpointing, panel
from ptfast.techniques.checkpointing.activation_checkpointing import (
    KEPT_OPS,
    CheckpointedForward,
    Policy,
    apply_checkpointing,
    choose,
    naming_mismatch,
)
from ptfast.techniques.parallel.sync_batchnorm import RunningStatistics


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_buffers_are_the_same_bits(mode: str, case: str) -> None:
    make, draw = CASES[case]
    plain, other = pair(make, mode)
    for seed in (1, 2, 3):
        inputs = draw()
        assert torch.equal(step(plain, inputs, seed), step(other, inputs, seed))
    assert_same(plain, other)


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_attention_that_drops_out_draws_its_numbers_again(name: str) -> None:
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    before = (None,) * [each.name for each in op._schema.arguments].index("dropout_p")
    choice = partial(choose, KEPT_OPS, None)
    assert choice(op, *before, 0.2) == choice(op, dropout_p=0.2) == Policy.PREFER_RECOMPUTE
    assert choice(op, *before, 0.0) == choice(op) == Policy.MUST_SAVE
    assert choice(torch.ops.aten.mm.default) == Policy.MUST_SAVE
    assert choice(torch.ops.aten.relu.default) == Policy.PREFER_RECOMPUTE


@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(mode: str) -> None:
    make, draw = CASES["batch norm"]
    plain, other = pair(make, mode)
    inputs = draw()
    for model in (plain, other):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().square().sum()
        loss.backward()
    assert_same(plain, other)


@pytest.mark.parametrize("case", CASES)
def test_fewer_bytes_are_saved(case: str) -> None:
    make, draw = CASES[case]
    inputs, counts = draw(), {}
    for mode in ("none", "every_n", "selective", "full"):
        _, model = pair(make, mode)
        with saved_bytes() as found:
            model(inputs)
        counts[mode] = found[0]
    assert counts["full"] < counts["every_n"] < counts["none"]
    if hasattr(torch.utils.checkpoint, "torch_remat") or case != "odd":
        assert counts["full"] <= counts["selective"] < counts["none"]


def test_a_block_is_computed_twice_in_training_and_once_in_evaluation() -> None:
    _, model = pair(gpt, "full")
    tokens, calls = torch.randint(11, (2, 12)), []
    model.blocks[1].feed_in.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    step(model, tokens)
    assert calls == [True, True]
    model.eval()
    with torch.inference_mode():
        model(tokens)
    with torch.no_grad():
        model(tokens)
    assert calls[2:] == [False, False]


def test_names_stay_and_a_copy_has_its_own_layers() -> None:
    plain, other = pair(gpt, "selective")
    assert [*plain.state_dict()] == [*other.state_dict()]
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in other.named_modules()]
    other.load_state_dict(plain.state_dict())
    twin = copy.deepcopy(other)
    step(twin, torch.randint(11, (2, 12)))
    assert all(p.grad is None for p in other.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_which_blocks() -> None:
    assert list(apply_checkpointing(resnet(), Checkpointing(mode="every_n", every=4))) == [
        "blocks.0",
        "blocks.4",
    ]
    model = gpt()
    found = apply_checkpointing(model, Checkpointing(mode="full", blocks="blocks"))
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(isinstance(block.forward, CheckpointedForward) for block in model.blocks)
    chosen = apply_checkpointing(gpt(), Checkpointing(mode="full", blocks=["blocks.1", "head"]))
    assert list(chosen) == ["blocks.1", "head"]
    assert (
        apply_checkpointing(gpt(), Checkpointing(mode="none"))
        == apply_checkpointing(gpt(), Checkpointing(mode="budget"))
        == {}
    )


def test_what_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpointing\.blocks=bloks\.\*: .*Did you mean blocks"):
        apply_checkpointing(gpt(), Checkpointing(mode="full", blocks="bloks.*"))
    with pytest.raises(ConfigError, match="Mlp has no repeated blocks") as caught:
        apply_checkpointing(Mlp((4,), 2), Checkpointing(mode="full"))
    assert caught.value.code == "C011"


class NormOfItsOwn(nn.BatchNorm1d):
    """A norm that nothing is known of but that it has buffers, as those of timm."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_a_norm_that_stands_still_at_first_writes_once_later() -> None:
    def trained(mode: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), NormOfItsOwn(4)) for _ in range(3)))
        apply_checkpointing(model, Checkpointing(mode=mode))
        norms = [module for module in model.modules() if isinstance(module, NormOfItsOwn)]
        for writes in (False, True, True):
            for norm in norms:
                norm.training = writes
            model(torch.randn(8, 4)).square().sum().backward()
        return model.state_dict()

    assert same_bits(trained("full"), trained("none"))


def test_an_empty_share_leaves_the_statistics_alone() -> None:
    """The loop's stand-in sample counts for nothing, in the recomputation neither."""
    make, draw = CASES["batch norm"]
    for mode in ("none", *MODES):
        _, model = pair(make, mode)
        before = copy.deepcopy(model.state_dict())
        with RunningStatistics(model, Ranks()).untouched():
            step(model, draw())
        assert same_bits(before, model.state_dict())
        step(model, draw())
        assert model.norm.num_batches_tracked == model.blocks[0].norm1.num_batches_tracked == 1


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_under_ddp(static_graph: bool, tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for make, draw in (CASES["batch norm"], CASES["dropout"]):
            for mode in MODES:
                plain, other = pair(make, mode)
                first, second = draw(), draw()
                ddp = nn.parallel.DistributedDataParallel(other, static_graph=static_graph)
                for inputs in (first, second):
                    step(plain, inputs)
                with contextlib.nullcontext() if static_graph else ddp.no_sync():
                    step(ddp, first)
                step(ddp, second)
                assert_same(plain, other)
    finally:
        torch.distributed.destroy_process_group()


class InPlace(nn.Module):
    def __init__(self, act: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.act(x) if self.act is not None else x.mul_(2).sin()


def test_a_kept_result_is_not_overwritten() -> None:
    plain, other = pair(
        lambda: nn.Sequential(*(InPlace(nn.ReLU(inplace=True)) for _ in range(2))), "selective"
    )
    inputs = torch.randn(3, 4)
    for model in (plain, other):
        step(model, inputs)
    assert_same(plain, other)
    _, model = pair(lambda: nn.Sequential(InPlace(None), InPlace(None)), "selective")
    with pytest.raises(ConfigError, match=r"checkpointing=selective: .* Use checkpointing=full"):
        step(model, inputs)


def test_a_run_trains_and_resumes_to_the_same_bits(in_tmp: Path) -> None:
    words = (
        *("model=resnet_digits", "model.width=4", "model.depth=14", "steps=4", "saving.every=2steps"),
        *("saving.keep=3", "batch_size=16", "micro_batches=2", "dataloader.drop_last=true"),
    )
    assert train(*words, "run.dir=plain") == 0
    assert train(*words, "checkpointing=every_n", "run.dir=whole") == 0
    goes_on = ("run.dir=resumed", "run.resume=whole/saved/step-2")
    assert train(*words, "checkpointing=every_n", *goes_on) == 0
    assert same_bits(weights(Path("plain")), weights(Path("whole")))
    assert same_bits(weights(Path("whole")), weights(Path("resumed")))


def test_what_was_found_is_written_and_shown(tmp_path: Path) -> None:
    words = ("model=resnet_digits", "model.depth=14", "checkpointing=every_n")
    run = build_run(tmp_path, *words)
    assert run.choices.get("checkpointed") == ["blocks.0", "blocks.2", "blocks.4"]
    again = build_run(tmp_path, *words)
    assert again.choices.get("checkpointed") == ["blocks.0", "blocks.2", "blocks.4"]
    config = check(checkpointing={"mode": "every_n", "every": 2}).checkpointing
    row = panel(config, run.choices)["checkpointing"]
    assert row == "all in 3 blocks recomputed (blocks.0 to blocks.4, 1 in 2)"
    off = check(checkpointing={"mode": "none"}).checkpointing
    assert panel(off, run.choices)["checkpointing"] is None


@pytest.mark.parametrize(
    ("checkpointing", "code", "key"),
    [
        ({"mode": "budget", "memory_budget": 0.5}, "C011", "checkpointing"),
        ({"mode": "every_n"}, "C016", "checkpointing.every"),
        ({"mode": "budget", "memory_budget": 1.5}, "C005", "checkpointing.memory_budget"),
        ({"mode": "every_n", "every": 0}, "C005", "checkpointing.every"),
    ],
)
def test_contradictions(checkpointing: dict[str, Any], code: str, key: str) -> None:
    error = refused(checkpointing=checkpointing)
    assert (error.code, error.key) == (code, key)


def test_a_recipe_s_keys_of_another_mode_are_left_alone() -> None:
    check(lambda key: "mine.yaml:3", checkpointing={"mode": "none", "blocks": ["layers.*"], "every": 3})


class Changing(nn.Module):
    """Keeps one tensor more for backward in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).exp() if self.calls % 2 else self.linear(x)


def test_a_block_that_computes_something_else_the_second_time() -> None:
    model = nn.Sequential(*(Changing() for _ in range(3)))
    apply_checkpointing(model, Checkpointing(mode="full", blocks="*"))
    with pytest.raises(ConfigError, match="when recomputed") as caught, naming_mismatch("full"):
        model(torch.randn(2, 4)).sum().backward()
    assert caught.value.code == "C011"
