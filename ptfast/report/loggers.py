"""Loggers that write in a background thread: metrics.jsonl, CSV, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import csv
import json
import queue
import secrets
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.core import run_directory
from ptfast.core.errors import MachineError, cannot_write, import_extra, one_line, shorten
from ptfast.core.protocols import Logger
from ptfast.core.run_records import MetricsLine, checked

Record = dict[str, Any]
METRICS_FILE = "metrics.jsonl"
POSITION = ("step", "epoch", "split", "weights")
"""Keys that identify a record; all other keys are metrics."""
USAGE = ("memory_bytes", "cpu_cores", "gpu_use")
"""Metrics of machine usage, plotted in the report."""
RESOURCES = ("step_s", "peak_memory_bytes", "padding_share", *USAGE)
"""Metrics that are logged but not shown during training."""


class JsonlLogger:
    """Writes one JSON object per line and flushes each, so that a killed run loses no records; NaN is null.

    Args:
        path: the file to write; an existing one is continued.
        last_step: drop existing records after this step, because a resumed run logs them again.

    Raises:
        MachineError: E002 if the disk is full, E001 if the file cannot be written.
    """

    def __init__(self, path: Path, last_step: int = sys.maxsize) -> None:
        self.path = path
        if path.is_file():
            # This also drops a line that a kill cut off.
            kept = [record for record in read_records(path) if record["step"] <= last_step]
            run_directory.write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        with self._writing():
            self._file = run_directory.open_inside(path, "a", encoding="utf-8")

    def log(self, record: Record) -> None:
        line = json.dumps(run_directory.plain_json(record), allow_nan=False)
        with self._writing():
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        with self._writing():
            self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Report write failures inside this context."""
        try:
            yield
        except OSError as error:
            raise cannot_write(error, str(self.path)) from error


def read_records(path: Path, kind: Any = MetricsLine) -> list[Record]:
    """Return the objects of type `kind` in a JSON Lines file; invalid or truncated lines are skipped."""
    if not path.is_file():
        return []
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            records.append(checked(kind, line))
    return records


def _last_step(records: Sequence[Record]) -> int:
    """Return the largest step of the records; -1 if there are none."""
    return max((record["step"] for record in records), default=-1)


