"""Claims of the techniques' sources: what is compared, on what data, and what comes of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from torch.nn.functional import cross_entropy

from ptfast.config.catalogue import ThisMachine
from ptfast.config.overrides import merge
from ptfast.config.read import read_config
from ptfast.models.resnet_cifar import ResNetCifar

sys.path.append(str(ROOT / "scripts"))

import bench_claims
from bench_claims import CLAIMS, Claim, ZeroedResNet, judge, make_data

TRIED = [claim for claim in CLAIMS if not claim.takes and not any(map(ThisMachine().lacks, claim.needs))]


@pytest.mark.parametrize("claim", TRIED, ids=lambda claim: f"{claim.technique} {claim.says}")
def test_both_runs_of_a_claim_can_be_composed(claim: Claim) -> None:
    workload = [word.replace("{", "").replace("}", "") for word in claim.workload]
    for own in (claim.without, claim.with_it):
        read_config(merge(workload, own.split()))


def test_a_finding_needs_the_whole_interval() -> None:
    claim = Claim("checkpointing", "1.5 to 5.5", "a post", least=1.5, most=5.5)
    assert judge(claim, 1.6, 2.0) == "confirmed"
    assert judge(claim, 1.0, 1.4) == "refuted"
    assert judge(claim, 5.6, 6.0) == "refuted"
    assert judge(claim, 1.4, 1.6) == "cannot tell"


def test_data_is_made_for_the_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_IMAGES", "NUM_FILES", "NUM_TEXTS"):
        monkeypatch.setattr(bench_claims, name, 20)
    paths = make_data(tmp_path)
    lengths = [len(line) for line in paths["texts"].read_text().splitlines()]
    assert len(lengths) == 20
    assert min(lengths) < max(lengths) <= 256
    with np.load(paths["images"]) as arrays:
        assert arrays["train_x"].shape == (20, 32, 32, 3)
    with Image.open(next(paths["files"].rglob("*.jpg"))) as image:
        assert image.size == (256, 256)


def test_zeroed_gradients_are_those_of_none() -> None:
    torch.manual_seed(0)
    zeroed, plain = ZeroedResNet(3, depth=8, width=4), ResNetCifar(3, depth=8, width=4)
    plain.load_state_dict(zeroed.state_dict())
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    for _ in range(2):
        for model in (zeroed, plain):
            for parameter in model.parameters():
                parameter.grad = None
            cross_entropy(model(images), labels).backward()
        pairs = zip(zeroed.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)
    kept = [parameter.grad for parameter in zeroed.parameters()]
    cross_entropy(zeroed(images), labels).backward()
    assert all(mine.grad is one for mine, one in zip(zeroed.parameters(), kept, strict=True))
