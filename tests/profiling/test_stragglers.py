"""A rank that the others wait for is named, with what it does in that time; one that keeps up is not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import PLAIN
from strategy_cases import Cases
from torch.utils.data import Dataset
from toys import blobs

from ptfast.core.clock import STEP, Clock
from ptfast.core.distributed import Ranks
from ptfast.core.plain_display import Display
from ptfast.profiling import stragglers
from ptfast.profiling.stragglers import Stragglers
from ptfast.run import Run
from ptfast.training.fit import fit

WORDS = (*PLAIN, "data=custom", "data.val=0", "dataloader=plain", "model._target_=toys.DoubleMlp")
WORDS = (*WORDS, "batch_size=8", "steps=30", "log_every=5steps", "eval.every=100steps")


class SlowBlobs(Dataset[Any]):
    """Its samples take 5 ms each on the ranks from `rank` on."""

    num_classes = 2

    def __init__(self, rank: int) -> None:
        self.inner, self.rank = blobs(80), rank

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        if torch.distributed.get_rank() >= self.rank:
            time.sleep(0.005)
        return self.inner[index]


class Told(Display):
    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def cases(ranks: Ranks) -> dict[str, Any]:
    """Runs on two ranks with slow data on the second, or on both."""
    found: dict[str, Any] = {}
    for name, rank in (("one", 1), ("both", 0)):
        data = ("data._target_=test_stragglers.SlowBlobs", f"data.rank={rank}")
        run = Cases(ranks).build(f"slow-{name}", *WORDS, *data)
        run.display = told = Told()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stragglers, "LEAST_S", 0.2)
            fit(run)
        slow = [(number, each["cause"], each["slower"]) for number, each in run.slow_ranks.items()]
        found[name] = {"warnings": told.warnings, "slow": slow}
    return found


def test_two_ranks(two_ranks: dict[str, Any]) -> None:
    found = two_ranks["test_stragglers"]
    ((rank, cause, slower),) = found["one"]["slow"]
    assert (rank, cause) == (1, "data")
    assert slower > 1
    (said,) = found["one"]["warnings"]
    assert said.startswith("rank 1 is slower than the others, mainly in data: steps take ")
    assert found["both"] == {"warnings": [], "slow": []}


@pytest.mark.parametrize(
    ("own", "slow"),
    [
        ({"forward": 1.2}, {}),
        ({"forward": 1.9, "optimizer": 0.7}, {2: "forward"}),
        ({"callbacks": 0.9}, {2: "callbacks"}),
    ],
)
def test_the_cause_is_what_takes_the_rank_longer(own: dict[str, float], slow: dict[int, str]) -> None:
    clock, usual = Clock(), {"data": 0.2, "forward": 1.0, "backward": 1.0, "optimizer": 0.3}
    run = Run(folder=Path(), device=torch.device("cpu"), ranks=Ranks(0, 0, 3, 3), clock=clock, display=Told())
    judge = Stragglers(run)
    clock.seconds.update(usual)
    mine = judge.own()
    assert dict(zip(STEP, mine, strict=True)) == {**dict.fromkeys(STEP, 0.0), **usual}
    assert judge.own() == [0.0] * len(STEP)
    extra_s = sum(own.values()) - sum(usual.get(cause, 0.0) for cause in own)
    waiting = [
        seconds + extra_s * (cause == "gradient_sync") for cause, seconds in zip(STEP, mine, strict=True)
    ]
    for _ in range(2):
        judge.receive([*waiting, *waiting, *[(usual | own).get(cause, 0.0) for cause in STEP]])
    assert {rank: each["cause"] for rank, each in run.slow_ranks.items()} == slow
    run.ranks = Ranks(grouped=True)
    Stragglers(run).receive(mine * 9)  # it waits for no other rank
    assert len(run.display.warnings) == len(slow)  # pyright: ignore[reportAttributeAccessIssue]