@dataclass
class Csv:
    """Writes the records as a table, one column per metric, at each evaluation and at the end.

    Args:
        path: file name, relative to the run directory.
    """

    path: str = "metrics.csv"

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._source, self._file = run_dir / METRICS_FILE, run_dir / self.path
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def log(self, record: Record) -> None:
        if record.get("split") != "train":
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        """Write the records of metrics.jsonl, which receives each record first."""
        rows = read_records(self._source)
        # The column `weights` exists only if weights are averaged.
        columns = dict.fromkeys([*POSITION[:3], *(name for row in rows for name in row)])
        with run_directory.open_inside(self._file, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


class Tensorboard:
    """Writes TensorBoard event files to the run directory, one tag per split and metric: `val/accuracy`.

    The first training images are shown as the model receives them. At the end of the run, the HParams tab
    shows its settings and last metrics.

    Args:
        folder: folder of the event files, relative to the run directory.
        images: number of training images to show; 0 for none.
    """

    def __init__(self, folder: str = "tensorboard", images: int = 16) -> None:
        import_extra("tensorboard", "tensorboard", "logger", "tensorboard")
        self._folder, self._num_images = folder, images
        self._last: dict[str, float] = {}

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Hide events of a previous attempt after the resumed step; otherwise curves would run backwards.
        purge_step = _last_step(read_records(run_dir / METRICS_FILE)) + 1
        self._writer = SummaryWriter(str(run_dir / self._folder), purge_step=purge_step)
        self._writer.add_text("config", "```\n" + json.dumps(config, indent=2, default=str) + "\n```", 0)
        self._settings = settings_of(config)

    def log(self, record: Record) -> None:
        for tag, value in tagged(record).items():
            self._writer.add_scalar(tag, value, record["step"])
        if record.get("split") != "train":
            self._last |= tagged(record)
        self._writer.flush()  # so that a kill loses no record that metrics.jsonl has

    def log_images(self, step: int, images: Any) -> None:
        """Show images (number, channels, height, width), all scaled together from any range to 0..1."""
        if not self._num_images:
            return
        shown = images[: self._num_images].float()
        low, high = shown.aminmax()
        self._writer.add_images("train/images", (shown - low) / (high - low).clamp(min=1e-12), step)

    def close(self) -> None:
        if self._last:
            from torch.utils.tensorboard.summary import hparams

            # `add_hparams` would plot the last metrics a second time.
            file = self._writer.file_writer
            assert file is not None  # because metrics were written
            for summary in hparams(self._settings, self._last):
                file.add_summary(summary)
        self._writer.close()


class Wandb:
    """Logs to Weights & Biases. Each run has its own W&B id, and resuming continues the same W&B run.

    Steps that a resumed run repeats are not sent again, so that there is one curve.

    Args:
        project: project the run belongs to.
        entity: user or team; the account's default if not given.
        name: name of the run; default: the last two parts of the run directory's path.
        tags: labels to find it by.
        mode: `online`, `offline` or `disabled`; null for WANDB_MODE.
    """

    def __init__(
        self,
        project: str = "ptfast",
        entity: str | None = None,
        name: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        import_extra("wandb", "wandb", "logger", "wandb")
        self._options: dict[str, Any] = {"project": project, "entity": entity, "tags": list(tags)}
        self._mode, self._name = mode, name

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb

        name = self._name or "/".join(run_dir.absolute().parts[-2:])
        # Folder names are not unique: the jobs of every sweep are named 0, 1, ...
        known = run_directory.read_json(run_dir / run_directory.WANDB).get("id")
        run_id, records = known or secrets.token_hex(8), read_records(run_dir / METRICS_FILE)
        self._resumed_step = _last_step(records)
        run_directory.write_json(run_dir / run_directory.WANDB, {"id": run_id})
        try:
            self._run: Any = wandb.init(
                **self._options,
                mode=self._mode,
                name=name,
                id=run_id,
                resume="allow",
                dir=str(run_dir),
                config=config,
            )
        except Exception as error:  # its class depends on the version of wandb
            hint = "Log in with `wandb login`, or set WANDB_MODE=offline to log on this machine alone"
            raise rejected_by("Weights & Biases", "wandb", error, hint) from error
        # W&B sends a row when the next one arrives, so a kill loses the last row: send missing rows again.
        first_step = getattr(self._run, "starting_step", 0)
        self._first_step = first_step if isinstance(first_step, int) else 0
        for record in records:
            if record["step"] >= self._first_step:
                self._run.log(tagged(record), step=record["step"])

    def log(self, record: Record) -> None:
        # An evaluation due at the save may belong to a step that W&B already has.
        if not self._resumed_step < record["step"] < self._first_step:
            self._run.log(tagged(record), step=max(record["step"], self._first_step))

    def close(self) -> None:
        self._run.finish()


CLOSE_S, FLUSH_S = 30.0, 5.0
"""Longest time in seconds to wait for loggers: when closing, and when flushing."""


class BackgroundLogger(Logger):
    """Passes records to loggers in a background thread, so that a training step only pays for a queue entry.

    A logger that fails is dropped with one warning, and training continues. A `MachineError`, which only
    metrics.jsonl raises, is raised again by the next `log` or `close`.

    Args:
        loggers: opened loggers; closed by `close`.
        warn: called with each warning, always in the thread that logs.
    """

    def __init__(self, loggers: Sequence[Any], warn: Callable[[str], None] = warnings.warn) -> None:
        self._loggers = list(loggers)
        self.shows_images = any(hasattr(logger, "log_images") for logger in loggers)
        """Whether any logger accepts images."""
        self._warn = warn
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._error: MachineError | None = None
        self._busy: Any = None
        """The logger called last."""
        self._closed = False

    def log(self, record: Record) -> None:
        self._put("log", record)
        self._surface()

    def log_images(self, step: int, images: Any) -> None:
        """Pass images (number, channels, height, width) on the host to the loggers that accept images."""
        self._put("log_images", step, images)

    def flush(self) -> None:
        """Wait until all records so far are written, at most `FLUSH_S`: a service may not respond."""
        if self._thread is not None and not self._closed:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_S)

    def close(self) -> None:
        """Write all queued records and close every logger; safe to call twice.

        Waits at most `CLOSE_S`, so that a finished run does not hang on a server that does not respond.
        """
        if self._closed:
            return
        self._closed = True
        thread = self._put(None)
        thread.join(CLOSE_S)
        if thread.is_alive() and self._busy is not None:
            late = f"{type(self._busy).__name__} did not finish within {CLOSE_S:g} s and is left behind"
            self._warnings.put(f"{late}: what it was given last may be missing")
            # The other loggers, including metrics.jsonl, still receive the records that are queued.
            self._loggers.remove(self._busy)
            self._work()
        self._surface()

    def _put(self, method: str | None, *given: Any) -> threading.Thread:
        """Queue a method call on all loggers, or the end if `method` is None; return the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ptfast-logger", daemon=True)
            self._thread.start()
        self._queue.put(None if method is None else (method, given))
        return self._thread

    def _work(self) -> None:
        while (due := self._queue.get()) is not None:
            if isinstance(due, threading.Event):
                due.set()
            else:
                self._call_all(*due)
        self._queue.put(None)  # in case `close` took over from a thread that hangs
        self._call_all("close", ())

    def _call_all(self, name: str, given: tuple[Any, ...]) -> None:
        """Call a method of every logger that has it; drop loggers that fail."""
        for logger in list(self._loggers):
            self._busy = logger
            try:
                if (method := getattr(logger, name, None)) is not None:
                    method(*given)
            except Exception as error:  # an error of a third-party logger must not end training
                self._loggers.remove(logger)
                with contextlib.suppress(Exception):
                    logger.close()
                if isinstance(error, MachineError):
                    self._error = error
                    continue
                reason = shorten(f"{type(error).__name__}: {error}", 200)
                self._warnings.put(f"{type(logger).__name__} failed and logs no more of this run ({reason})")

    def _surface(self) -> None:
        """Show the warnings of the background thread, and raise its error."""
        while not self._warnings.empty():
            self._warn(self._warnings.get())
        error, self._error = self._error, None
        if error is not None:
            raise error


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that affect training by dotted key, as plain values; lists become text."""
    from ptfast.config.schema import FREE_KEYS, flatten, lies_in

    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in flatten(config).items()
        if value is not None and not lies_in(key, FREE_KEYS)
    }


def rejected_by(service: str, option: str, error: Exception, hint: str) -> MachineError:
    """Return the error for a service that rejects the run."""
    reason = shorten(one_line(f"{type(error).__name__}: {error}").rstrip(". "), 200)
    what = f"{service} does not take the run ({reason})"
    return MachineError("E006", what, key="logger", value=option, suggestion=hint)


def tagged(record: Record) -> dict[str, float]:
    """Return the numbers of a record, keyed by `split/name`."""
    split = record.get("split", "train")
    numbers = {name: value for name, value in record.items() if name not in POSITION}
    return {f"{split}/{name}": float(v) for name, v in numbers.items() if isinstance(v, (int, float))}
