"""Ranks for tests: processes that are started once and go through many cases."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from conftest import IMPORT_PATHS

from ptfast.core.distributed import Ranks


def on_ranks(module: str, folder: Path, world_size: int = 2) -> dict[str, Any]:
    """The result of `cases(ranks)` of a module of the tests on the first of several ranks.

    Args:
        folder: the current one of all, and where they leave their output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(IMPORT_PATHS)}
    outputs = [folder / f"rank-{rank}.txt" for rank in range(world_size)]
    processes = []
    for rank, output in enumerate(outputs):
        command = [sys.executable, "-W", "error", __file__, module, address, str(rank), str(world_size)]
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        processes.append(process)
    try:
        codes = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world_size, "\n".join(output.read_text() for output in outputs)
    return torch.load(folder / "cases.pt", weights_only=True)


def main(module: str, address: str, rank: int, world_size: int) -> None:
    """One rank: go through the cases; the first keeps what it finds."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    cases = import_module(module).cases
    gc.freeze()
    found = cases(Ranks(rank, rank, world_size, world_size))
    if rank == 0:
        torch.save(found, "cases.pt")
    torch.distributed.barrier()
    sys.stdout.flush()
    # Threads that gloo leaves behind may abort the interpreter's own way out.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
