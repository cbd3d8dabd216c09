"""torchrun's elastic launcher: several processes of one module, and what it knows of those that failed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from ptfast.core.distributed import THREADS_VARIABLE
from ptfast.core.errors import ParallelError

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that the launcher passes on to the ranks."""
SHUTDOWN_S = 600
"""How long ranks that were sent a signal may take to end their step and save, where torchrun takes it."""


def on_this_machine(num_ranks: int) -> list[str]:
    """torchrun's options for ranks of this machine alone, whatever its variables (`PET_*`) say."""
    return [
        *("--nnodes=1", f"--nproc-per-node={num_ranks}", "--max-restarts=0"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=timeout=60"),
        f"--rdzv-id=ptfast-{os.getpid()}",
    ]


def on_several_machines(num_ranks: int, num_nodes: int, rdzv: str | None, timeout_s: float) -> list[str]:
    """torchrun's options for this machine's ranks; what is not given is left to its variables (`PET_*`).

    Args:
        num_ranks: on this machine.
        num_nodes: machines; 1 is not given.
        rdzv: HOST:PORT where they meet.
        timeout_s: how long they wait for one another there.
    """
    waits = ",".join(f"{name}={int(timeout_s)}" for name in ("timeout", "join_timeout", "read_timeout"))
    options = [f"--nproc-per-node={num_ranks}", f"--rdzv-conf={waits}"]
    if num_nodes > 1:
        options.append(f"--nnodes={num_nodes}")
    if rdzv is not None:
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={rdzv}"]
    # A machine that takes the place of another finds no store that the agents share from an earlier start.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return options


def run_elastic(
    module: str, arguments: Sequence[str], options: Sequence[str]
) -> tuple[dict[int, Any], int | None]:
    """Run `python -m MODULE ARGUMENTS...` as ranks, until all of this machine have ended.

    Args:
        options: of torchrun.

    Returns:
        What torchrun knows of ranks that failed, and the signal that ended the launcher, if one did.

    Raises:
        ParallelError: P002 where the machines do not find each other.
    """
    # torchrun would leave one thread to each rank; the ranks share the cores themselves and record it,
    # or take the number that the user has given.
    os.environ.setdefault(THREADS_VARIABLE, os.environ.get("OMP_NUM_THREADS", ""))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    # The failure of a rank is said once, by us.
    elastic_log = logging.getLogger("torch.distributed.elastic")
    elastic_log.addHandler(logging.NullHandler())
    elastic_log.propagate = False
    # Under nohup, which ignores SIGHUP, the run continues when the terminal is closed.
    names = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals = ",".join(names)
    launch, _, _ = config_from_args(parse_args([*options, "-m", module]))
    for name, value in {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S}.items():
        # Older versions lack them.
        if hasattr(launch, name):
            setattr(launch, name, value)
    if launch.max_nodes > 1 and launch.rdzv_configs.get("rank") != 0:
        _await(launch.rdzv_endpoint, int(launch.rdzv_configs["timeout"]))
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        return dict(error.failures), None
    except SignalException as error:
        return {}, int(error.sigval)
    except KeyboardInterrupt:
        return {}, int(signal.SIGINT)
    except (RendezvousError, DistError) as error:
        what = f"not all of {launch.max_nodes} machines have met there"
        raise _not_met(launch.rdzv_endpoint, what) from error
    return {}, None


def _await(endpoint: str, timeout_s: float) -> None:
    """Wait until somebody answers where the machines meet, which this machine may have to be itself.

    torch waits, too, but writes pages of warnings about it.

    Raises:
        ParallelError: P002.
    """
    host, _, port = endpoint.rpartition(":")
    if host in (socket.gethostname(), socket.getfqdn()):
        return
    end = time.monotonic() + timeout_s
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            with contextlib.suppress(OSError), socket.socket(family) as own:
                # Only an address of this machine can be taken.
                own.bind((address[0], 0))
                return
            with socket.create_connection((host, int(port)), timeout=5):
                return
        except OSError as error:
            if time.monotonic() > end:
                what = f"nobody answers there ({error.strerror or error})"
                raise _not_met(endpoint, what) from error
        time.sleep(0.2)


def _not_met(endpoint: str, what: str) -> ParallelError:
    hint = "Start the same command on each; parallel.timeout says how long they wait for one another"
    return ParallelError("P002", what, key=endpoint, suggestion=hint)
