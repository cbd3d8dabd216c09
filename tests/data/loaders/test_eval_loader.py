"""Evaluation loaders: who reads the samples, the same batches whoever does, and nothing left running."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaders import eval_loader
from running import build_run, same_bits, train
from torch.utils.data import Dataset, TensorDataset

from ptfast.core.durations import Duration
from ptfast.data.build_data import build_data


class Read(Dataset[Any]):
    """Vectors that are read one by one."""

    num_classes = 2

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index % 2


def loader(dataset: Any, **given: Any) -> Any:
    data = build_data(dataset, val=Duration(30, "samples"), seed=0, task="auto")
    assert data.val is not None
    return eval_loader(data.val, data.info, batch_size=8, **{"normalize": False, **given})


def test_workers_read_the_same_batches() -> None:
    plain, workers = loader(Read()), loader(Read(), kind="workers", workers=2, prefetch=1)
    for _ in range(2):
        assert same_bits([b.data for b in workers], [b.data for b in plain])
    workers.close()


@pytest.mark.parametrize(
    ("dataset", "kind", "read_by"),
    [
        (Read(), "auto", 2),
        (Read(), "workers", 2),
        (Read(), "plain", 0),
        (TensorDataset(torch.randn(60, 3), torch.arange(60) % 2), "auto", 0),
    ],
    ids=["auto", "workers", "plain", "in memory"],
)
def test_workers_are_for_what_is_not_in_memory(dataset: Any, kind: str, read_by: int) -> None:
    built = loader(dataset, kind=kind, workers=2)
    assert built.batches.workers == read_by


def test_an_evaluation_that_is_broken_off_leaves_no_process() -> None:
    built = loader(Read(), kind="workers", workers=1, prefetch=1)
    batches = iter(built)
    next(batches)
    (process,) = built.batches.pools[0]._iterator._workers
    assert process.is_alive()
    built.close()
    process.join(timeout=20)
    assert not process.is_alive()


WORDS = ("data=custom", "data._target_=test_eval_loader.Read", "model.hidden=[4]", "steps=2")


def test_a_run_evaluates_with_the_loader_that_it_trains_with(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build_run(in_tmp / "a", *WORDS, "dataloader=workers", "dataloader.workers=2", "batch_size=16")
    (val,) = run.eval_loaders.values()
    assert val.batches.workers == 2  # pyright: ignore[reportAttributeAccessIssue]
    val.close()
    run.train_loader.close()
    words = (*WORDS, "run.dir=b", "dataloader=workers", "dataloader.workers=1", "batch_size=16")
    assert train(*words) == 0
    assert "workers (1 process, as the config says)" in capsys.readouterr().out


def test_the_panel_says_why_a_loader_was_chosen(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("steps=2", "model.hidden=[4]", "run.dir=a") == 0
    assert "dataloader.kind=memory because the data is in memory" in capsys.readouterr().out
