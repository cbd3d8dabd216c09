"""Several machines: what each must have in common with the others, and two hosts that train together."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import HOSTS, on_host, two_hosts
from running import records, same_bits, train, weights

from ptfast.core.errors import MachineError, ParallelError
from ptfast.core.run_directory import write_json
from ptfast.launch.elastic import (
    can_reach,
    check_nodes,
    check_shared,
    describe_node,
    on_several_machines,
    run_elastic,
)

HERE: dict[str, Any] = {
    "host": "n1",
    "versions": {"torch": "2.9.0", "python": "3.12.1"},
    "words": ["optimizer.lr=0.1", "epochs=2"],
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"versions": {"torch": "2.8.0", "python": "3.12.1"}},
            "rank 1 on n2: has torch 2.8.0, but rank 0 on n1 has 2.9.0. Install the same versions",
        ),
        (
            {"words": ["epochs=2", "optimizer.lr=0.2"]},
            "rank 1 on n2: was started with optimizer.lr=0.2, but rank 0 on n1 with optimizer.lr=0.1.",
        ),
        (
            {"words": ["epochs=2"]},
            "rank 1 on n2: was started with less, but rank 0 on n1 with optimizer.lr=0.1.",
        ),
    ],
)
def test_a_node_that_differs_is_named(changes: dict[str, Any], says: str) -> None:
    same = HERE | {"host": "n2", "words": HERE["words"][::-1]}
    check_nodes([])
    check_nodes([json.dumps(HERE), json.dumps(same)])
    with pytest.raises(ParallelError) as caught:
        check_nodes([json.dumps(HERE), json.dumps(same | changes)])
    assert caught.value.code == "P002"
    assert says in str(caught.value)


def test_a_node_tells_no_secrets() -> None:
    assert "hidden" not in describe_node(["logger.api_key=hidden"])


def test_a_folder_that_is_not_shared_is_named(in_tmp: Path) -> None:
    write_json(in_tmp / "environment.json", {"started": "today"})
    assert can_reach(in_tmp, "today") == ""
    unseen = [
        can_reach(in_tmp, "yesterday", timeout_s=0.01),
        can_reach(in_tmp / "other", "today", timeout_s=0.01),
    ]
    assert unseen == [socket.gethostname()] * 2
    check_shared(in_tmp, ["", ""])
    with pytest.raises(MachineError, match=r"n2, n3 cannot see files that .* writes there") as caught:
        check_shared(in_tmp, ["", "n3", "n2", "n2"])
    assert (caught.value.code, caught.value.key) == ("E001", str(in_tmp))


@pytest.mark.parametrize(
    ("words", "told", "says"),
    [
        (
            "parallel=ddp parallel.nnodes=2",
            {},
            "error[C016]: parallel.nnodes=2 (command line): no rendezvous endpoint",
        ),
        ("parallel.rdzv=a:1", {}, "error[C011]: parallel.rdzv=a:1 (command line): one process trains"),
        (
            "parallel=ddp parallel.rdzv=a",
            {},
            "error[C005]: parallel.rdzv=a (command line): expected",
        ),
        ("steps=1", {"PET_NNODES": "2"}, "error[C011]: parallel=single (conf/parallel/single.yaml): several"),
        ("-m seed=1,2", {"PET_NNODES": "2"}, "error[C014]: -m: every rank would run the whole sweep"),
    ],
)
def test_machines_that_cannot_train_together_are_rejected(
    words: str,
    told: dict[str, str],
    says: str,
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert train(*words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not list(in_tmp.iterdir())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    ("host", "says"),
    [("127.0.0.1", "fewer than 2 machines have joined."), ("nobody.invalid", "no machine answers there (")],
)
def test_a_rendezvous_that_nobody_joins_ends(
    host: str, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # What torchrun's launcher leaves in the environment.
    for name in ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "PTFAST_THREADS"):
        monkeypatch.setenv(name, "")
    rdzv = f"{host}:{free_port()}"
    with pytest.raises(ParallelError) as caught:
        run_elastic("ptfast", [], on_several_machines(1, 2, rdzv, timeout_s=1))
    assert (caught.value.code, caught.value.exit_code, caught.value.key) == ("P002", 7, rdzv)
    assert says in str(caught.value)
    assert capfd.readouterr() == ("", "")


FIRST, SECOND = HOSTS
WORDS = ("train", "model.hidden=[32]", "batch_size=64", "steps=60", "log_every=5", "saving.every=5steps")
WORDS = (*WORDS, "callbacks=[{_target_: callbacks.Slow}]", "parallel=ddp", "run.resume=auto")
OURS = ("ptfast", *WORDS, "parallel.nproc=1", "parallel.nnodes=2", f"parallel.rdzv={FIRST}:29500")
TORCHRUN = ("torch.distributed.run", "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={FIRST}:29500")
TORCHRUN = (*TORCHRUN, "-m", "ptfast", *WORDS)


def until_both_end(*words: str, **of_second: Any) -> tuple[list[int], str]:
    """Exit codes of both hosts, and what they print on stderr but for torch's warning of a name server."""
    second_words = of_second.pop("words", words)
    with on_host(FIRST, *OURS, *words) as first, on_host(SECOND, *OURS, *second_words, **of_second) as second:
        said = [process.communicate(timeout=300)[1] for process in (first, second)]
    lines = [line for err in said for line in err.splitlines() if "hostname of the client socket" not in line]
    return [first.returncode, second.returncode], "\n".join(lines)


@pytest.mark.slow
def test_two_hosts_outlive_the_death_of_one_to_the_same_bits(in_tmp: Path) -> None:
    with two_hosts():
        assert until_both_end("run.dir=whole") == ([0, 0], "")
        for name, command in (("ours", OURS), ("torchrun", TORCHRUN)):
            told = {"PET_MAX_RESTARTS": "3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            words = (*command, f"run.dir={name}")
            with on_host(FIRST, *words, told=told) as first:
                with on_host(SECOND, *words, told=told):
                    end = time.monotonic() + 100
                    while not Path(name, "saved/step-15").exists():
                        assert first.poll() is None
                        assert time.monotonic() < end
                        time.sleep(0.1)
                with on_host(SECOND, *words, told=told) as second:
                    _, err = first.communicate(timeout=200)
                    assert first.returncode == 0, err
                    assert second.wait(timeout=60) == 0
            assert "error[P001]" in err
            assert same_bits(weights(Path(name)), weights(Path("whole")))
            assert records(Path(name)) == records(Path("whole"))


@pytest.mark.slow
def test_two_hosts_that_differ_or_share_no_folder_say_so_once(in_tmp: Path) -> None:
    with two_hosts():
        assert until_both_end("run.dir=a", words=("run.dir=b",)) == (
            [7, 7],
            f"ptfast: error[P002]: rank 1 on {SECOND}: was started with run.dir=b, but rank 0 on {FIRST} "
            "with run.dir=a. Start the same command on all machines.",
        )
        (in_tmp / "local").mkdir()
        assert until_both_end("run.dir=local/a", private=in_tmp / "local") == (
            [4, 4],
            f"ptfast: error[E001]: local/a: {SECOND} cannot see files that {FIRST} writes there. "
            "Set run.root or run.dir to a folder that all machines share.",
        )
    assert [path.name for path in in_tmp.rglob("*")] == ["local"]
