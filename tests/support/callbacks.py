"""Callbacks for ranks. They import no test: that would take away what torchrun has told the rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from ptfast.core.protocols import Callback
from ptfast.core.tensors import checkpoint_files


class Misfortune(Callback):
    """One rank gets the signal that the file `misfortune` names, after a step."""

    def on_step(self, run: Any, step: int) -> None:
        if step == 1:
            Path(f"pid-{run.ranks.rank}").write_text(str(os.getpid()))
        rank, at_step, name = Path("misfortune").read_text().split()
        if run.ranks.rank == int(rank) and step == int(at_step):
            os.kill(os.getpid(), signal.Signals[name])


class KilledWhileSaving(Callback):
    """The first rank is killed between the files of all ranks and the manifest, at some step."""

    def on_start(self, run: Any) -> None:
        seal = checkpoint_files._seal

        def killed(draft: Path, step: int, *others: Any) -> Path:
            if step == int(Path("killed-at").read_text()):
                os.kill(os.getpid(), signal.SIGKILL)
            return seal(draft, step, *others)

        checkpoint_files._seal = killed


class Slow(Callback):
    """Steps that take long enough to be interrupted."""

    def on_step(self, run: Any, step: int) -> None:
        if step == 2:
            Path(f"pid-{run.ranks.rank}").write_text(str(os.getpid()))
        time.sleep(0.05)
