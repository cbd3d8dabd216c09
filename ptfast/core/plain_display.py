"""The display in plain lines of text, for pipes and files; the live display builds on it."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ptfast.core.clock import label
from ptfast.core.errors import INSTALLED, PACKAGE, cannot_write, error_line, one_line
from ptfast.core.units import (
    TOO_SHORT,
    clock,
    counted,
    duration,
    format_metric,
    grouped,
    labelled,
    listed,
    num_bytes,
)

Metrics = Mapping[str, Any]
Rows = Sequence[tuple[str, str]]
STATUS_STYLES = {"finished": "green", "stopped": "green", "failed": "red"}


class LastingOutput(io.TextIOWrapper):
    """An output stream that survives a closed pipe or a full disk: it then discards what is written."""

    error: OSError | None = None

    @classmethod
    def install(cls) -> None:
        """Replace standard output and standard error of this process."""
        for name in ("stdout", "stderr"):
            if type(stream := getattr(sys, name)) is io.TextIOWrapper:
                options = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering")}
                setattr(sys, name, cls(stream.detach(), **options))

    @staticmethod
    def exit_code(code: int) -> int:
        """Return a command's exit code: `code`, or a failure's if output could not be written to disk."""
        with contextlib.suppress(AttributeError):  # no standard output
            sys.stdout.flush()
        error = getattr(sys.stdout, "error", None)
        if code or error is None or error.errno == errno.EPIPE:
            return code
        failure = cannot_write(error, "standard output")
        print(error_line(failure), file=sys.stderr)
        return failure.exit_code

    def write(self, text: str) -> int:
        with self._outliving():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._outliving():
            super().flush()

    @contextlib.contextmanager
    def _outliving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


class Display:
    """Lines of text without escape codes, for pipes, files and continuous integration.

    Methods take plain host values, and never raise terminal errors. Progress is limited to one line a second
    at first, and to one every 30 seconds in long runs.

    Args:
        stream: None on ranks other than the first, which show nothing.
    """

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._widths: dict[str, int] = {}
        self._next_line_s = 0.0
        self.start()

    def panel(self, title: str, rows: Rows, loud: Sequence[str] = (), style: str = "cyan") -> None:
        """Show the switches and their resolved values; `loud` lines are prominent warnings."""
        self._print(title)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self._print(f"  {name:<{width}}  {value}".rstrip())
        for text in loud:
            self.warn(text)

    @contextlib.contextmanager
    def status(self, text: str, left_s: float | None = None) -> Iterator[None]:
        """Show that a long operation is running while this context is open; it takes `left_s` at most."""
        self._print(f"{text} ..." + ("" if left_s is None else f" eta {clock(left_s)}"))
        yield

    def start(
        self,
        step: int = 0,
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        what: str = "step",
    ) -> None:
        """Start the estimate of the remaining time, after `step` completed steps.

        Args:
            total_steps: optimizer steps of the whole run; None (no bar, no ETA) if only time limits it.
            steps_per_epoch: None for data of unknown length.
            what: the word before the number of steps.
        """
        self._total_steps, self._steps_per_epoch, self._what = total_steps, steps_per_epoch, what
        epochs = total_steps / steps_per_epoch if total_steps and steps_per_epoch else 99
        self._epoch_width = len(f"{epochs:.1f}")
        self._start_s = self._mark_s = self._now()
        self._mark_step = step
        self._seconds_per_step: float | None = None

    def progress(self, step: int, epoch: float, metrics: Mapping[str, Any]) -> None:
        """Show that training is at `step`, with `metrics` such as `loss`, `lr` and `samples_per_s`."""
        eta_s = self._estimate(step)
        if self._is_due():
            self._print("  ".join(self._fields(step, epoch, metrics, eta_s).values()).rstrip())

    def evaluation(
        self, step: int, epoch: float, split: str, metrics: Metrics, is_best: bool = False, weights: str = ""
    ) -> None:
        """Show the results of an evaluation in one line; `weights` names averaged weights."""
        self._print(f"{self._where(step, epoch)}  {split:<4}  {listed(metrics, weights)}{'  best' * is_best}")

    def note(self, text: str) -> None:
        """Show an informative line."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Show a warning."""
        self._print(f"warning: {text}", style="yellow")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the closing summary, from the content of summary.json."""
        self.close()
        self.panel(*closing(summary), style=STATUS_STYLES.get(str(summary.get("status")), "yellow"))
        if command := summary.get("resume"):
            self._print(f"saved at step {summary['steps']:,}; resume with: {command}", copied=True)
        for word, command in zip(("next:", "", ""), summary.get("next", ()), strict=False):
            self._print(f"{word:<5} {command}", copied=True)

    def close(self) -> None:
        """Restore the terminal. Safe to call twice, and after a crash."""

    def _print(self, text: str, *, copied: bool = False, style: str = "") -> None:
        """Print a line; a terminal applies rich's `style`, and does not wrap a line meant to be `copied`."""
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        line = one_line(text).encode(encoding, "replace").decode(encoding)
        # A closed pipe (`| head`, a closed terminal) must not end the training.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()

    def _is_due(self) -> bool:
        now = self._now()
        if now < self._next_line_s:
            return False
        self._next_line_s = now + min(30.0, max(1.0, (now - self._start_s) / 60))
        return True

    def _estimate(self, step: int) -> float | None:
        """Return the seconds to the last step, from an exponential moving average of the step time."""
        now, steps = self._now(), step - self._mark_step
        if steps > 0:
            latest = (now - self._mark_s) / steps
            mean = self._seconds_per_step
            self._seconds_per_step = latest if mean is None else 0.8 * mean + 0.2 * latest
            self._mark_s, self._mark_step = now, step
        if self._total_steps is None or self._seconds_per_step is None:
            return None
        return (self._total_steps - step) * self._seconds_per_step

    def _fields(
        self, step: int, epoch: float, metrics: Mapping[str, Any], eta_s: float | None
    ) -> dict[str, str]:
        """Return the parts of a progress line by name; widths never shrink, so that columns stay aligned."""
        fields = {"where": self._where(step, epoch)}
        fields |= {name: labelled(name, value) for name, value in metrics.items()}
        if eta_s is not None:
            fields["eta"] = f"eta {clock(eta_s)}"
        for name, text in fields.items():
            width = self._widths[name] = max(len(text), self._widths.get(name, 0))
            fields[name] = text.rjust(width) if name.endswith("_per_s") else text.ljust(width)
        return fields

    def _where(self, step: int, epoch: float) -> str:
        total = self._total_steps
        steps = f"{step}/{total}".ljust(2 * len(str(total)) + 1) if total else f"{step:<6}"
        if not epoch and self._steps_per_epoch is None:
            return f"{self._what} {steps}"
        epochs = f"{epoch:.1f}".removesuffix(".0")
        return f"step {steps}  epoch {epochs:<{self._epoch_width}}"


