"""torchrun's elastic launcher, and checks that machines share versions, command and run directory."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptfast.config.files.frozen import redact
from ptfast.core import run_directory
from ptfast.core.distributed import THREADS_VARIABLE
from ptfast.core.errors import MachineError, ParallelError
from ptfast.training.hangs.deadlines import VISIBLE_S

if TYPE_CHECKING:
    from ptfast.launch.agent import Ended

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
"""Signals that the launcher forwards to the ranks."""


def on_several_machines(world_size: int, num_nodes: int, rdzv: str | None, timeout_s: float) -> list[str]:
    """Return torchrun's options for this machine's ranks; its variables (`PET_*`) set the others.

    The machines meet at `rdzv` (HOST:PORT), and wait there up to `timeout_s` for each other.
    """
    waits = ",".join(f"{name}={int(timeout_s)}" for name in ("timeout", "join_timeout", "read_timeout"))
    options = [f"--nproc-per-node={world_size}", f"--rdzv-conf={waits}"]
    if num_nodes > 1:
        options.append(f"--nnodes={num_nodes}")
    if rdzv is not None:
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint={rdzv}"]
    # A replacement machine cannot find a store that the agents have shared since an earlier start.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    return options


def run_elastic(module: str, arguments: Sequence[str], options: Sequence[str]) -> Ended:
    """Run `python -m MODULE ARGUMENTS...` as ranks under torchrun, until this machine's ranks have ended.

    Raises:
        ParallelError: P002 if the machines cannot find each other, P001 if they lose their connection.
    """
    # torchrun would give each rank one thread. ptfast's ranks divide the cores themselves, or use the
    # user's number of threads, and record it.
    os.environ.setdefault(THREADS_VARIABLE, os.environ.get("OMP_NUM_THREADS", ""))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    from ptfast.launch.agent import watch

    # Silence torchrun: ptfast reports the failure of a rank itself, once.
    elastic_log = logging.getLogger("torch.distributed.elastic")
    elastic_log.addHandler(logging.NullHandler())
    elastic_log.propagate = False
    # Under nohup, which ignores SIGHUP, the run continues when the terminal is closed.
    names = [name for name in SIGNALS if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    launch, _, _ = config_from_args(parse_args([*options, "-m", module]))

    def act() -> None:
        if launch.max_nodes > 1 and launch.rdzv_configs.get("rank") != 0:
            address = _await(launch.rdzv_endpoint, int(launch.rdzv_configs["timeout"]))
            _find_place(launch, address)
        elastic_launch(launch, sys.executable)("-u", "-m", module, *arguments)

    ended = watch(act, names)
    if ended.received is None and not ended.codes and not ended.hung and ended.error is not None:
        if not isinstance(ended.error, (RuntimeError, RendezvousError)):
            raise ended.error
        if ended.started and not isinstance(ended.error, RendezvousTimeoutError):
            raise ParallelError("P001", "the other machines cannot be reached", key=launch.rdzv_endpoint)
        what = f"fewer than {launch.max_nodes} machines have joined"
        raise _not_met(launch.rdzv_endpoint, what) from ended.error
    return ended


def _find_place(launch: Any, address: tuple[Any, ...] | None) -> None:
    """Tell torchrun and gloo the address at which the other machines reach this one.

    The host name is not reliable: two machines may share it, and it often resolves to the loopback.
    """
    if address is None or ipaddress.ip_address(address[0]).is_loopback:
        return
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing, but finds the route.
        probe.connect(address[:2])
        own = probe.getsockname()[0]
    named: set[str] = set()
    with contextlib.suppress(OSError):
        named = {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    launch.local_addr = launch.local_addr or own
    if own == address[0] and own not in named:
        # torch compares only with the addresses of the host name.
        launch.rdzv_configs.setdefault("is_host", True)
    if named and all(ipaddress.ip_address(one).is_loopback for one in named) and (name := _interface(own)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _interface(address: str) -> str | None:
    """Return the name of the network interface with an IPv4 address; None if unknown."""
    if sys.platform != "linux" or ":" in address:
        return None
    get_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, get_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _await(endpoint: str, timeout_s: float) -> tuple[Any, ...] | None:
    """Return the address of the rendezvous once a machine answers there; None for this machine's own name.

    torch would wait as well, but it prints pages of warnings.
    """
    host, _, port = endpoint.rpartition(":")
    if host in (socket.gethostname(), socket.getfqdn()):
        return None
    end = time.monotonic() + timeout_s
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            with contextlib.suppress(OSError), socket.socket(family) as own:
                # A socket can be bound only to an address of this machine.
                own.bind((address[0], 0))
                return address
            with socket.create_connection((host, int(port)), timeout=5):
                return address
        except OSError as error:
            if time.monotonic() > end:
                what = f"no machine answers there ({error.strerror or error})"
                raise _not_met(endpoint, what) from error
        time.sleep(0.2)


def _not_met(endpoint: str, what: str) -> ParallelError:
    hint = "Start the same command on each; parallel.timeout sets how long they wait for each other"
    return ParallelError("P002", what, key=endpoint, suggestion=hint)


def describe_node(words: Sequence[str]) -> str:
    """Return a rank's machine facts for the first rank, as JSON: versions, and the redacted command line."""
    facts = {"host": socket.gethostname(), "versions": run_directory.versions(), "words": redact(words)}
    return json.dumps(facts)


def check_nodes(texts: Sequence[str]) -> None:
    """Reject ranks whose `describe_node` differs from the first rank's in versions or command (P002)."""
    nodes = [json.loads(text) for text in texts]
    for rank, node in enumerate(nodes):
        first, what, hint = nodes[0], None, None
        for name, version in node["versions"].items():
            if version != first["versions"][name]:
                what = f"has {name} {version}, but rank 0 on {first['host']} has {first['versions'][name]}"
                hint = "Install the same versions on all machines"
                break
        if what is None and sorted(node["words"]) != sorted(first["words"]):
            own = " ".join(word for word in node["words"] if word not in first["words"]) or "less"
            of_first = " ".join(word for word in first["words"] if word not in node["words"]) or "less"
            what = f"was started with {own}, but rank 0 on {first['host']} with {of_first}"
            hint = "Start the same command on all machines"
        if what is not None:
            raise ParallelError("P002", what, key=f"rank {rank} on {node['host']}", suggestion=hint)


def can_reach(folder: Path, started: str, timeout_s: float = VISIBLE_S) -> str:
    """Return "" if this machine sees the first rank's run in `folder`, else this machine's name.

    `started` is the time in its `environment.json`.
    """
    end = time.monotonic() + timeout_s
    while run_directory.read_json(folder / run_directory.ENVIRONMENT).get("started") != started:
        if time.monotonic() > end:
            return socket.gethostname()
        time.sleep(0.1)
    return ""


def check_shared(folder: Path, unseen: Sequence[str]) -> None:
    """Reject (E001) a run directory that a machine does not share; `unseen` is `can_reach` of each rank."""
    if hosts := sorted(filter(None, set(unseen))):
        what = f"{', '.join(hosts)} cannot see files that {socket.gethostname()} writes there"
        hint = "Set run.root or run.dir to a folder that all machines share"
        raise MachineError("E001", what, key=str(folder), suggestion=hint)
