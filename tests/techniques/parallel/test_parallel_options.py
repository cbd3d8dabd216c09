"""Options of DDP: the same bits, a bounded drift, BatchNorm over all ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_trees import Tree, refused
from running import build_run, same_bits, weights
from strategy_cases import SYNCED
from torch import nn
from toys import DoubleNormed, Lines

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError
from ptfast.techniques.parallel.sync_batchnorm import RunningStatistics, apply_sync_batchnorm
from ptfast.training.fit import fit

DDP: Tree = {"strategy": "ddp", "nproc": 2}


@pytest.mark.parametrize("switch", ["copied", "buckets", "unused"])
def test_how_gradients_are_sent_changes_no_bit(two_ranks: dict[str, Any], switch: str) -> None:
    assert same_bits(two_ranks[switch], two_ranks["ddp"])


@pytest.mark.parametrize(("compression", "drift"), [("bf16", 1e-2), ("fp16", 1e-3)])
def test_compressed_gradients_drift_a_little(
    two_ranks: dict[str, Any], compression: str, drift: float
) -> None:
    plain, compressed = two_ranks["ddp"]["losses"], two_ranks[compression]["losses"]
    assert compressed != plain
    assert compressed == pytest.approx(plain, rel=drift)


def test_parameters_without_a_gradient_are_named(two_ranks: dict[str, Any]) -> None:
    for case, step in (("always", 0), ("later", 4)):
        said = two_ranks[case]
        # Nothing is trained on gradients that were not averaged.
        assert said.startswith(f"C011 after step {step}: parallel.unused_parameters=false:")
        assert "does not depend on unused.weight, unused.bias" in said
        assert "Set parallel.unused_parameters=true" in said
    assert "unused.weight, unused.bias, which fsdp" in two_ranks["unused fsdp"]
    assert two_ranks["switched"] == "nothing was refused"


def test_a_batch_norm_over_ranks_is_that_of_one_process(two_ranks: dict[str, Any]) -> None:
    """Outputs, gradients of inputs and parameters, running statistics; one share is empty."""
    assert max(two_ranks["layers"]) < 1e-13


def test_batch_norms_over_ranks_train_as_in_one_process(two_ranks: dict[str, Any], tmp_path: Path) -> None:
    run = build_run(tmp_path, *SYNCED)
    run.logger = Lines()
    fit(run)
    assert two_ranks["synced"]["losses"] == pytest.approx([line["loss"] for line in run.logger], rel=1e-9)
    for name, value in weights(tmp_path).items():
        torch.testing.assert_close(two_ranks["synced"]["weights"][name], value, rtol=1e-9, atol=1e-9)


def test_batch_norms_over_ranks_are_computed_again_as_they_were(two_ranks: dict[str, Any]) -> None:
    """With activation checkpointing, running statistics are not updated twice."""
    assert same_bits(two_ranks["checkpointed ddp"], two_ranks["resnet synced"])


def test_batch_norms_keep_their_names_and_tensors() -> None:
    model = DoubleNormed()
    before, tensors = list(model.state_dict()), {id(t) for t in model.state_dict(keep_vars=True).values()}
    assert apply_sync_batchnorm(model) == 2
    assert list(model.state_dict()) == before
    assert {id(t) for t in model.state_dict(keep_vars=True).values()} == tensors
    # In evaluation each rank computes by itself.
    inputs = torch.randn(3, 4)
    assert same_bits(model.eval()(inputs), DoubleNormed.forward(model, inputs))


def test_a_stand_in_does_not_count_over_ranks() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    apply_sync_batchnorm(model)
    statistics = RunningStatistics(model, Ranks())
    with statistics.untouched():
        assert not model[0].counts
    assert model[0].counts


def test_a_model_without_batch_norm_has_none_to_sync() -> None:
    with pytest.raises(ConfigError, match="Linear has no BatchNorm") as caught:
        apply_sync_batchnorm(nn.Linear(2, 2))
    assert (caught.value.code, caught.value.key) == ("C011", "parallel.sync_batchnorm")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"parallel__sync_batchnorm": True}, "parallel.sync_batchnorm"),
        ({"parallel__compression": "bf16"}, "parallel.compression"),
        ({"parallel__unused_parameters": True}, "parallel.unused_parameters"),
        ({"parallel": {**DDP, "strategy": "fsdp", "compression": "bf16"}}, "parallel.compression"),
    ],
)
def test_switches_that_contradict_each_other(changes: Tree, key: str) -> None:
    error = refused(**changes, device="cpu")
    assert (error.code, error.key) == ("C011", key)


def test_batch_norm_over_the_one_rank_that_there_is(tmp_path: Path) -> None:
    words = ("model=resnet_digits", "parallel=ddp", "parallel.nproc=1", "parallel.sync_batchnorm=true")
    with pytest.raises(ConfigError, match="no other ranks") as caught:
        build_run(tmp_path, *words)
    assert (caught.value.code, caught.value.key) == ("C011", "parallel.sync_batchnorm")
