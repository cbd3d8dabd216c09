"""What several machines must have in common before they train together: versions, command and folder."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ptfast.config.files.frozen import redact
from ptfast.core import run_directory
from ptfast.core.errors import MachineError, ParallelError

VISIBLE_S = 60
"""How long a new file may stay invisible to other machines: NFS keeps what it knows of a folder so long."""


@dataclass(frozen=True)
class Node:
    """A rank's machine, as it tells the first rank."""

    host: str
    versions: dict[str, str | None]
    words: list[str]
    """The command line, without secrets."""

    @classmethod
    def this(cls, words: Sequence[str]) -> Node:
        """That of this process."""
        return cls(socket.gethostname(), run_directory.versions(), redact(words))

    def json(self) -> str:
        """All of it as text."""
        return json.dumps(asdict(self))


def check_nodes(texts: Sequence[str]) -> None:
    """Refuse ranks that were started with other versions or another command than the first.

    Args:
        texts: `Node.json` of each rank.

    Raises:
        ParallelError: P002, naming the first difference.
    """
    nodes = [Node(**json.loads(text)) for text in texts]
    for rank, node in enumerate(nodes):
        first = nodes[0]
        for name, version in node.versions.items():
            if version != first.versions[name]:
                what = f"has {name} {version}, and rank 0 on {first.host} has {first.versions[name]}"
                raise _other(rank, node, what, "Install the same versions on all machines")
        if sorted(node.words) != sorted(first.words):
            own, of_first = (
                " ".join(word for word in one.words if word not in other.words) or "less"
                for one, other in ((node, first), (first, node))
            )
            what = f"was started with {own}, and rank 0 on {first.host} with {of_first}"
            raise _other(rank, node, what, "Start the same command on all machines")


def _other(rank: int, node: Node, what: str, hint: str) -> ParallelError:
    return ParallelError("P002", what, key=f"rank {rank} on {node.host}", suggestion=hint)


def can_reach(folder: Path, started: str, timeout_s: float = VISIBLE_S) -> str:
    """Return this machine's name if `folder` is not the one that the first rank has begun a run in, else "".

    Args:
        started: when, as the folder's `environment.json` says it.
    """
    end = time.monotonic() + timeout_s
    while run_directory.read_json(folder / run_directory.ENVIRONMENT).get("started") != started:
        if time.monotonic() > end:
            return socket.gethostname()
        time.sleep(0.1)
    return ""


def check_shared(folder: Path, unseen: Sequence[str]) -> None:
    """Refuse a run directory that is not one folder on all machines.

    Args:
        unseen: what `can_reach` returns on each rank.

    Raises:
        MachineError: E001.
    """
    if hosts := sorted(filter(None, set(unseen))):
        what = f"{', '.join(hosts)} cannot see what {socket.gethostname()} writes there"
        hint = "Set run.root or run.dir to a folder that all machines share"
        raise MachineError("E001", what, key=str(folder), suggestion=hint)
