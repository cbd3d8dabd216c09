"""Python's garbage collector, which waits for the end of a segment of steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, same_bits, train, weights

from ptfast.training.fit import fit

PLAIN = ("data=custom", "data._target_=test_garbage_collection.Rows", "data.val=5samples", "batch_size=25")
PLAIN = (*PLAIN, "data.normalize=false", "model=mlp", "model.hidden=[4]", "steps=6", "eval.every=2steps")
THEIRS = (*PLAIN, "dataloader.kind=plain")
OURS = ("data=digits", "model=mlp", "model.hidden=[4]", "steps=2")


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What earlier tests have frozen stays so, and does not count: collections pass over it."""
    frozen = list[Any]()
    freeze = gc.freeze
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(freeze()))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(frozen))
    yield
    assert gc.isenabled()


class Rows(torch.utils.data.Dataset[Any]):
    """Samples that are made as they are asked for."""

    classes = ("even", "odd")

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3,), float(index)), index % 2


class Seen:
    """Whether the collector is on, and whether objects are frozen, after each step and at its evaluations."""

    def __init__(self, fails_at: int = 0) -> None:
        self.steps, self.looks = list[tuple[bool, bool]](), list[bool]()
        self.fails_at = fails_at

    def on_step(self, run: Any, step: int) -> None:
        self.steps.append((gc.isenabled(), gc.get_freeze_count() > 0))
        if step == self.fails_at:
            raise RuntimeError("on purpose")

    def on_evaluation(self, run: Any, step: int, split: str, metrics: Any) -> None:
        self.looks.append(gc.isenabled())


def seen(folder: Path, *words: str, fails_at: int = 0) -> Seen:
    run = build_run(folder, *THEIRS, *words)
    run.callbacks.append(found := Seen(fails_at))
    fit(run)
    return found


def test_nothing_is_collected_in_steps_after_the_warm_up(tmp_path: Path) -> None:
    found = seen(tmp_path, "backend.gc=true")
    assert found.steps == [(True, False)] + [(False, True)] * 5
    assert found.looks == [True] * 3
    assert gc.get_freeze_count() == 0


def test_garbage_of_the_steps_is_collected_after_them(tmp_path: Path) -> None:
    collections = list[int]()
    run = build_run(tmp_path, *THEIRS, "backend.gc=true")

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collections.append(run.progress.step)

    gc.callbacks.append(note)
    try:
        fit(run)
    finally:
        gc.callbacks.remove(note)
    assert len(collections) >= 2
    assert set(collections) <= {1, 2, 4, 6}


def test_the_collector_is_as_before_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        seen(tmp_path, "backend.gc=true", fails_at=4)
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_a_collector_that_is_off_and_frozen_objects_stay_as_they_are(tmp_path: Path) -> None:
    gc.disable()
    try:
        assert seen(tmp_path / "off", "backend.gc=true").steps == [(False, False)] * 6
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.freeze()

    assert seen(tmp_path / "frozen", "backend.gc=true").steps[-1] == (False, True)
    assert gc.get_freeze_count()


def test_the_bits_are_the_same(in_tmp: Path) -> None:
    for gc_word in ("true", "false"):
        assert train(*THEIRS, f"backend.gc={gc_word}", f"run.dir=gc_{gc_word}") == 0
    assert same_bits(weights(Path("gc_true")), weights(Path("gc_false")))


@pytest.mark.parametrize(
    ("words", "waits"),
    [
        (THEIRS, True),
        ((*PLAIN, "dataloader.kind=workers", "dataloader.workers=1"), False),
        ((*THEIRS, "backend.gc=false"), False),
        (OURS, False),
        ((*OURS, "backend.gc=true"), True),
    ],
)
def test_auto_goes_by_whose_code_reads_samples_in_this_process(
    tmp_path: Path, words: tuple[str, ...], waits: bool
) -> None:
    run = build_run(tmp_path, *words)
    run.close()
    assert run.choices.get("backend.gc") is waits
