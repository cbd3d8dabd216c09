"""One rank of a run: build it, train it, write its results, and report a failure once."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ptfast.config.schema import Config
from ptfast.core import machine, run_directory
from ptfast.core.clock import STARTED_VARIABLE, Clock
from ptfast.core.distributed import (
    Ranks,
    barrier,
    destroy_process_group,
    init_process_group,
    is_connection_lost,
    world,
)
from ptfast.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    MachineError,
    ParallelError,
    PtfastError,
    SavedStateError,
    error_line,
    exit_code_of,
    summary_of,
    traceback_of,
)
from ptfast.core.plain_display import Display, LastingOutput, show_warnings_once
from ptfast.core.protocols import Logger
from ptfast.core.tensors.checkpoint_folders import MANIFEST, list_checkpoints
from ptfast.core.units import num_bytes
from ptfast.launch.resume import next_commands, resume_command
from ptfast.report.goodput import Attempt, read_goodput
from ptfast.report.panel import device_name, results, show_panel
from ptfast.report.terminal import json_lines
from ptfast.report.terminal.display import build_display
from ptfast.run import Run
from ptfast.training.hangs.hang_watch import HangWatch
from ptfast.training.stopping import Preempted, Signals, Stopped, caught_signals

CUT_SHORT = ("paused", "preempted", "interrupted")
"""Statuses of a run that stopped early with a checkpoint, and can be resumed."""
EXIT_CODES = {
    "finished": EXIT_OK,
    "stopped": EXIT_OK,
    "paused": EXIT_OK,
    "preempted": EXIT_PREEMPTED,
    "interrupted": EXIT_INTERRUPTED,
}


@dataclass(frozen=True)
class Outcome:
    """How a rank ended."""

    status: str = "failed"
    exit_code: int = EXIT_BUG
    error_line: str | None = None
    together: bool = True
    """False if this rank leaves without waiting for the others."""


def train(config: Config, folder: Path, *, ranks: Ranks, checkpoint_folder: Path | None) -> int:
    """Train on this rank and return its exit code; the first rank writes summary, metrics and report.

    The caller has checked the files of `checkpoint_folder`, the checkpoint to resume.
    """
    ranks = replace(ranks, grouped=config.parallel.wrap_one_rank and config.parallel.strategy != "single")
    clock = Clock(max(time.monotonic() - float(os.environ.get(STARTED_VARIABLE, time.monotonic())), 0.0))
    part = RankPart(config, folder, ranks, build_display(ranks.rank), clock)
    if ranks.is_first:
        begun = (
            0 if checkpoint_folder is None else run_directory.read_json(checkpoint_folder / MANIFEST)["step"]
        )
        part.attempt = Attempt(folder, clock, begun)
    outcome = Outcome()
    # Keep the signal handlers until all is written: torchrun sends another signal to ranks that exit late.
    limit = config.run.hang_timeout
    limit_s = None if limit == "auto" else limit.seconds
    with (
        caught_signals(part.display, ranks) as signals,
        HangWatch(folder, ranks, part.display, clock, signals, limit_s)
        if machine.on_main_thread()
        else contextlib.nullcontext(),
    ):
        try:
            run = part.build(checkpoint_folder, signals)
            show_panel(dict(config), run)
            outcome = part.fit(run)
        except (Exception, SystemExit, KeyboardInterrupt, Preempted) as error:
            outcome, raised = part.ended_by(error, signals)
            if raised is error:
                raise
            if raised is not None:
                raise raised from error
        finally:
            signals.closing = True
            part.close(outcome)
        # torchrun ends all ranks as soon as one fails, so no rank exits before everything is written.
        if outcome.together:
            barrier(ranks)
            destroy_process_group()
    return outcome.exit_code


@dataclass
class RankPart:
    """A rank's part in a run, from its start to its last output file."""

    config: Config
    folder: Path
    ranks: Ranks
    display: Display
    clock: Clock
    logger: Logger = field(default_factory=Logger)
    run: Run | None = None
    """None until the run is built."""
    resumed_step: int | None = None
    """The step from which a resumed run starts."""
    attempt: Attempt | None = None

    def build(self, checkpoint_folder: Path | None, signals: Signals) -> Run:
        """Join the other ranks, build the run, and open its loggers on the first rank."""
        config, ranks = self.config, self.ranks
        if ranks.distributed:
            from ptfast.techniques.backend.torch_settings import resolve_device

            init_process_group(resolve_device(config.device, ranks), ranks, config.parallel.timeout.seconds)
        from ptfast.launch.run_loggers import build_loggers, open_loggers
        from ptfast.training.build import build

        # Build the loggers first, to report a missing package before the data is loaded.
        loggers = build_loggers(config) if ranks.is_first else {}
        self.run = run = build(
            config,
            ranks=ranks,
            folder=self.folder,
            display=self.display,
            clock=self.clock,
            checkpoint_folder=checkpoint_folder,
            # The first machine has checked the checkpoint already; one rank of each other machine does.
            check_state=ranks.local_rank == 0 and not ranks.is_first,
        )
        signals.run, self.clock = run, run.clock
        self.resumed_step = run.progress.step if checkpoint_folder is not None else None
        run.stop_signal = signals.received
        if self.attempt is not None:
            self.attempt.clock = run.clock
            path = self.folder / run_directory.ENVIRONMENT
            threads = run.choices.get("backend.threads")
            used = {"device": device_name(run), "threads": threads, "ranks": ranks.world_size}
            run_directory.write_json(path, run_directory.read_json(path) | used)
            self.logger = run.logger = open_loggers(run, loggers, self.attempt)
        return run

    def fit(self, run: Run) -> Outcome:
        """Train the run, with the debugging aids of the config."""
        from ptfast.profiling.debugging import debugging
        from ptfast.techniques.checkpointing.activation_checkpointing import naming_mismatch
        from ptfast.training.fit import fit

        self.display.start(run.progress.step, run.total_steps, run.train_loader.plan.steps_per_epoch)
        debug = self.config.debug
        looking = debugging(run=run, **vars(debug))
        compilation = run.compilation
        compiling = contextlib.nullcontext() if compilation is None else compilation.booking(run.clock)
        with looking, compiling, naming_mismatch(self.config.checkpointing.mode):
            status = fit(run)
        if self.ranks.is_first and status in ("finished", "stopped", "paused"):
            from ptfast.training.examples import examples

            run.clock.to("evaluation")
            # A user's task may have no predictions or unusual ones, and its data may not be pairs.
            with contextlib.suppress(Exception, Stopped):
                if found := examples(run):
                    run_directory.write_json(run.folder / run_directory.EXAMPLES, found)
        return Outcome(status, EXIT_CODES[status])

    def ended_by(self, error: BaseException, signals: Signals) -> tuple[Outcome, BaseException | None]:
        """Return the outcome of an error, and the error to raise; None if a signal caused it."""
        run, ranks = self.run, self.ranks
        where = f"at step {run.progress.step}, without saving" if run else "before the first step"
        signalled = "interrupted" if signals.exit_code == EXIT_INTERRUPTED else "preempted"
        if isinstance(error, Preempted):
            return Outcome(
                signalled, signals.exit_code, str(error) or f"stopped {where}", together=False
            ), None
        if isinstance(error, KeyboardInterrupt):
            return Outcome("interrupted", EXIT_INTERRUPTED, f"interrupted {where}{signals.place}"), error
        is_lost = ranks.distributed and is_connection_lost(error)
        known: PtfastError | None = None
        if isinstance(error, PtfastError):
            known = error
        elif is_lost and signals.received is None:
            known = ParallelError("P001", "another rank died or hangs", key=str(self.folder))
        elif machine.is_memory_error(error):
            known = out_of_memory(self.config)
        elif run is not None:
            from ptfast.training.user_code import failure

            known = failure(error, run)
            if known is None and run.progress.step == self.resumed_step and isinstance(error, Exception):
                what = f"the first step from this checkpoint raises {summary_of(error)}"
                hint = "Resume from another saved/step-N folder, or add --traceback"
                known = SavedStateError("S001", what, key="run.resume", suggestion=hint)
        if known is not None:
            return Outcome(exit_code=known.exit_code, error_line=str(known)), known
        if not is_lost:
            return Outcome(error_line=summary_of(error)), error
        # Another rank received the signal too, and has stopped waiting for data.
        line = f"stopped {where}: another rank has left"
        return Outcome(signalled, signals.exit_code, line, together=False), None

    def close(self, outcome: Outcome) -> None:
        """Stop the data loaders; the first rank also writes summary, metrics and report.

        A failure to write never hides a failure of the run itself.
        """
        if not outcome.together:
            self.display.warn(str(outcome.error_line))
        self.clock.to("closing" if self.run is not None else "start_up")
        with contextlib.suppress(Exception):
            if self.run is not None:
                self.run.close()
        if not self.ranks.is_first:
            return
        from ptfast.report.html.run_report import write_report

        run, display, failure, roofline = self.run, self.display, None, None
        path = self.folder / run_directory.SUMMARY
        if run is not None and outcome.error_line is None:
            from ptfast.profiling.roofline import roofline_of

            try:
                may_measure = outcome.status in ("finished", "stopped", "paused")
                roofline = roofline_of(run, may_measure=may_measure)
            except Exception as error:
                display.warn(f"the machine's limits could not be computed: {type(error).__name__}: {error}")
        # Write the summary first: closing loggers may take long, and the system may end the run meanwhile.
        with contextlib.suppress(PtfastError):
            run_directory.write_json(path, self.summary(outcome, roofline))
        try:
            self.logger.close()
        except PtfastError as error:
            if outcome.error_line is None:
                failure, outcome = error, Outcome(exit_code=error.exit_code, error_line=str(error))
        summary = self.summary(outcome, roofline)
        try:
            run_directory.write_json(path, summary)
            if run is not None and run.progress.step:
                write_report(self.folder)
        except PtfastError as error:
            if outcome.error_line is None:
                failure = error
        except Exception as error:
            display.warn(f"report.html could not be written: {type(error).__name__}: {error}")
        if outcome.error_line is None and failure is None:
            if (skipped := summary.get("skipped_files")) is not None:
                some = ", ".join(skipped["first"]) + ", ..." * (skipped["count"] > len(skipped["first"]))
                display.warn(f"skipped {skipped['count']:,} files that cannot be read: {some}")
            display.finish(summary)
        display.close()
        if failure is not None:
            raise failure

    def summary(self, outcome: Outcome, roofline: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the content of `summary.json`: the outcome, the metrics, and all wall time by cause."""
        run = self.run
        summary: dict[str, Any] = {"status": outcome.status, "exit_code": outcome.exit_code}
        if outcome.error_line is not None:
            summary["error"] = outcome.error_line
        if run is not None:
            summary |= results(run)
        budget = self.clock.ledger()
        summary |= {"wall_s": sum(budget.values()), "time_budget": budget}
        if self.attempt is not None:
            self.attempt.write(summary.get("steps", 0), outcome.status)
            summary["goodput"] = read_goodput(self.folder)
        if roofline is not None:
            summary["roofline"] = roofline
        summary |= {"recipe": self.config.recipe, "run_dir": str(self.folder)}
        if outcome.status in CUT_SHORT and summary.get("steps"):
            summary["resume"] = resume_command(self.folder)
        elif run is not None and not outcome.exit_code and list_checkpoints(self.folder / "saved"):
            summary["next"] = next_commands(self.folder, run.choices.get("task"))
        return summary


def out_of_memory(config: Config) -> MachineError:
    limit, name = machine.memory_limit(config.device)
    return MachineError(
        "E002",
        f"not enough memory for a step ({name}: {num_bytes(limit)})",
        key="batch_size",
        value=config.batch_size,
        suggestion="ptfast find batch finds a size that fits; or use precision=amp, checkpointing=full or "
        "gradients.accumulate=2",
    )


def report_failure(folder: Path, error: BaseException) -> bool:
    """Report this rank's failure to the launcher; return False if another rank has reported before."""
    word: dict[str, Any] = {
        "line": error_line(error),
        "summary": summary_of(error),
        "exit_code": exit_code_of(error),
        "parts": error.parts if isinstance(error, PtfastError) else None,
        "traceback": traceback_of(error),
    }
    try:
        with (folder / run_directory.FAILURE).open("x") as file:
            json.dump(word, file, default=str)
    except FileExistsError:
        return False
    except OSError:
        pass  # for example a full disk: the launcher finds no report, and prints the error
    return True


def leave(exit_code: int) -> NoReturn:
    """Exit this rank immediately, after everything is written.

    During the interpreter's normal exit, gloo's remaining threads sometimes abort the process.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


def main() -> None:
    """Run `python -m ptfast.launch.rank_main RUN_DIR STATE PARENT`: one rank of a launched run.

    STATE is empty for a new run. The exit code is 0 unless this rank fails: see `summary.json`.
    """
    folder, state, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    machine.die_with_parent(parent)
    show_warnings_once()
    LastingOutput.install()
    if os.environ.get(json_lines.VARIABLE):
        sys.stdout = json_lines.JsonLines(sys.stdout)
    try:
        from ptfast.config.read import load_config

        _, config = load_config(folder / run_directory.CONFIG, trusted=True)
        train(config, folder, ranks=world() or Ranks(), checkpoint_folder=Path(state) if state else None)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if report_failure(folder, error) and not run_directory.read_json(folder / run_directory.FAILURE):
            print(error_line(error), file=sys.stderr, flush=True)
        # Do not wait for the other ranks, which may wait for this one in a collective.
        leave(exit_code_of(error))
    leave(EXIT_OK)


if __name__ == "__main__":
    main()
