"""Several processes: the figures of one, one directory, one line for a failure, and none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked, run_command
from running import WITH_TESTS, records, same_bits, summary, train, weights
from strategy_cases import RUNNING
from test_json import parsed
from torch import nn
from torch.distributed.run import main as torchrun

from ptfast.config.compose import compose
from ptfast.config.read import read_config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError, DataError, MachineError, ParallelError, ReportedError
from ptfast.core.run_directory import write_json
from ptfast.core.tensors.checkpoint_folders import abandon_after, point
from ptfast.launch import launcher
from ptfast.launch.agent import Agent, Ended, watch
from ptfast.launch.launcher import _check_started, _outcome, _run_ranks
from ptfast.launch.rank_main import report_failure
from ptfast.launch.resume import RunStart
from ptfast.techniques.parallel.sync_batchnorm import RunningStatistics

WORDS = ("model.hidden=[16]", "model.dropout=0.2", "micro_batches=2", "log_every=3", "ema.decay=0.5")
DDP = ("parallel=ddp", "parallel.nproc=2")


def a_run(*words: str, told: Mapping[str, str] = {}, command: str = "train") -> subprocess.Popen[str]:
    """`ptfast COMMAND WORDS...` in a session of its own, with the variables `told`."""
    arguments = [sys.executable, "-m", "ptfast", command, *words]
    environment = {**os.environ, **WITH_TESTS, **told}
    return subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ranks_of_an_engine(*words: str) -> list[subprocess.Popen[str]]:
    """Two ranks of `ptfast train WORDS...`, who find each other by nothing but variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [a_run(*words, told={**told, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]


@contextlib.contextmanager
def running(*words: str) -> Iterator[Forked]:
    """A run of slow steps, from the moment that both ranks train."""
    slow = ("steps=2000", "log_every=1000", "eval.every=1000steps", "callbacks=[{_target_: callbacks.Slow}]")
    process = Forked(run_command("train", "model.hidden=[16]", *DDP, *slow, *words), WITH_TESTS)
    try:
        wait_for(lambda: Path("pid-0").exists() and Path("pid-1").exists())
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition: Any, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def assert_no_rank_lives() -> None:
    """The processes that wrote their ids are gone, at once or a moment later."""
    ids = [int(path.read_text()) for path in Path.cwd().glob("pid-*")]
    assert ids
    wait_for(lambda: not any(is_alive(pid) for pid in ids), 10)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        # 1,617 samples leave a last batch of one: the first rank's share is empty.
        pytest.param((), ("parallel.nproc=2", "batch_size=202"), marks=pytest.mark.slow),
        # One sample to validate on: the first rank has none.
        pytest.param(
            ("--nproc-per-node", "2", "-m"), ("batch_size=256", "data.val=1samples"), marks=pytest.mark.slow
        ),
        pytest.param(None, ("batch_size=256", "data.val=1samples"), marks=pytest.mark.slow),
    ],
    ids=["ptfast", "torchrun", "another engine"],
)
def test_two_processes_give_the_figures_of_one(
    in_tmp: Path, launcher: tuple[str, ...] | None, words: tuple[str, ...]
) -> None:
    words = (*WORDS, *words, "epochs=2")
    processes: Sequence[subprocess.Popen[str] | Forked]
    if launcher is None:
        processes = ranks_of_an_engine(*words, "parallel=ddp", "run.name=two")
    elif launcher:
        given = [*launcher, "ptfast", "train", *words, "parallel=ddp", "run.name=two"]
        processes = [Forked(lambda: torchrun(given), WITH_TESTS)]
    else:
        processes = [a_run(*words, "parallel=ddp", "run.name=two")]
    said = [process.communicate(timeout=200) for process in processes]
    out, err = map("".join, zip(*said, strict=True))
    assert [process.returncode for process in processes] == [0] * len(processes), err
    assert "Warning" not in err
    alone = [word for word in words if word != "parallel.nproc=2"]
    assert train(*alone, "run.dir=one") == 0
    (folder,) = Path("runs/two").iterdir()
    one, two = records(Path("one")), records(folder)
    assert [(line["step"], line["split"]) for line in two] == [(line["step"], line["split"]) for line in one]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)
    assert summary(folder)["samples"] == summary(Path("one"))["samples"]
    assert out.count("finished after") == 1
    assert "2 ranks" in out
    assert [path.name for path in (folder / "saved").iterdir() if path.name.startswith(".")] == []


