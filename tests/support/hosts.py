"""Two hosts on this machine: network namespaces with names and addresses of their own, joined by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from running import WITH_TESTS

HOSTS = {"ptfast-a": "10.213.77.1", "ptfast-b": "10.213.77.2"}
"""Names of the namespaces, which are those of the hosts, with their addresses."""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Hosts named as in `HOSTS`, that find each other by name; skips where that takes more rights."""
    if os.name != "posix" or os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("network namespaces take root, ip and unshare")
    names = list(HOSTS)
    known = "".join(f"{address} {name}\n" for name, address in HOSTS.items())
    folders = [Path("/etc/netns", name) for name in names]
    try:
        for name, folder in zip(names, folders, strict=True):
            try:
                _run("ip", "netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces: {error.stderr.strip()}")
            # `ip netns exec` lays these files over those in /etc.
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        _run(
            "ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "wire", "netns", names[1]
        )
        for name, address in HOSTS.items():
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _run("ip", "-n", name, "link", "set", device, "up")
        yield
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def on_host(
    name: str, *words: str, told: Mapping[str, str] = {}, private: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`python -m WORDS...` on one of the hosts; all of its processes are killed in the end.

    Args:
        told: variables of its environment.
        private: a folder that the host has for itself, empty.
    """
    command = ["ip", "netns", "exec", name, "unshare", "--uts", "--pid", "--fork"]
    command += ["--kill-child", "--mount-proc"]
    mount = f"mount -t tmpfs none '{private}' && " if private else ""
    command += ["sh", "-c", f'{mount}hostname "$0" && exec "$@"', name, sys.executable, "-m", *words]
    process = subprocess.Popen(
        command,
        env={**os.environ, **WITH_TESTS, "GLOO_SOCKET_IFNAME": "wire", **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
