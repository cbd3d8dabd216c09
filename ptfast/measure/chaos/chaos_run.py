"""`ptfast chaos`: train once undisturbed and once under kills, and compare the two bit by bit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptfast.config.files.frozen import redact
from ptfast.config.overrides import parse, quoted
from ptfast.config.schema import Config
from ptfast.core.auto_choices import read_choices
from ptfast.core.errors import COMMAND_LINE, ConfigError, ReportedError, SavedStateError
from ptfast.core.run_directory import SUMMARY, read_json, write_json
from ptfast.core.tensors.checkpoint_files import read_checkpoint
from ptfast.core.tensors.dtensors import whole
from ptfast.core.units import clock, counted, duration
from ptfast.launch.launcher import resolve_world_size
from ptfast.measure.chaos.kills import MODULE, PLAN, SHAPE, STRIKES, VARIABLE, Kill, RunShape, draw_kills
from ptfast.measure.outputs import check_new, make_folder, run_ptfast, write_results
from ptfast.report.loggers import METRICS_FILE, USAGE, Record, read_records
from ptfast.report.terminal.display import say, terminal_display

EXIT_DIFFERENT = SavedStateError.exit_code
LEAST_LIMIT_S, LIMIT_FACTOR = 120.0, 3.0
"""Time limit of an attempt: this many times the undisturbed run, and at least this many seconds."""
_FREE = ("samples_per_s", "step_s", "timed_steps", "timed_samples", "timed_s", "peak_memory_bytes", *USAGE)
"""Metrics that depend on time or the machine, and may differ."""
TOLERANCE = 1e-6
"""Relative tolerance of training losses on several ranks: interruptions change the order of their sums."""
_SUMS = {
    *("loss", "window_loss", "epoch_loss", "best_value"),
    *("recent_losses", "best_states", "largest_spike", "best_figures"),
}


def chaos(config: Config, words: Sequence[str], *, num_kills: int, seed: int, out: Path | None) -> int:
    """Compare a repeatedly killed run with an undisturbed one; return 0 if they are equal, else 6."""
    check_new(out)
    for argument in parse(words):
        if argument.key in ("run.dir", "run.resume", "run.name"):
            what, hint = "differs between the runs of chaos", "Leave it out; --out sets it"
            raise ConfigError("C011", what, key=argument.key, place=COMMAND_LINE, suggestion=hint)
    test = ChaosTest(words, make_folder("chaos", out, config).absolute())
    say(f"{counted(num_kills, 'kill')}, in {test.folder}")
    test.train_undisturbed()
    shape = RunShape(**read_json(test.folder / SHAPE))
    test.kills = draw_kills(shape, num_kills, seed)
    test.train_under_kills()
    different, close = [], []
    if test.failure is None:
        tolerates = resolve_world_size(config) > 1 and config.determinism != "elastic"
        different, close = compare_runs(test.whole, test.killed, tolerates=tolerates)
    line, code = test.verdict(different, close)
    for text in different[:5]:
        say(f"  {text}")
    fates = [{**asdict(kill), "struck": found} for kill, found in zip_longest(test.kills, test.strikes)]
    facts = {"command": redact(["ptfast", "chaos", *words]), "seed": seed, "kills": fates}
    facts |= {"attempts": test.attempts, "goodput": read_json(test.killed / SUMMARY).get("goodput")}
    facts |= {"differences": different, "within_tolerance": close, "verdict": line, "exit_code": code}
    write_results("chaos", test.folder, None, facts, "chaos.json")
    say(line)
    return code


@dataclass
class ChaosTest:
    """The two runs of a test, and the outcome of each kill."""

    words: Sequence[str]
    folder: Path
    kills: list[Kill] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Results of each attempt: `kills` has the indices of its kills; `exit_code` is None if it hung."""
    failure: str | None = None
    """Why the killed run did not finish."""

    def __post_init__(self) -> None:
        self.whole, self.killed = self.folder / "whole", self.folder / "killed"
        (self.folder / STRIKES).touch()

    @property
    def strikes(self) -> list[Record]:
        """The kills delivered so far, in order."""
        return read_records(self.folder / STRIKES, dict[str, Any])

    def train_undisturbed(self) -> None:
        """Train without kills."""
        with terminal_display().status("training without interruption"):
            attempt = self._train(self.whole, [], None)
        if attempt["exit_code"]:
            raise ReportedError(attempt["said"], max(attempt["exit_code"], 1))
        self.whole_s, steps = attempt["wall_s"], read_json(self.whole / SUMMARY)["steps"]
        say(f"undisturbed: {counted(steps, 'step')} in {duration(self.whole_s)}")

    def train_under_kills(self) -> None:
        """Resume until the run finishes, an attempt hangs, or an attempt fails without a kill."""
        # Fix the number of threads: a run on a busy machine may choose fewer and change the order of sums.
        threads = read_choices(self.whole).get("backend.threads")
        words = [f"backend.threads={threads.value}"] if threads is not None else []
        words.append("run.resume=auto")
        limit_s, total, left_s = max(LEAST_LIMIT_S, LIMIT_FACTOR * self.whole_s), len(self.kills), None
        while self.failure is None:
            number, done = len(self.attempts) + 1, len(self.strikes)
            with terminal_display().status(f"{done} of {total} kills, attempt {number}", left_s):
                attempt = self._train(self.killed, words, limit_s)
            self.attempts.append(attempt)
            done, code = len(self.strikes), attempt["exit_code"]
            left_s = sum(each["wall_s"] for each in self.attempts) / number * (total - done) + self.whole_s
            struck = "; ".join(str(self.kills[kill]) for kill in attempt["kills"]) or "not struck"
            eta = f"  eta {clock(left_s)}" if code else ""
            say(f"{done}/{total}  attempt {number}, {duration(attempt['wall_s'])}: {struck}{eta}")
            if code == 0:
                return
            if code is None:
                self.failure = f"attempt {number} hangs: not finished after {duration(limit_s)}"
            elif not attempt["kills"]:
                self.failure = f"attempt {number} fails without a kill: {attempt['said']}"

    def verdict(self, different: Sequence[str], close: Sequence[str]) -> tuple[str, int]:
        """Return the last line of the command, and its exit code."""
        done, total = len(self.strikes), len(self.kills)
        if self.failure is not None:
            last = f" after {self.kills[done - 1]}" if done else ""
            return f"{max(done - 1, 0)} of {total} kills survived{last}: {self.failure}", EXIT_DIFFERENT
        equal = "all bits equal"
        if different:
            equal = f"but {counted(len(different), 'difference')} from the undisturbed run"
        elif close:
            equal = f"all bits of weights and optimizer equal, training losses to {TOLERANCE:g}"
        share = 100 * read_json(self.killed / SUMMARY)["goodput"]["training"]
        trained = f"training took {share:{'.0f' if share >= 1 else '.1g'}} % of the time"
        line = f"{done} of {total} kills survived, {equal}; {trained}"
        if done < total:
            line += f"; {counted(total - done, 'kill')} could not be delivered, first {self.kills[done]}"
        return line, EXIT_DIFFERENT if different or done < total else 0

    def _train(self, run_dir: Path, words: Sequence[str], limit_s: float | None) -> dict[str, Any]:
        """Train in a separate process, for at most `limit_s`."""
        write_json(self.folder / PLAN, [asdict(kill) for kill in self.kills])
        done, start_s = len(self.strikes), time.monotonic()
        log = self.folder / f"{run_dir.name}-{len(self.attempts) + 1:02d}.log"
        command = ["train", *self.words, *words, f"run.dir={quoted(run_dir)}"]
        variables = {VARIABLE: str(self.folder)}
        code, said = run_ptfast(command, log, module=MODULE, limit_s=limit_s, **variables)
        facts = {"wall_s": time.monotonic() - start_s, "exit_code": code, "log": log, "said": said}
        return facts | {"kills": list(range(done, len(self.strikes)))}


