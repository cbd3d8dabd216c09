"""torchrun's elastic launcher: several processes of one module, and what it knows of those that failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from ptfast.core.distributed import THREADS_VARIABLE

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that the launcher passes on to the ranks."""
SHUTDOWN_S = 600
"""How long ranks that were sent a signal may take to end their step and save, where torchrun takes it."""


def run_elastic(module: str, arguments: Sequence[str], num_ranks: int) -> tuple[dict[int, Any], int | None]:
    """Run `python -m MODULE ARGUMENTS... PID` on `num_ranks` ranks of this machine, until all have ended.

    Args:
        arguments: of the module; the id of this process follows them.

    Returns:
        What torchrun knows of ranks that failed, and the signal that ended the launcher, if one did.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The failure of a rank is said once, by us.
    elastic_log = logging.getLogger("torch.distributed.elastic")
    elastic_log.addHandler(logging.NullHandler())
    elastic_log.propagate = False
    # Under nohup, which ignores SIGHUP, the run continues when the terminal is closed.
    names = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    signals = ",".join(names)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals
    wanted = {"signals_to_handle": signals, "shutdown_timeout": SHUTDOWN_S}
    named: dict[str, Any] = {k: v for k, v in wanted.items() if k in LaunchConfig.__annotations__}
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"ptfast-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": 60},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        **named,
    )
    # torchrun would leave one thread to each rank; the ranks share the cores themselves and record it,
    # or take the number that the user has given.
    os.environ.setdefault(THREADS_VARIABLE, os.environ.get("OMP_NUM_THREADS", ""))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        elastic_launch(launch, sys.executable)("-u", "-m", module, *arguments, str(os.getpid()))
    except ChildFailedError as error:
        return dict(error.failures), None
    except SignalException as error:
        return {}, int(error.sigval)
    except KeyboardInterrupt:
        return {}, int(signal.SIGINT)
    return {}, None