def test_one_rank_in_a_group_trains_to_the_bits_of_a_single_process(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that the ranks' path can be tested on one device. The engine has started a single process."""
    words = ("model=resnet_digits", "model.width=4", "rewrites.channels_last=false", "device=cpu", "steps=4")
    words = (
        *words,
        "batch_size=32",
        "gradients.clip_norm=0.3",
        "ema.decay=0.5",
        "log_every=2",
        "epochs=null",
    )
    assert train(*words, "run.dir=single") == 0
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    for strategy, shown in (("ddp", "ddp, buckets of 25 MB"), ("fsdp", "fsdp, weights in 4 parts")):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        grouped = (f"parallel={strategy}", "parallel.wrap_one_rank=true", f"run.dir={strategy}")
        assert train(*words, *grouped) == 0
        assert shown in capsys.readouterr().out
        assert same_bits(weights(Path(strategy)), weights(Path("single")))
        assert records(Path(strategy)) == records(Path("single"))


@pytest.mark.slow
def test_three_processes_go_on_to_the_same_bits(in_tmp: Path) -> None:
    words = ("model.hidden=[300,300]", "batch_size=96", "steps=24", "log_every=4", "parallel=ddp")
    words = (*words, "parallel.nproc=3", "callbacks=[{_target_: callbacks.Misfortune}]", "run.resume=auto")
    for name, misfortune, code in (
        ("whole", "1 1000 SIGTERM", 0),
        ("stopped", "1 9 SIGTERM", 75),
        ("stopped", "1 1000 SIGTERM", 0),
    ):
        Path("misfortune").write_text(misfortune)
        process = a_run(*words, f"run.dir={name}")
        _, err = process.communicate(timeout=200)
        assert (process.returncode, err) == (code, "")
    assert same_bits(weights(Path("stopped")), weights(Path("whole")))
    assert records(Path("stopped")) == records(Path("whole"))


@pytest.mark.slow
def test_two_processes_thaw_and_freeze_as_one_does_and_go_on_to_the_same_bits(in_tmp: Path) -> None:
    groups = '[{match: "layers.1.*", trains_from: 6steps}, {match: "layers.3.*", trains_until: 10steps}]'
    words = ("model.hidden=[64,32]", "micro_batches=2", "batch_size=128", "steps=13", "log_every=4")
    words = (*words, f"optimizer.groups={groups}", "ema.decay=0.5", "gradients.log_norm=true")
    alone = [word for word in words if word != "parallel.nproc=2"]
    assert train(*alone, "run.dir=one") == 0
    words = (*words, *DDP, "callbacks=[{_target_: callbacks.Misfortune}]", "run.resume=auto")
    for name, misfortune, code in (
        ("whole", "1 1000 SIGTERM", 0),
        ("stopped", "1 3 SIGTERM", 75),
        ("stopped", "1 6 SIGTERM", 75),
        ("stopped", "1 1000 SIGTERM", 0),
    ):
        Path("misfortune").write_text(misfortune)
        process = a_run(*words, f"run.dir={name}")
        _, err = process.communicate(timeout=200)
        assert (process.returncode, err) == (code, "")
    assert same_bits(weights(Path("stopped")), weights(Path("whole")))
    one, two = records(Path("one")), records(Path("whole"))
    for figure in ("loss", "grad_norm"):
        expected = [line[figure] for line in one if figure in line]
        assert [line[figure] for line in two if figure in line] == pytest.approx(expected, rel=1e-4)


def test_running_statistics_are_those_of_one_process(two_ranks: dict[str, Any], in_tmp: Path) -> None:
    assert train(*RUNNING, "run.dir=one") == 0
    one = [line["loss"] for line in records(Path("one"))]
    assert two_ranks["running"]["losses"] == pytest.approx(one, rel=1e-4)
    left, right = weights(Path("one")), two_ranks["running"]["weights"]
    for name, value in left.items():
        if "running" in name:
            torch.testing.assert_close(right[name], value, rtol=1e-3, atol=1e-4)
        if "num_batches" in name:
            assert (int(value), int(right[name])) == (4 * 13, 4 * 13)


@pytest.mark.slow
def test_ranks_of_an_engine_are_refused_once(in_tmp: Path) -> None:
    first, second = ranks_of_an_engine("parallel=ddp", "optimizer.lrr=1", "run.dir=a")
    (_, line), said = first.communicate(timeout=200), second.communicate(timeout=200)
    assert (first.returncode, second.returncode, said) == (2, 2, ("", ""))
    assert line.startswith("ptfast: error[C002]: optimizer.lrr=1 (command line)")
    assert not Path("a").exists()


def test_a_stand_in_leaves_the_statistics_alone() -> None:
    norm = nn.BatchNorm1d(3)
    frozen = nn.BatchNorm1d(3).eval()
    statistics = RunningStatistics(nn.Sequential(norm, frozen), Ranks())
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with statistics.untouched():
        # In training mode, one sample would be refused.
        norm(torch.ones(1, 3)).sum().backward()
    assert same_bits(dict(norm.state_dict()), before)
    assert (norm.training, frozen.training) == (True, False)
    assert norm.weight.grad is not None


def of_ptfast(err: str) -> list[str]:
    """Lines of stderr without what torch warns of where the machine does not know its own name."""
    return [line for line in err.splitlines() if "hostname of the client socket" not in line]


@pytest.mark.slow
def test_a_killed_rank_is_named_once(in_tmp: Path) -> None:
    Path("misfortune").write_text("1 3 SIGKILL")
    words = ("steps=50", "batch_size=256", "callbacks=[{_target_: callbacks.Misfortune}]", "run.dir=a")
    process = a_run(*WORDS, *DDP, *words)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 7
    (line,) = of_ptfast(err)
    assert line.startswith("ptfast: error[P001]: a: rank 1 was killed by SIGKILL")
    assert_no_rank_lives()


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize(
    ("name", "code", "status"),
    [("SIGTERM", 75, "preempted"), pytest.param("SIGINT", 130, "interrupted", marks=pytest.mark.slow)],
)
def test_a_signal_to_the_launcher_saves_and_ends_all(in_tmp: Path, name: str, code: int, status: str) -> None:
    """And the first rank prints objects if the launcher is to."""
    with running("run.dir=a", "--json") as process:
        process.send_signal(signal.Signals[name])
        said, err = process.communicate(timeout=40)
        assert (process.returncode, of_ptfast(err)) == (code, [])
        assert_no_rank_lives()
    result = summary(Path("a"))
    assert result["status"] == status
    assert [each["steps"] for each in parsed(said) if each["event"] == "result"] == [result["steps"]]
    assert Path("a/saved/last").resolve().name == f"step-{result['steps']}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_launcher_leaves_no_rank(in_tmp: Path) -> None:
    with running("run.dir=a") as process:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert_no_rank_lives()


def test_ranks_that_torchrun_kills_are_those_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent.__new__(Agent)
    process = subprocess.Popen(["sleep", "600"])
    agent.processes, agent.killed, agent.ending = {3: process}, [], False
    monkeypatch.setattr(Agent.__base__, "_shutdown", lambda self: (process.kill(), process.wait()))
    agent._shutdown()
    assert agent.killed == [3]
    # Kept, its store would be dropped by a fork, which lacks the store's thread.
    assert watch(lambda: setattr(Agent, "latest", agent), []).hung == [3]
    assert Agent.latest is None


def outcome(folder: Path, codes: dict[int, int] | None = None, **ended: Any) -> int:
    return _outcome(folder, compose(), Ended(codes or {}, **ended), time.time() - 60)


def test_the_status_of_the_run_is_the_exit_code(in_tmp: Path) -> None:
    for status, code in (
        ("finished", 0),
        ("stopped", 0),
        ("paused", 0),
        ("preempted", 75),
        ("interrupted", 130),
    ):
        write_json(in_tmp / "summary.json", {"status": status})
        assert outcome(in_tmp) == code
        assert outcome(in_tmp, received=signal.SIGTERM) == code


def test_a_signal_before_training_is_the_exit_code(in_tmp: Path) -> None:
    assert outcome(in_tmp, received=signal.SIGTERM) == 75
    assert outcome(in_tmp, received=signal.SIGUSR1) == 75
    assert outcome(in_tmp, received=signal.SIGINT) == 130


def test_ranks_are_started_again_as_long_as_they_get_further(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states, given, codes = iter(("step-2", "step-4", "", "", "step-6", "")), [], [-9] * 6

    def run(module: str, arguments: list[str], options: list[str]) -> Ended:
        given.append(Path(arguments[1]).name)
        if name := next(states):
            (in_tmp / "saved" / name).mkdir(parents=True, exist_ok=True)
            point(in_tmp / "saved", "last", Path(name))
        if not codes[len(given) - 1]:
            write_json(in_tmp / "summary.json", {"status": "finished"})
        return Ended({1: code} if (code := codes[len(given) - 1]) else {})

    monkeypatch.setattr(launcher, "run_elastic", run)
    place = RunStart(in_tmp, None)
    with pytest.raises(ParallelError, match="rank 1 was killed by SIGKILL"):
        _run_ranks(place, compose(), 2, max_restarts=1)
    assert given == ["", "step-2", "step-4", "step-4"]
    assert capsys.readouterr().err.count("ptfast: restarting the ranks from step-4\n") == 2
    codes[5] = 0
    assert (
        _run_ranks(
            replace(place, checkpoint_folder=in_tmp / "saved" / "step-4"), compose(), 2, max_restarts=1
        )
        == 0
    )
    assert given[4:] == ["step-4", "step-6"]


def test_ranks_that_never_resumed_are_started_again_from_the_state_named(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, given = in_tmp / "saved", []
    for name in ("step-8", "step-32"):  # of an earlier attempt
        (saved / name).mkdir(parents=True)
        point(saved, "last", Path(name))

    def run(module: str, arguments: list[str], options: list[str]) -> Ended:
        given.append(Path(arguments[1]).name)
        if len(given) == 2:
            abandon_after(saved, saved / "step-8")
        if len(given) == 3:
            (saved / "step-12").mkdir()
            point(saved, "last", Path("step-12"))
        if len(given) == 4:
            write_json(in_tmp / "summary.json", {"status": "finished"})
        return Ended({1: -9} if len(given) < 4 else {})

    monkeypatch.setattr(launcher, "run_elastic", run)
    assert _run_ranks(RunStart(in_tmp, saved / "step-8"), compose(), 2, max_restarts=2) == 0
    assert given == ["step-8", "step-8", "step-8", "step-12"]


def test_ranks_that_were_killed_before_they_saved_are_no_preempted_run(in_tmp: Path) -> None:
    write_json(in_tmp / "resolved.json", {})
    with pytest.raises(ParallelError, match="killed after SIGTERM, before they had saved"):
        outcome(in_tmp, received=signal.SIGTERM)
    (in_tmp / "saved" / "last").mkdir(parents=True)
    assert outcome(in_tmp, received=signal.SIGTERM) == 75


def test_what_whoever_starts_ranks_decides_cannot_be_contradicted(in_tmp: Path) -> None:
    def check(*words: str) -> None:
        _check_started(read_config(["parallel=ddp", *words])[1], Ranks(0, 0, 4, 2))

    check()
    check("parallel.nproc=2", "parallel.nnodes=2")
    for words, key in (
        (("parallel.nproc=4",), "parallel.nproc"),
        (("parallel.nnodes=3",), "parallel.nnodes"),
    ):
        with pytest.raises(ConfigError, match="2 were started") as caught:
            check(*words)
        assert (caught.value.code, caught.value.key) == ("C011", key)


def test_a_word_that_a_full_disk_swallows_is_the_first(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ptfast.launch.rank_main.json.dump", full)
    assert report_failure(in_tmp, MachineError("E002", "the disk is full"))


def test_what_a_rank_said_is_said_again(in_tmp: Path) -> None:
    assert report_failure(in_tmp, DataError("D005", "is no image", key="x.png"))
    assert not report_failure(in_tmp, RuntimeError("connection closed by peer"))
    with pytest.raises(ReportedError, match=r"error\[D005\]: x\.png: is no image") as caught:
        outcome(in_tmp, {1: 3})
    assert caught.value.exit_code == 3
    assert summary(in_tmp) == {"status": "failed", "exit_code": 3, "error": "x.png: is no image."}


def test_a_killed_rank_explains_what_the_others_say(in_tmp: Path) -> None:
    report_failure(in_tmp, RuntimeError("connection closed by peer"))
    write_json(in_tmp / "summary.json", {"status": "failed", "error": "another rank died", "steps": 3})
    with pytest.raises(ParallelError, match="rank 2 was killed by SIGSEGV"):
        outcome(in_tmp, {0: 1, 1: -15, 2: -11, 3: -9}, hung=[3])
    assert (summary(in_tmp)["steps"], summary(in_tmp)["exit_code"]) == (3, 7)
    assert "rank 2 was killed" in summary(in_tmp)["error"]


def test_a_rank_that_left_without_a_word_is_named(in_tmp: Path) -> None:
    with pytest.raises(ParallelError, match="rank 1 exited with 3"):
        outcome(in_tmp, {1: 3})
    with pytest.raises(ParallelError, match="without a summary"):
        outcome(in_tmp)