def ledger(budget: Mapping[str, float]) -> Rows:
    """Return rows of time by cause, the largest first; `rest` has unexplained time and causes below 1 %."""
    total_s = sum(budget.values())
    if total_s <= 0:
        return []
    known = sorted((item for item in budget.items() if item[0] != "unexplained"), key=lambda item: -item[1])
    large = {label(name): s for name, s in known if s >= total_s / 100}
    rest_s = total_s - sum(large.values())
    shown = large | ({"rest": rest_s} if rest_s > 0 else {})
    width = max(map(len, shown))
    lines = [f"{name:<{width}}  {duration(s):>7}  {s / total_s:>4.0%}" for name, s in shown.items()]
    return [("time" if number == 0 else "", line) for number, line in enumerate(lines)]


def spike(found: Mapping[str, float]) -> str:
    """Describe a spike of the loss."""
    what = f"{format_metric('loss', found['loss'])}, where {format_metric('loss', found['usual'])} was usual"
    return f"at step {grouped(found['step'])}: {what}"


def closing(summary: Mapping[str, Any]) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return the title, rows and warnings of the closing summary; unknown metrics are omitted."""
    rows: list[tuple[str, str]] = []
    pace = [counted(summary["steps"], "step")] if summary.get("steps") is not None else []
    if (rate := summary.get("train_samples_per_s")) is not None:
        pace.append(f"{format_metric('samples_per_s', rate)} samples/s")
    elif "train_samples_per_s" in summary:
        pace.append(f"{TOO_SHORT} to measure samples/s")
    if summary.get("peak_memory_bytes"):
        pace.append(f"{num_bytes(summary['peak_memory_bytes'])} peak memory")
    if pace:
        rows.append(("training", ", ".join(pace)))
    compiled = summary.get("compile")
    if compiled is not None:
        graphs = counted(compiled["graphs"], "graph")
        rows.append(("compiled", f"{graphs}, {compiled['recompiled']} more while training"))
    if (loss := (summary.get("train") or {}).get("loss")) is not None:
        rows.append(("train", labelled("loss", loss)))
    sets = summary.get("evals") or {}
    for name in ("val", *sets, "best", "test"):
        metrics = dict(sets.get(name) or summary.get(name) or {})
        step = metrics.pop("step", None)
        if metrics:
            shown = listed(metrics, summary.get("weights", ""))
            if step is not None:
                shown += f"  at step {grouped(step)}"
                shown += re.sub(r"[._]", " ", f", by {by}") if (by := summary.get("best_metric")) else ""
            rows.append((name, shown))
    if spikes := summary.get("loss_spikes"):
        rows.append(("loss spikes", f"{spikes['count']}, the largest {spike(spikes['largest'])}"))
    rows += ledger(summary.get("time_budget") or {})
    roofline = summary.get("roofline") or {}
    if roofline.get("mfu"):
        rows += [("roofline", roofline["line"]), ("lower bounds", roofline["floors"])]
        rows.append(("faster", "ptfast ablate measures what each switch gains on this model and machine"))
    if summary.get("run_dir"):
        folder = Path(summary["run_dir"])
        rows.append(("run", str(folder)))
        rows += [("report", str(page)) for page in [folder / "report.html"] if page.is_file()]
    title = str(summary.get("status", "finished"))
    if summary.get("recipe"):
        title = f"{summary['recipe']}: {title}"
    if summary.get("wall_s") is not None:
        title += f" after {duration(summary['wall_s'])}"
    loud = [summary.get("error"), (compiled or {}).get("advice")]
    return title, rows, [str(text) for text in loud if text]


_logged = set[tuple[str, int, str]]()


def each_once(record: logging.LogRecord) -> bool:
    """Filter log records: each message of a line of code passes once."""
    key = (record.pathname, record.lineno, record.getMessage())
    is_new = key not in _logged
    _logged.add(key)
    return is_new


def show_warnings_once() -> None:
    """Show only one warning for each line of an installed package, which may warn for every file or step.

    Libraries with log handlers of their own need the filter `each_once`.
    """
    if logging.lastResort is not None:
        logging.lastResort.addFilter(each_once)
    show, places = warnings.showwarning, set[tuple[type[Warning], str, int]]()

    def show_once(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        place = (category, filename, lineno)
        is_library = filename.startswith(INSTALLED) and not filename.startswith(PACKAGE)
        if place not in places or not is_library:
            places.add(place)
            show(message, category, filename, lineno, *rest)

    warnings.showwarning = show_once