def compare_runs(left: Path, right: Path, *, tolerates: bool = False) -> tuple[list[str], list[str]]:
    """Return the differences between two runs and, with `tolerates`, the nearly equal training losses."""
    states = [read_checkpoint(run / "saved" / "last") for run in (left, right)]
    logs = [read_records(run / METRICS_FILE) for run in (left, right)]
    close: list[str] | None = [] if tolerates else None
    found = list(differences(states[0].model, states[1].model, "model"))
    found += differences(states[0].training, states[1].training, "training")
    for name in ("progress", "best_figures", "stream"):
        one, other = (state.facts.get(name) for state in states)
        found += differences(one, other, name, close)
    one, other = ((run / "saved" / "best").resolve().name for run in (left, right))
    found += differences(one, other, "saved.best")
    for split in sorted({line["split"] for log in logs for line in log}):
        one, other = ([line for line in log if line["split"] == split] for log in logs)
        found += differences(one, other, f"{METRICS_FILE}.{split}", close if split == "train" else None)
    return found, close or []


def differences(left: Any, right: Any, place: str, close: list[str] | None = None) -> Iterator[str]:
    """Yield bitwise differences between nested structures; collect nearly equal sums of losses in `close`."""
    left, right = whole(left), whole(right)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            yield f"{place}: {left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
        elif count := int((_bytes(left) != _bytes(right)).any(-1).sum()):
            yield f"{place}: {count:,} of {left.numel():,} values differ"
    elif isinstance(left, dict) and isinstance(right, dict):
        for name in dict.fromkeys(name for name in (*left, *right) if name not in _FREE):
            if (name in left) != (name in right):
                yield f"{place}.{name} is missing"
            else:
                yield from differences(left[name], right[name], f"{place}.{name}", close)
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        yield from differences(dict(enumerate(left)), dict(enumerate(right)), place, close)
    elif type(left) is not type(right) or repr(left) != repr(right):
        pair: Any = left, right
        text = f"{place}: {left!r} and {right!r}"
        are_sums = not _SUMS.isdisjoint(place.split(".")) and all(isinstance(each, float) for each in pair)
        if close is not None and are_sums and math.isclose(*pair, rel_tol=TOLERANCE):
            close.append(text)
        else:
            yield text


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(tensor.numel(), 1).view(torch.uint8)
