"""States written while training goes on: the bits of their step, in order, and whole or not at all."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import assert_same_run, train_in_child
from running import build_run, same_bits, summary, train
from torch import nn
from toys import Lines

from ptfast.core.protocols import Callback
from ptfast.core.tensors import async_host_copy, checkpoint_writer
from ptfast.core.tensors.checkpoint_files import read_checkpoint
from ptfast.core.tensors.checkpoint_folders import list_checkpoints, step_of
from ptfast.core.tensors.checkpoint_writer import HostCopies
from ptfast.training.fit import fit

NET = ("model.hidden=[128]", "batch_size=128", "optimizer=adamw", "ema.decay=0.9", "log_every=5")
RHYTHM = ("epochs=3", "saving.every=4steps", "eval.every=6steps", "saving.keep=9", "run.resume=auto")
WORDS = (*NET, *RHYTHM, "saving.background=true", "callbacks=[{_target_: test_background_saving.Steps}]")
"""39 steps, and states of 180 kB."""
BYTES_PER_S = 5e6


class Steps(Callback):
    """Counts steps, each of which takes a while."""

    taken = 0

    def on_step(self, run: Any, step: int) -> None:
        Steps.taken += 1
        time.sleep(0.004)


class SlowFile:
    """A file on a disk that takes `BYTES_PER_S`."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, content: Any) -> int:
        for start in range(0, len(content), 1 << 14):
            time.sleep(self.file.write(memoryview(content)[start : start + (1 << 14)]) / BYTES_PER_S)
        return len(content)

    def flush(self) -> None:
        self.file.flush()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the disk be slow; how many steps were taken while each file was written."""
    save = torch.save
    beside: list[int] = []

    def slowly(state: Any, file: Any) -> None:
        before = Steps.taken
        save(state, SlowFile(file))
        beside.append(Steps.taken - before)

    monkeypatch.setattr(torch, "save", slowly)
    return beside


def drafts() -> list[str]:
    return [path.name for path in Path("a/saved").glob(".*")]


def test_a_state_holds_its_step_however_long_it_is_written(in_tmp: Path, slow_disk: list[int]) -> None:
    assert train(*WORDS, "run.dir=a") == 0
    assert sum(taken >= 2 for taken in slow_disk) >= 4, "hardly anything was trained beside the writing"
    slow_disk.clear()
    assert train(*WORDS, "saving.background=false", "run.dir=b") == 0
    assert not any(slow_disk)
    states = list_checkpoints(Path("a/saved"))
    assert [step_of(folder) for folder in states] == [39, 36, 32, 28, 24, 20, 16, 12, 8]
    for folder in states:
        own, other = read_checkpoint(folder), read_checkpoint(Path("b/saved") / folder.name)
        assert same_bits([own.model, own.training], [other.model, other.training])
        assert own.facts["figures"].get("val") == other.facts["figures"].get("val")
        assert own.facts["progress"]["best_step"] == other.facts["progress"]["best_step"]
    for name in ("best", "last"):
        assert Path("a/saved", name).readlink() == Path("b/saved", name).readlink()
    saving = summary(Path("a"))["saving"]
    assert saving["in_background"] == saving["states"] - 1, "only the last is waited for"
    assert saving["writing_s"] > saving["states"] * 180e3 / BYTES_PER_S
    assert train(*WORDS, "run.dir=c", "run.resume=a/saved/step-20") == 0
    assert same_bits(*(read_checkpoint(Path(run, "saved/last")).training for run in "ac"))


@pytest.mark.parametrize(
    ("number", "says"), [(errno.ENOSPC, "error[E002]"), (errno.EIO, "error[E001]")], ids=["full", "dead"]
)
def test_an_error_of_the_writer_ends_the_run(
    number: int, says: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save, calls = torch.save, list[Any]()

    def fail(state: Any, file: Any) -> None:
        calls.append(file)
        time.sleep(0.02)
        if len(calls) > 4:
            raise OSError(number, os.strerror(number))
        save(state, file)

    monkeypatch.setattr(torch, "save", fail)
    assert train(*WORDS, "run.dir=a") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert "step-6 is intact" in line
    assert Path("a/saved/last").readlink() == Path("step-6")
    assert 8 < summary(Path("a"))["steps"] <= 12, "the run learns of it by the next save, and not at once"
    assert not drafts()
    monkeypatch.setattr(torch, "save", save)
    assert train(*WORDS, "run.dir=a") == 0
    assert train(*WORDS, "run.dir=b") == 0
    assert_same_run(Path("a"), Path("b"))


class Spoilt(Callback):
    """Makes a weight that no batch uses NaN after step 8."""

    def on_step(self, run: Any, step: int) -> None:
        if step == 8:
            run.model.spare.data[0] = float("nan")


class Spare(nn.Module):
    """A network with a weight that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)
        self.spare = nn.Parameter(torch.zeros(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs.flatten(1))


def test_weights_that_are_not_finite_are_never_published(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("model=custom", "model._target_=test_background_saving.Spare", *WORDS[1:-1])
    assert train(*model, "callbacks=[{_target_: test_background_saving.Spoilt}]", "run.dir=a") == 5
    assert "weights or buffers are not finite after step 8" in capsys.readouterr().err
    assert [step_of(folder) for folder in list_checkpoints(Path("a/saved"))] == [6, 4]


class Ended(Callback):
    """Ends the run by a signal while a state is written, noting the step."""

    def on_step(self, run: Any, step: int) -> None:
        if step > 8 and drafts() and not Path("ended").exists():
            Path("ended").write_text(str(step))
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_waits_for_the_state_under_way(in_tmp: Path, slow_disk: list[int]) -> None:
    words = (*WORDS, "callbacks=[{_target_: test_background_saving.Ended}]", "run.dir=a")
    assert train(*words) == 75
    step = int(Path("ended").read_text())
    assert [step_of(folder) for folder in list_checkpoints(Path("a/saved"))][:2] == [
        step,
        (step - 1) // 4 * 4,
    ]
    assert not drafts()
    assert train(*words) == 0
    assert train(*WORDS, "saving.background=false", "run.dir=b") == 0
    assert_same_run(Path("a"), Path("b"))


class Twice(Callback):
    """Two Ctrl-C while a state is written."""

    def on_step(self, run: Any, step: int) -> None:
        if drafts():
            Path("written").write_text(drafts()[0].split(".")[1])
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)


def test_a_second_signal_leaves_the_writer_in_peace(in_tmp: Path, slow_disk: list[int]) -> None:
    """An interpreter that ends while a thread is inside of torch aborts."""
    assert train(*WORDS, "callbacks=[{_target_: test_background_saving.Twice}]", "run.dir=a") == 130
    assert list_checkpoints(Path("a/saved"))[0].name == Path("written").read_text()
    assert not drafts()


def test_saving_goes_by_wall_time(in_tmp: Path) -> None:
    """39 steps of at least 4 ms."""
    assert train(*WORDS, "run.dir=a", "saving.every=0.02s", "eval.every=39steps", "saving.keep=99") == 0
    steps = [step_of(folder) for folder in list_checkpoints(Path("a/saved"))][::-1]
    assert 3 < len(steps) < 20
    assert steps[-1] == 39


OFTEN = ("saving.every=5steps", "eval.every=6steps")


class Told(Callback):
    """Notes where the run is when it is told of a state."""

    saved: list[tuple[int, int]]

    def __init__(self) -> None:
        self.saved = []

    def on_save(self, run: Any, step: int, folder: Path) -> None:
        assert (folder / "manifest.json").is_file()
        self.saved.append((step, run.progress.step))


@pytest.mark.parametrize("background", ["true", "auto"])
def test_a_callback_is_told_once_a_state_is_on_disk(
    background: str, tmp_path: Path, slow_disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default at its step."""
    monkeypatch.setattr(checkpoint_writer, "LEAST_BYTES", 0)
    run = build_run(tmp_path, *NET, "epochs=3", f"saving.background={background}", *OFTEN)
    told = Told()
    run.logger, run.callbacks = Lines(), [told, Steps()]
    fit(run)
    saved, now = zip(*told.saved, strict=True)
    assert list(saved) == sorted({*range(5, 40, 5), *(step for step in saved if step % 6 == 0), 39})
    assert (saved == now) == (background == "auto")
    assert all(later > step for step, later in told.saved[:-1]) == (background == "true")
    assert run.checkpointer.writer.report()["in_background"] == (len(saved) - 1) * (background == "true")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_the_writer_gives_way_until_training_waits_for_it(
    tmp_path: Path, slow_disk: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it would keep training waiting otherwise."""
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "setpriority", lambda which, who, value: set_to.append((who, value)))
    run = build_run(tmp_path, *WORDS[:-1])
    run.checkpointer.save(background=True)
    while not set_to:
        time.sleep(0.001)
    run.checkpointer.writer.finish()
    (thread, away), (waited_for, back) = set_to
    assert thread == waited_for != os.getpid()
    assert (away, back) == (
        os.getpriority(os.PRIO_PROCESS, 0) + checkpoint_writer.NICENESS,
        away - checkpoint_writer.NICENESS,
    )


def test_the_metrics_before_a_checkpoint_are_written_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(tmp_path, *NET, *RHYTHM)
    lines, seen = Lines(), list[tuple[int, int]]()
    queued, save = list[dict[str, Any]](), run.checkpointer.save
    monkeypatch.setattr(lines, "log", queued.append, raising=False)
    monkeypatch.setattr(lines, "flush", lambda: (lines.extend(queued), queued.clear()), raising=False)
    monkeypatch.setattr(
        run.checkpointer, "save", lambda **given: (seen.append((len(queued), len(lines))), save(**given))
    )
    run.logger = lines
    fit(run)
    assert len(seen) > 1
    assert {waiting for waiting, _ in seen} == {0}
    assert seen[-1][1] > seen[0][1]


def test_small_states_are_written_at_once(tmp_path: Path) -> None:
    run = build_run(tmp_path, *NET, *RHYTHM)
    run.logger = Lines()
    fit(run)
    assert run.checkpointer.writer.report()["in_background"] == 0


def test_copies_are_independent_and_reuse_their_memory() -> None:
    copies, shared = HostCopies(), torch.arange(12.0).view(3, 4)
    values = {
        "tied": [shared, shared[1:], shared.t()],
        "graph": torch.ones(2, requires_grad=True) * 3,
        "types": (torch.tensor(7), torch.empty(0), torch.ones(3, dtype=torch.bfloat16), 4, "five"),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    given = {"tied": [tensor.clone() for tensor in values["tied"]], "types": values["types"]}
    taken, wait = copies.take(values)
    wait()
    shared.zero_()
    assert same_bits(taken["tied"], given["tied"])
    assert same_bits(taken["types"], given["types"])
    assert [tensor.stride() for tensor in taken["tied"]] == [(4, 1), (4, 1), (1, 4)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in taken["tied"]}) == 1
    assert taken["graph"].tolist() == [3, 3]
    assert taken["graph"].requires_grad
    places, held = [tensor.data_ptr() for tensor in taken["tied"]], copies.num_bytes
    again, _ = copies.take(values)
    assert [tensor.data_ptr() for tensor in again["tied"]] == places
    assert copies.num_bytes == held
    assert not again["tied"][0].any()


@pytest.mark.gpu
def test_a_save_waits_for_the_gpu_once(
    tmp_path: Path, no_waits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is written: one wait, in place of one for each of its tensors."""
    words = ("recipe=resnet_digits", "device=cuda", "steps=12", "epochs=null", "saving.every=4steps")
    words = (*words, "eval.every=12steps", "backend=deterministic", "ema.decay=0.9", "saving.keep=9")
    waits: list[Any] = []
    monkeypatch.setattr(
        checkpoint_writer, "wait_for", lambda event: (waits.append(event), async_host_copy.wait_for(event))
    )
    for background in ("true", "false"):
        run = build_run(tmp_path / background, *words, f"saving.background={background}")
        run.logger, take = Lines(), run.checkpointer.writer._copies.take

        def without_waiting(*given: Any, take: Any = take) -> Any:
            with no_waits():
                return take(*given)

        monkeypatch.setattr(run.checkpointer.writer._copies, "take", without_waiting)
        fit(run)
        assert len(waits) == run.checkpointer.writer.states == 3
        waits.clear()
    for step in (4, 8, 12):
        own, other = (read_checkpoint(tmp_path / name / f"saved/step-{step}") for name in ("true", "false"))
        assert same_bits([own.model, own.training], [other.model, other.training])


def killed_in_a_write(rng: random.Random, *words: str) -> bool:
    """Train in a process that is killed while, or soon after, one of its next states is written.

    Returns:
        Whether a state was being written at that moment.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(train(*words))
        finally:
            os._exit(99)
    before, met, skipped = set(drafts()), set[str](), rng.randrange(3)
    while len(met) <= skipped:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it was killed"
        met |= {name for name in drafts() if name.startswith(".step") and "removed" not in name} - before
        time.sleep(0.0005)
    time.sleep(rng.random() * 0.06)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return any(name.startswith(".step") and f".{pid}" in name for name in drafts())


def kills(number: int, seed: int) -> Iterator[bool]:
    rng, own = random.Random(seed), (f"epochs={3 * number}", "saving.keep=2", "saving.best=3")
    words = (*WORDS, *own, "run.dir=a")
    for _ in range(number):
        yield killed_in_a_write(rng, *words)
        for folder in list_checkpoints(Path("a/saved")):
            read_checkpoint(folder)
    assert train_in_child(*words) == 0
    assert train(*words, "run.dir=b", "saving.background=false") == 0


@pytest.mark.slow
def test_kills_while_states_are_written_change_nothing(in_tmp: Path, slow_disk: list[int]) -> None:
    number = int(os.environ.get("PTFAST_KILLS", "12"))
    inside = sum(kills(number, seed=number))
    print(f"{number} kills, {inside} of them while a state was written", file=sys.stderr)
    assert inside > number / 3
    assert_same_run(Path("a"), Path("b"))
    assert summary(Path("a"))["best_states"] == summary(Path("b"))["best_states"]
    names = [[path.name for path in list_checkpoints(Path(run, "saved"))] for run in ("a", "b")]
    assert names[0] == names[1]
