"""Ranks for tests: forks of the tests' process that go through many cases."""

from __future__ import annotations

import gc
import os
import socket
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from forked import Forked

from ptfast.core.distributed import Ranks


def on_ranks(module: str, folder: Path, world_size: int = 2) -> dict[str, Any]:
    """The result of `cases(ranks)` of a module of the tests on the first of several ranks.

    Args:
        folder: the current one of all.
    """
    cases = import_module(module).cases
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def rank_of(rank: int) -> Forked:
        return Forked(lambda: go_through(cases, folder, address, Ranks(rank, rank, world_size, world_size)))

    processes = [rank_of(rank) for rank in range(world_size)]
    said = ["\n".join(process.communicate(timeout=500)) for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(said)
    return torch.load(folder / "cases.pt", weights_only=True)


def go_through(cases: Any, folder: Path, address: str, ranks: Ranks) -> None:
    """One rank: go through the cases; the first keeps what it finds."""
    os.chdir(folder)
    os.fsync = lambda file: None
    warnings.simplefilter("error")
    gc.freeze()
    start = torch.distributed.init_process_group
    start("gloo", init_method=address, rank=ranks.rank, world_size=ranks.world_size)
    found = cases(ranks)
    if ranks.is_first:
        torch.save(found, "cases.pt")
    torch.distributed.barrier()
