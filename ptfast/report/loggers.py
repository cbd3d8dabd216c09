"""Loggers, which write in a thread of their own: metrics.jsonl, csv, TensorBoard, Weights & Biases."""

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
"""Keys that say when a record was taken; all others are metrics."""
USAGE = ("memory_bytes", "cpu_cores", "gpu_use")
"""Use of the machine, drawn in the report."""
RESOURCES = ("step_s", "peak_memory_bytes", "padding_share", *USAGE)
"""Metrics that are logged but not shown during training."""


class JsonlLogger:
    """One JSON object a line, flushed line by line so that a killed run keeps what it logged; NaN is null.

    Args:
        path: a file of an earlier attempt is continued.
        last_step: drop its records after this step, which a resumed run will log again.

    Raises:
        MachineError: E002 when the disk is full, E001 when the file cannot be written.
    """

    def __init__(self, path: Path, last_step: int = sys.maxsize) -> None:
        self.path = path
        if path.is_file():
            # This also drops a line that a kill has cut off.
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
    """The objects in a file of lines that are of this kind, such as no line that a kill cut off."""
    if not path.is_file():
        return []
    records: list[Record] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            records.append(checked(kind, line))
    return records


def _last_step(records: Sequence[Record]) -> int:
    """The step of the newest record; -1 if there is none."""
    return max((record["step"] for record in records), default=-1)


@dataclass
class Csv:
    """The records as a table, one column per metric, written at each evaluation and at the end.

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
        """Write what metrics.jsonl has by now, which gets each record first."""
        rows = read_records(self._source)
        # `weights` only where they are averaged.
        columns = dict.fromkeys([*POSITION[:3], *(name for row in rows for name in row)])
        with run_directory.open_inside(self._file, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


class Tensorboard:
    """TensorBoard event files in the run directory, one tag per split and metric: `val/accuracy`.

    The first training images are shown as the model takes them. When the run ends, its settings are
    shown with its last metrics under HParams.

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

        # Events of a previous attempt beyond the resumed step are hidden, or the curves would run backwards.
        purge_step = _last_step(read_records(run_dir / METRICS_FILE)) + 1
        self._writer = SummaryWriter(str(run_dir / self._folder), purge_step=purge_step)
        self._writer.add_text("config", "```\n" + json.dumps(config, indent=2, default=str) + "\n```", 0)
        self._settings = settings_of(config)

    def log(self, record: Record) -> None:
        for tag, value in tagged(record).items():
            self._writer.add_scalar(tag, value, record["step"])
        if record.get("split") != "train":
            self._last |= tagged(record)
        self._writer.flush()  # a kill loses nothing that metrics.jsonl has

    def log_images(self, step: int, images: Any) -> None:
        """Show images (number, channels, height, width) of any range, brought to 0 to 1 together."""
        if not self._num_images:
            return
        shown = images[: self._num_images].float()
        low, high = shown.aminmax()
        self._writer.add_images("train/images", (shown - low) / (high - low).clamp(min=1e-12), step)

    def close(self) -> None:
        if self._last:
            from torch.utils.tensorboard.summary import hparams

            # `add_hparams` would draw the last metrics a second time.
            file = self._writer.file_writer
            assert file is not None  # it has metrics in it
            for summary in hparams(self._settings, self._last):
                file.add_summary(summary)
        self._writer.close()


