"""What the stages of `scripts/gpu_check` share: parts, their record, and commands within a time limit."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD, REPORT, LOG, TESTS = "gpu_check.json", "gpu_check.md", "gpu_check.log", "tests.jsonl"
"""Files of a check: figures by stage, the same as a table, all output, and the tests that have run."""
Figures = dict[str, Any]


class NotShownError(Exception):
    """Why a part cannot be shown on this machine; `figures` are of what ran nevertheless."""

    def __init__(self, why: str, figures: Figures | None = None) -> None:
        super().__init__(why)
        self.figures = figures or {}


class FailedError(Exception):
    """What went wrong in a part; `figures` are those known."""

    def __init__(self, why: str, figures: Figures | None = None) -> None:
        super().__init__(why)
        self.figures = figures or {}


class OutOfTimeError(Exception):
    """The stage's time is over."""


class Part(NamedTuple):
    """One entry of the record."""

    name: str
    run: Callable[[Check], Figures]
    needs_s: float = 60
    """Seconds below which it is left for the next call."""
    resumes: bool = False
    """Continues where the last call stopped, instead of from its start."""


@dataclass
class Check:
    """One call: where it writes, how long it may take, and what stands in for a GPU."""

    out: Path
    scratch: Path
    limit_s: float = 480
    quick: bool = False
    emulated: bool = False
    nccl: bool = False
    """The emulation has stand-ins for NCCL."""
    data: Path | None = None
    python_path: tuple[Path, ...] = ()
    """Where packages that this machine lacks are installed."""
    gpu: str = ""
    record: Record | None = None
    start_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.monotonic() - self.start_s)

    def environment(self, given: Mapping[str, str] | None = None, emulate: bool = True) -> dict[str, str]:
        """Variables of a child: it finds ptfast, its packages, and, if need be, computes a GPU's ops."""
        paths = [ROOT, *self.python_path]
        if self.emulated:
            paths += [ROOT / "tests" / "support", *([ROOT / "scripts/gpu/emulated"] if emulate else [])]
        path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
        own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PTFAST_CACHE": str(self.scratch / "cache")}
        threads = {"OMP_NUM_THREADS": "1"} if self.emulated else {}
        return {**os.environ, **threads, **own, **(given or {})}

    def python(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        emulate: bool = True,
        ok: tuple[int, ...] = (0,),
    ) -> str:
        """Run `python WORDS`, show what it prints as it comes, and return it.

        Raises FailedError on an exit code other than those of `ok`, and OutOfTimeError when the stage's time
        is over; the command and all that it started is killed then.
        """
        command = [sys.executable, *map(str, words)]
        said, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")
        with (
            (self.out / LOG).open("a", encoding="utf-8") as log,
            subprocess.Popen(
                command,
                cwd=cwd or self.scratch,
                env=self.environment(env, emulate),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
            selectors.DefaultSelector() as selector,
        ):
            assert process.stdout
            selector.register(process.stdout, selectors.EVENT_READ)
            log.write(f"\n$ {' '.join(command[1:])}\n")
            try:
                while self.left_s > 0:
                    if not selector.select(timeout=1):
                        continue
                    if not (block := os.read(process.stdout.fileno(), 65536)):
                        break
                    said.append(decoder.decode(block))
                    print(said[-1], end="", flush=True)
                    log.write(said[-1])
                else:
                    raise OutOfTimeError
                code = process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        text = "".join(said)
        if code not in ok:
            last = (text.strip().splitlines() or ["no output"])[-1]
            raise FailedError(f"exit code {code}: {last}")
        return text

    def ptfast(self, *words: object, **given: Any) -> str:
        """Run `ptfast WORDS` as `python` does."""
        return self.python("-m", "ptfast", *words, **given)


class Record:
    """The file that one call leaves for the next: what became of each part, by stage."""

    def __init__(self, out: Path) -> None:
        self.out, self.values = out, {"machine": {}, "stages": {}}
        with contextlib.suppress(FileNotFoundError):
            self.values = json.loads((out / RECORD).read_text(encoding="utf-8"))

    def entries(self, stage: int) -> dict[str, Any]:
        """What became of the parts of a stage so far."""
        return self.values["stages"].setdefault(str(stage), {})

    def forget(self, stage: int) -> None:
        """Have parts of a stage that did not pass run again."""
        kept = {name: each for name, each in self.entries(stage).items() if each["state"] == "passed"}
        self.values["stages"][str(stage)] = kept

    def write(self) -> None:
        """Write the record, and the same as a page of markdown."""
        for name, text in ((RECORD, json.dumps(self.values, indent=1)), (REPORT, self.page())):
            (self.out / f"{name}.new").write_text(text + "\n", encoding="utf-8")
            (self.out / f"{name}.new").replace(self.out / name)

    def page(self) -> str:
        """A table of each stage."""
        machine = ", ".join(f"{value}" for value in self.values["machine"].values())
        lines = [f"## GPU check: {machine}"]
        for stage, entries in sorted(self.values["stages"].items()):
            if not entries:
                continue
            lines += [f"\n### Stage {stage}\n", "| part | | seconds | figures |", "|---|---|--:|---|"]
            for name, entry in entries.items():
                facts = [entry["gpu"]] if entry["gpu"] != self.values["machine"].get("gpu", "") else []
                facts += [entry["why"]] if entry["why"] else []
                facts += [f"{key} {value}" for key, value in entry["figures"].items()]
                shown = "; ".join(facts).replace("|", "/").replace("\n", " ")
                lines.append(f"| {name} | {entry['state']} | {entry['seconds']:.0f} | {shown} |")
        return "\n".join(lines)


def run_stage(stage: int, parts: list[Part], check: Check, record: Record) -> int:
    """Run the parts that the record lacks; returns 0, 1 if one has failed, or 3 if time left some out."""
    check.record, entries = record, record.entries(stage)
    left: list[str] = []
    for index, part in enumerate(parts):
        if part.name in entries:
            continue
        if check.left_s < part.needs_s:
            left = [each.name for each in parts[index:] if each.name not in entries]
            break
        print(f"\n### {stage}: {part.name}\n", flush=True)
        begun_s, fresh = time.monotonic(), check.left_s > 0.95 * check.limit_s
        entry: dict[str, Any] = {"state": "passed", "why": "", "figures": {}}
        try:
            entry["figures"] = part.run(check)
        except NotShownError as error:
            entry.update(state="not shown", why=str(error), figures=error.figures)
        except FailedError as error:
            entry.update(state="failed", why=str(error), figures=error.figures)
        except OutOfTimeError:
            if part.resumes or not fresh:
                left = [each.name for each in parts[index:] if each.name not in entries]
                break
            entry.update(state="failed", why=f"does not end within {check.limit_s:.0f} s")
        except Exception as error:
            # The other parts of the stage run nevertheless.
            traceback.print_exc()
            entry.update(state="failed", why=f"{type(error).__name__}: {error}")
        entry["gpu"], entry["seconds"] = check.gpu, round(time.monotonic() - begun_s, 1)
        entries[part.name] = entry
        record.write()
        print(f"{part.name}: {entry['state']} {entry['why']} {entry['figures'] or ''}".rstrip(), flush=True)
    record.write()
    states = [entry["state"] for entry in entries.values()]
    counts = ", ".join(f"{states.count(each)} {each}" for each in ("passed", "failed", "not shown"))
    print(f"\nstage {stage}: {counts}, {len(left)} left; see {check.out / REPORT}", flush=True)
    for name, entry in entries.items():
        if entry["state"] != "passed":
            print(f"  {entry['state']}: {name}: {entry['why']}")
    if left:
        print(f"  left for the next call of the same stage: {', '.join(left)}")
        return 3
    return 1 if "failed" in states else 0
