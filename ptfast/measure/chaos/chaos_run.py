"""`ptfast chaos`: trains once undisturbed and once under kills, and compares the two bit by bit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ptfast.config.files.frozen import redact
from ptfast.config.overrides import parse, quoted
from ptfast.config.schema import Config
from ptfast.core.errors import ReportedError, SavedStateError
from ptfast.core.resolved import Resolved
from ptfast.core.run_directory import SUMMARY, read_json, write_json
from ptfast.core.units import clock, counted, duration
from ptfast.launch.launcher import resolve_num_ranks
from ptfast.measure.chaos.bit_comparison import TOLERANCE, compare_runs
from ptfast.measure.chaos.kill_plan import Kill, RunShape, draw_kills
from ptfast.measure.chaos.struck_run import MODULE, PLAN, SHAPE, STRIKES, VARIABLE
from ptfast.measure.outputs import OWN_KEYS, check_free, check_new, make_folder, run_ptfast, write_figures
from ptfast.report.loggers import Record, read_records
from ptfast.report.terminal.display import say, terminal_display

EXIT_DIFFERENT = SavedStateError.exit_code
LEAST_LIMIT_S, LIMIT_FACTOR = 120.0, 3.0
"""An attempt may take so many times as long as the undisturbed run, and at least so long."""


def chaos(
    config: Config, words: Sequence[str], *, num_kills: int, mtbf_s: float | None, seed: int, out: Path | None
) -> int:
    """Compare a run that is killed again and again with one that is not; returns 0 if they are equal, else 6.

    `mtbf_s` are the mean seconds of training from kill to kill; None spreads them over the run.
    """
    check_new(out)
    check_free(parse(words), OWN_KEYS, "chaos")
    test = ChaosTest(words, make_folder("chaos", out, config).absolute())
    say(f"{counted(num_kills, 'kill')}, in {test.folder}")
    step_s = test.train_undisturbed()
    shape = RunShape(**read_json(test.folder / SHAPE))
    test.kills = draw_kills(shape, num_kills, seed, None if mtbf_s is None else mtbf_s / step_s)
    test.train_under_kills()
    different, close = [], []
    if test.failure is None:
        tolerates = resolve_num_ranks(config) > 1 and config.determinism != "elastic"
        different, close = compare_runs(test.whole, test.killed, tolerates=tolerates)
    line, code = test.verdict(different, close)
    for text in different[:5]:
        say(f"  {text}")
    fates = [{**asdict(kill), "struck": found} for kill, found in zip_longest(test.kills, test.strikes)]
    facts = {"command": redact(["ptfast", "chaos", *words]), "seed": seed, "mtbf_s": mtbf_s, "kills": fates}
    facts |= {"attempts": test.attempts, "goodput": read_json(test.killed / SUMMARY).get("goodput")}
    facts |= {"differences": different, "within_tolerance": close, "verdict": line, "exit_code": code}
    write_figures("chaos", test.folder, None, facts, "chaos.json")
    say(line)
    return code


@dataclass
class ChaosTest:
    """The two runs of a test, and what became of the kills."""

    words: Sequence[str]
    folder: Path
    kills: list[Kill] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """`kills` are the numbers of those delivered in it; the exit code of one that hung is None."""
    failure: str | None = None
    """Why the killed run did not come to its end."""

    def __post_init__(self) -> None:
        self.whole, self.killed = self.folder / "whole", self.folder / "killed"
        (self.folder / STRIKES).touch()

    @property
    def strikes(self) -> list[Record]:
        """The kills delivered so far, in their order."""
        return read_records(self.folder / STRIKES)

    def train_undisturbed(self) -> float:
        """Train without a kill, and return the seconds of a step with all that comes between two."""
        with terminal_display().status("training without interruption"):
            attempt = self._train(self.whole, [], None)
        if attempt["exit_code"]:
            raise ReportedError(attempt["said"], max(attempt["exit_code"], 1))
        self.whole_s, summary = attempt["wall_s"], read_json(self.whole / SUMMARY)
        say(f"undisturbed: {counted(summary['steps'], 'step')} in {duration(self.whole_s)}")
        return sum(s for cause, s in summary["time_budget"].items() if cause != "start_up") / summary["steps"]

    def train_under_kills(self) -> None:
        """Resume until the run has ended, or an attempt hangs or fails without being struck."""
        # A run that starts beside others may take fewer threads, which changes the order of sums.
        words = [f"backend.threads={Resolved.read(self.whole).threads}", "run.resume=auto"]
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
                self.failure = f"attempt {number} hangs: not over after {duration(limit_s)}"
            elif not attempt["kills"]:
                self.failure = f"attempt {number} fails without being struck: {attempt['said']}"

    def verdict(self, different: Sequence[str], close: Sequence[str]) -> tuple[str, int]:
        """The last line of the command, and its exit code."""
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
        trained = f"{share:{'.0f' if share >= 1 else '.1g'}} % of the time was training"
        line = f"{done} of {total} kills survived, {equal}; {trained}"
        if done < total:
            line += f"; {counted(total - done, 'kill')} never found a moment, first {self.kills[done]}"
        return line, EXIT_DIFFERENT if different or done < total else 0

    def _train(self, run_dir: Path, words: Sequence[str], limit_s: float | None) -> dict[str, Any]:
        """Train in a process of its own, for `limit_s` at most."""
        write_json(self.folder / PLAN, [asdict(kill) for kill in self.kills])
        done, start_s = len(self.strikes), time.monotonic()
        log = self.folder / f"{run_dir.name}-{len(self.attempts) + 1:02d}.log"
        command = ["train", *self.words, *words, f"run.dir={quoted(run_dir)}"]
        variables = {VARIABLE: str(self.folder)}
        code, said = run_ptfast(command, log, module=MODULE, limit_s=limit_s, **variables)
        facts = {"wall_s": time.monotonic() - start_s, "exit_code": code, "log": log, "said": said}
        return facts | {"kills": list(range(done, len(self.strikes)))}