class Wandb:
    """Weights & Biases. Each run has an id of its own there, with which it continues when it is resumed.

    Steps that a resumed run takes again are there already and not sent once more, so that one curve is shown.

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
        # Names of folders recur: those of a sweep's jobs are 0, 1, ... in every sweep.
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
        except Exception as error:  # of classes that differ between its versions
            hint = "Log in with `wandb login`, or set WANDB_MODE=offline to log on this machine alone"
            raise rejected_by("Weights & Biases", "wandb", error, hint) from error
        # What it has got; a row is sent when the next one comes, so that a kill loses the last.
        first_step = getattr(self._run, "starting_step", 0)
        self._first_step = first_step if isinstance(first_step, int) else 0
        for record in records:
            if record["step"] >= self._first_step:
                self._run.log(tagged(record), step=record["step"])

    def log(self, record: Record) -> None:
        # An evaluation that was due when the run was saved belongs to a step that may be there.
        if not self._resumed_step < record["step"] < self._first_step:
            self._run.log(tagged(record), step=max(record["step"], self._first_step))

    def close(self) -> None:
        self._run.finish()


CLOSE_S, FLUSH_S = 30.0, 5.0
"""How long loggers may take for what is left to write, once a run is over."""


class BackgroundLogger(Logger):
    """Hands records to loggers in a thread of its own: a training step pays for a queue entry and no more.

    A logger that fails is dropped with one warning and training continues. A `MachineError`, which only
    metrics.jsonl raises, surfaces at the next `log` or at `close`.

    Args:
        loggers: opened loggers; closed by `close`.
        warn: where the warning goes, always called from the thread that logs.
    """

    def __init__(self, loggers: Sequence[Any], warn: Callable[[str], None] = warnings.warn) -> None:
        self._loggers = list(loggers)
        self.shows_images = any(hasattr(logger, "log_images") for logger in loggers)
        """True if one of the loggers takes images."""
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
        """Hand images (number, channels, height, width) on the host to the loggers that take images."""
        self._put("log_images", step, images)

    def flush(self) -> None:
        """Wait until the records so far are written, but not for a service that does not answer."""
        if self._thread is not None and not self._closed:
            written = threading.Event()
            self._queue.put(written)
            written.wait(FLUSH_S)

    def close(self) -> None:
        """Write all that is queued and close every logger; safe to call twice.

        A finished run must not wait for ever for a server that does not answer: `CLOSE_S` at most.
        """
        if self._closed:
            return
        self._closed = True
        thread = self._put(None)
        thread.join(CLOSE_S)
        if thread.is_alive() and self._busy is not None:
            late = f"{type(self._busy).__name__} did not finish within {CLOSE_S:g} s and is left behind"
            self._warnings.put(f"{late}: what it was given last may be missing")
            # The others, metrics.jsonl among them, still get the records queued behind it.
            self._loggers.remove(self._busy)
            self._work()
        self._surface()

    def _put(self, method: str | None, *given: Any) -> threading.Thread:
        """Queue a call of a method of the loggers, or None for the end; returns the thread that makes it."""
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
        self._queue.put(None)  # for whoever continues in place of a thread that hangs
        self._call_all("close", ())

    def _call_all(self, name: str, given: tuple[Any, ...]) -> None:
        """Call a method of every logger that has it; drop those that fail."""
        for logger in list(self._loggers):
            self._busy = logger
            try:
                if (method := getattr(logger, name, None)) is not None:
                    method(*given)
            except Exception as error:  # whatever a third party's logger raises must not end the training
                self._loggers.remove(logger)
                with contextlib.suppress(Exception):
                    logger.close()
                if isinstance(error, MachineError):
                    self._error = error
                    continue
                reason = shorten(f"{type(error).__name__}: {error}", 200)
                self._warnings.put(f"{type(logger).__name__} failed and logs no more of this run ({reason})")

    def _surface(self) -> None:
        """Show the warnings, and raise the error, of the thread."""
        while not self._warnings.empty():
            self._warn(self._warnings.get())
        error, self._error = self._error, None
        if error is not None:
            raise error


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config that decide what is trained, dotted: plain values, lists as text."""
    from ptfast.config.schema import FREE_KEYS, flatten, lies_in

    return {
        key: value if isinstance(value, (bool, int, float, str)) else str(value)
        for key, value in flatten(config).items()
        if value is not None and not lies_in(key, FREE_KEYS)
    }


def rejected_by(service: str, option: str, error: Exception, hint: str) -> MachineError:
    """The error for a service that rejects the run."""
    reason = shorten(one_line(f"{type(error).__name__}: {error}").rstrip(". "), 200)
    what = f"{service} does not take the run ({reason})"
    return MachineError("E006", what, key="logger", value=option, suggestion=hint)


def tagged(record: Record) -> dict[str, float]:
    """The numbers of a record under `split/name`."""
    split = record.get("split", "train")
    numbers = {name: value for name, value in record.items() if name not in POSITION}
    return {f"{split}/{name}": float(v) for name, v in numbers.items() if isinstance(v, (int, float))}
