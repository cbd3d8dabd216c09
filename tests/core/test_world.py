"""Who this process is among the ranks that somebody has started, and tasks that are none."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptfast.cli import command_line
from ptfast.core import distributed
from ptfast.core.distributed import WORLD, Ranks, on_all_ranks, once_per_machine, once_per_rank, world
from ptfast.core.errors import ConfigError, DataError, ParallelError
from ptfast.techniques.backend.torch_settings import resolve_device

ENGINE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
KUBEFLOW = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "pod0", "PET_MASTER_PORT": "23456"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0"}
MPIEXEC = {"PMI_SIZE": "4", "PMI_RANK": "0"}
HINT = "Start one process here, with parallel=ddp parallel.nproc={}, or one a machine: torchrun --nnodes N "
ALONE = "each of these processes would train by itself. " + HINT


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """All the variables that there are."""
    found: dict[str, str] = {}
    monkeypatch.setattr("os.environ", found)
    return found


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, None),
        ({**ENGINE, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, Ranks(3, 1, 8, 2)),
        (ENGINE, Ranks(3, 1, 8, 1)),
        ({**ENGINE, **STEP}, Ranks(3, 1, 8, 1)),
        (KUBEFLOW, None),
        ({**KUBEFLOW, **STEP}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),
        (BATCH, None),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, None),
    ],
    ids=[
        *(
            "alone",
            "torchrun",
            "an engine",
            "an engine under srun",
            "kubeflow",
            "kubeflow under srun",
        ),
        *("one rank", "salloc", "a batch script", "srun -n 1", "mpirun -n 1"),
    ],
)
def test_ranks_are_those_that_were_started(
    told: dict[str, str], expected: Ranks | None, variables: dict[str, str]
) -> None:
    variables.update(told)
    assert world() == expected
    assert world(meets=True) == expected
    assert expected is None or set(WORLD) < set(variables)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "8"},
            f"WORLD_SIZE=8: without LOCAL_RANK, MASTER_ADDR, MASTER_PORT, {ALONE.format(8)}",
        ),
        (
            STEP,
            "SLURM_STEP_NUM_TASKS=8: without RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, "
            + ALONE.format(8),
        ),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE=8: without RANK, WORLD_SIZE, "),
        ({**MPIRUN, **STEP}, ALONE.format(8)),
        (MPIEXEC, ALONE.format(4)),
        ({**ENGINE, "RANK": "x"}, "RANK=x: no whole number."),
        ({**ENGINE, "MASTER_PORT": "http"}, "MASTER_PORT=http: no whole number."),
        ({**ENGINE, "RANK": "8"}, "RANK=8: WORLD_SIZE is 8."),
    ],
)
def test_tasks_that_would_train_by_themselves_are_rejected(
    told: dict[str, str], says: str, variables: dict[str, str]
) -> None:
    variables.update(told)
    with pytest.raises(ParallelError) as caught:
        world()
    assert caught.value.code == "P002"
    assert says in str(caught.value)


@pytest.mark.parametrize("command", ["train", "train --dry-run", "train -m seed=1,2", "find lr"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_of_the_tasks_says_so(
    rank: str, command: str, in_tmp: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**STEP, "SLURM_PROCID": rank}.items():
        monkeypatch.setenv(name, value)
    if rank == "0":
        assert command_line.run(command.split()) == 7
    else:
        with pytest.raises(SystemExit, match="7"):
            command_line.run(command.split())
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1 if rank == "0" else 0)
    assert not list(in_tmp.iterdir())


def cases(ranks: Ranks) -> dict[str, Any]:
    """What two ranks of one machine, and of two, compute once per machine, or each for itself."""

    def fail() -> None:
        raise DataError("D007", f"damaged, says rank {ranks.rank}")

    def compute() -> int:
        computed.append(ranks.rank)
        return ranks.rank

    found: dict[str, Any] = {}
    for machines, local_rank in (("one", ranks.rank), ("two", 0)):
        computed: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_RANK", str(local_rank))
            value = once_per_machine(compute)
            try:
                once_per_machine(fail)
            except DataError as error:
                found[machines] = on_all_ranks((value, computed, error.what), ranks.world_size)
    found["each"] = once_per_rank(lambda: ranks.rank, ranks)
    try:
        once_per_rank(lambda: fail() if ranks.rank else None, ranks)
    except DataError as error:
        found["one of them"] = on_all_ranks(error.what, ranks.world_size)
    return found


def test_what_is_computed_once_per_machine_reaches_all_of_its_ranks(two_ranks: dict[str, Any]) -> None:
    found = two_ranks["test_world"]
    assert found["one"] == [(0, [0], "damaged, says rank 0"), (0, [], "damaged, says rank 0")]
    assert found["two"] == [(0, [0], "damaged, says rank 0"), (1, [1], "damaged, says rank 1")]
    assert once_per_machine(lambda: 3) == 3
    assert found["each"] == [0, 1]
    assert found["one of them"] == ["damaged, says rank 1"] * 2


@pytest.mark.parametrize(("gpus", "fits"), [((b"GPU-1", b"GPU-0"), True), ((b"GPU-0", b"GPU-0"), False)])
def test_ranks_that_see_one_gpu_each(
    gpus: tuple[bytes, bytes], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `srun --gpus-per-task=1` shows them, and where it shows all of them the same one."""
    store, ranks = torch.distributed.HashStore(), Ranks(5, 1, 8, 2)
    for rank, gpu in zip((4, 5), gpus, strict=True):
        store.set(f"ptfast/0/gpu/{rank}", gpu)
    joined: list[Any] = []
    properties = SimpleNamespace(uuid=gpus[1].decode())
    monkeypatch.setattr(distributed, "_stores", [store])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_device", joined.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    device = resolve_device("cuda", ranks)
    assert device == torch.device("cuda", 0)
    with (
        contextlib.nullcontext()
        if fits
        else pytest.raises(ConfigError, match="2 ranks need as many GPUs, and they see 1")
    ):
        distributed.init_process_group(device, ranks, 1.0)
    assert joined == ([device] if fits else [])
