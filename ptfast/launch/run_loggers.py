"""The loggers of a run: built before its data is loaded, and opened once the run is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ptfast.config.files.yaml_file import read_yaml
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.errors import described, name_of
from ptfast.core.protocols import LOGGER_METHODS, StepBatch
from ptfast.report.goodput import Attempt
from ptfast.report.loggers import METRICS_FILE, BackgroundLogger, JsonlLogger
from ptfast.run import Run
from ptfast.training.user_code import UserPart, constructing


def build_loggers(config: Config) -> dict[str, Any]:
    """Build the loggers of the config, by the key of their section.

    Raises C017 if a constructor raises or returns no logger, and E004 if a package is not installed.
    """
    loggers: dict[str, Any] = {}
    for key, target in config.logger.targets.items():
        with constructing(key, target.path):
            loggers[key] = target.build()
        missing = [name for name in LOGGER_METHODS if not hasattr(loggers[key], name)]
        if missing:
            what = f"returns {described(loggers[key])}, which is not a logger: it has no method {missing[0]}"
            raise UserPart(f"{key}._target_", target.resolve()).error(what)
    return loggers


def open_loggers(run: Run, loggers: dict[str, Any], attempt: Attempt) -> BackgroundLogger:
    """Open the loggers of a run, and drop records after the step that it resumes from.

    Raises C017 if a logger raises, E001 if metrics.jsonl cannot be written, E006 if a service rejects it.
    """
    opened: list[Any] = [JsonlLogger(run.folder / METRICS_FILE, run.progress.step), attempt]
    # Read the written config, which has no secrets and no values from the environment.
    config = read_yaml(run.folder / run_directory.CONFIG).data if loggers else {}
    try:
        for key, logger in loggers.items():
            with constructing(key, name_of(logger), "open"):
                logger.open(run.folder, config)
            opened.append(logger)
    except Exception:
        opened[0].close()
        raise
    background = BackgroundLogger(opened, run.display.warn)
    if background.shows_images and run.info.kind == "image":
        run.watch_batches = partial(_log_first_images, run.watch_batches, run.progress.step, background)
    return background


def _log_first_images(
    watch: Callable[[Any], Any] | None, step: int, logger: BackgroundLogger, batches: Iterator[StepBatch]
) -> Iterator[StepBatch]:
    """Yield the batches of `watch`, and log the images of the first one."""
    batches = batches if watch is None else watch(batches)
    for batch in batches:
        logger.log_images(step, batch.micro_batches[0].data[0].detach().to("cpu", copy=True))
        yield batch
        break
    yield from batches
