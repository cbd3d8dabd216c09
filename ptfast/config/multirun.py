"""Run sweeps with Hydra's sweepers and launchers, and print a config for `--cfg`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ptfast.config.compose import Composed, compose, translated
from ptfast.config.files.frozen import frozen_tree, load
from ptfast.config.hydra_loader import PRIMARY, BasicLauncher, Hydra, TracingLoader
from ptfast.config.overrides import Argument, parse, quoted
from ptfast.core import run_directory
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError
from ptfast.core.units import better_mode

# Keep Hydra from writing its own files: they contain the command line in plain text, with secrets.
_QUIET = (
    *("hydra.mode=MULTIRUN", "hydra.output_subdir=null", "hydra.sweep.subdir=."),
    *("hydra/job_logging=none", "hydra/hydra_logging=none"),
)

Objective = Callable[[], float | None]
"""Waits for a run and returns the value that a sweep optimizes."""
Job = Callable[[Composed, int], Objective]
"""Starts the run of a config, given its number counted from 0."""


class JobFailure(float):
    """The objective of a failed job: NaN, with the error that caused it."""

    error: Exception

    def __new__(cls, error: Exception) -> JobFailure:
        failure = super().__new__(cls, "nan")
        failure.error = error
        return failure

    def __reduce__(self) -> tuple[Any, ...]:
        return JobFailure, (self.error,)


@dataclass(frozen=True)
class _Task:
    """The function that launchers call, possibly in another process; composes a job's config by itself."""

    job: Job

    def __call__(self, config: DictConfig) -> float | None:
        return _wait(self.start(config))

    def start(self, config: DictConfig) -> Objective:
        hydra = HydraConfig.get()
        try:
            return self.job(compose(list(hydra.overrides.task)), int(hydra.job.num))
        except Exception as error:
            return partial(JobFailure, error)


def _wait(objective: Objective) -> float | None:
    try:
        return objective()
    except Exception as error:
        return JobFailure(error)


class _Launcher(BasicLauncher):
    """Hydra's launcher, changed to start all jobs of a batch before it waits for the first."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function.start, config=config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        started = super().launch(job_overrides, initial_job_idx)
        for one in started:
            one.return_value = _wait(one.return_value)
        return started


def sweep(
    arguments: Sequence[str], job: Job, sweep_dir: Path, check: Callable[[Composed], object] | None = None
) -> list[float | None]:
    """Run one job per point of a sweep, with the sweeper and launcher that the arguments choose.

    Args:
        job: called with a point's config and its number from 0; some launchers pickle it. An exception
            becomes a `JobFailure` and does not stop the sweep.
        check: called before the first job, with configs that together use every swept value.

    Returns:
        The objectives in order, if the sweeper returns them (optuna does not).
    """
    given = parse(arguments, sweep=True)
    points = [compose(point) for point in sample_points(given)]
    for point in points:
        for key in ("run.dir", "run.resume"):
            if point.places.get(key) == COMMAND_LINE:
                what = "each job of a sweep is a new run in a folder of its own"
                hint, value = "Leave it out; run.root moves the whole sweep", point.tree["run"][key[4:]]
                raise ConfigError("C014", what, key=key, value=value, place=COMMAND_LINE, suggestion=hint)
        if check:
            check(point)
    folder = f"hydra.sweep.dir={quoted(sweep_dir.absolute())}"
    overrides = [*_QUIET, folder, *(a.text for a in given)]
    with translated():
        loader = TracingLoader()
        overrides += _direction(loader, overrides, points[0], [a for a in given if a.is_interval])
        hydra = Hydra(task_name="ptfast", config_loader=loader)
    # Hydra finds launchers outside its own packages only in a package named hydra_plugins.
    Plugins.instance().class_name_to_class[f"{BasicLauncher.__module__}.{BasicLauncher.__name__}"] = _Launcher
    with _without_multirun_file(sweep_dir), translated():
        returned = hydra.multirun(config_name=PRIMARY, task_function=_Task(job), overrides=overrides)
    # Hydra's own sweeper returns batches of jobs; others may return jobs, or nothing.
    batches = (batch if isinstance(batch, (list, tuple)) else [batch] for batch in returned or ())
    return [one.return_value for one in itertools.chain.from_iterable(batches)]


def _direction(
    loader: TracingLoader, overrides: list[str], point: Composed, intervals: Sequence[Argument]
) -> list[str]:
    """Return the override for the direction in which the metric is better, unless the user sets it."""
    key = "hydra.sweeper.direction"
    sweeper = loader.load_configuration(PRIMARY, overrides, RunMode.MULTIRUN).hydra.sweeper
    if intervals and str(sweeper._target_).endswith(".BasicSweeper"):
        swept, value = intervals[0].key, intervals[0].values[0]
        hint = "Add hydra/sweeper=optuna, or name the points: key=a,b"
        what = "Hydra's own sweeper cannot choose points from an interval"
        raise ConfigError("C014", what, key=swept, value=value, place=COMMAND_LINE, suggestion=hint)
    if "direction" not in sweeper or key in loader.places() or any(o.startswith(key) for o in overrides):
        return []
    metric, mode = point.tree["sweep"]["metric"], point.tree["sweep"]["mode"]
    if mode == "auto":
        if metric == "auto":
            hint = "Set sweep.metric=val.accuracy, say, or sweep.mode=max"
            what = "the sweeper has to know which way is better before the first run"
            raise ConfigError("C014", what, key="sweep.metric", value=metric, suggestion=hint)
        mode = better_mode(metric)
    return [f"{key}={mode}imize"]


def sample_points(given: Sequence[Argument]) -> Iterator[list[str]]:
    """Yield arguments of runs that use every value of a sweep, changing one key at a time."""
    plain = [a for a in given if a.kind != "hydra" and not a.is_interval]
    first = {a.key: a.at(a.values[0]) if a.is_sweep else a.text for a in plain}
    yield list(first.values())
    for argument in plain:
        if argument.is_sweep:
            for value in argument.values[1:]:
                yield list((first | {argument.key: argument.at(value)}).values())


def show_config(kind: str, arguments: Sequence[str], file: Path | None = None) -> str:
    """Return the YAML that `--cfg job` (of `file`, if given) or `--cfg hydra` prints, with secrets hidden."""
    if kind == "hydra":
        of_hydra = [a.text for a in parse(arguments) if a.kind == "hydra"]
        with translated():
            config = TracingLoader().load_configuration(PRIMARY, of_hydra, RunMode.RUN)
        return OmegaConf.to_yaml(Hydra.get_sanitized_hydra_cfg(config))
    composed = load(file, arguments, complete=False) if file else compose(arguments, complete=False)
    tree, _ = frozen_tree(composed, resolved=False)
    return OmegaConf.to_yaml(OmegaConf.create(tree))


@contextlib.contextmanager
def _without_multirun_file(sweep_dir: Path) -> Iterator[None]:
    """Discard the multirun.yaml of Hydra's basic sweeper, which contains the arguments in plain text."""
    made = run_directory.create_folder(sweep_dir)
    file = sweep_dir / "multirun.yaml"
    with contextlib.suppress(OSError):
        file.symlink_to(os.devnull)
    try:
        yield
    except PtfastError:
        file.unlink(missing_ok=True)
        for folder in made:
            with contextlib.suppress(OSError):  # it already contains jobs
                folder.rmdir()
        raise
    finally:
        file.unlink(missing_ok=True)
