"""ptfast for Python programs and notebooks: `train`, `evaluate`, `predict`, `prepare`, `load` and `sweep`.

Each takes the config like the commands, as overrides such as `"optimizer.lr=0.1"`, or as keyword arguments
(`epochs=3`, `optimizer={"lr": 0.1}`), whose values may be modules, datasets, classes and functions. The
errors of the commands are raised as exceptions: a `PtfastError` has `code`, `key` and `hint`. Each call
restores the process-wide settings that it changes.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ptfast.cli.command_line import run as run_command
from ptfast.cli.config_commands import read_typed
from ptfast.cli.sweep_command import sweep_runs
from ptfast.config.python_words import PythonWords, is_frame
from ptfast.core import run_directory
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError
from ptfast.core.sections.given import give_again
from ptfast.core.sections.origins import is_given
from ptfast.core.tensors.checkpoint_folders import config_of, find_checkpoint
from ptfast.data.new_inputs import Text
from ptfast.launch.host_process import borrowed, check_processes, without_script
from ptfast.launch.launcher import start_here
from ptfast.report.html.run_files import RunFiles
from ptfast.report.html.run_report import REPORT_FILE
from ptfast.report.terminal.display import say
from ptfast.tasks.added_metrics import as_lists
from ptfast.training.saved_model import evaluations, predictions, prepared, saved_run
from ptfast.training.stages.partial_run import PartialRun

_loaded: WeakKeyDictionary[nn.Module, PartialRun] = WeakKeyDictionary()
"""The task and input preparation of each module that `load` has returned, without the module itself."""


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A run on disk, finished or not."""

    path: Path
    """The run directory."""
    objects: Mapping[str, Any] = field(default_factory=dict)
    """Objects passed to the run, by import path; its config can find them while this result exists."""

    @property
    def summary(self) -> dict[str, Any]:
        """Return the content of `summary.json`."""
        return run_directory.read_json(self.path / run_directory.SUMMARY)

    @property
    def status(self) -> str:
        """Return the status: `finished`, `stopped` (no more gain), `paused` (`run.max_time`) or `failed`."""
        return str(self.summary.get("status", "unknown"))

    @property
    def best(self) -> dict[str, float]:
        """Return the step and metrics of the best evaluation; empty if there was none."""
        return self.summary.get("best", {})

    @property
    def metrics(self) -> Any:
        """Return the logged metrics, one row per step and split: a DataFrame, or a list without pandas."""
        rows = RunFiles(self.path).records
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def model(self, checkpoint: str = "best") -> nn.Module:
        """Return the trained model, like `load`."""
        return load(self, checkpoint)

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {value:.4g}" for name, value in self.best.items())
        return f"<ptfast run {self.path}: {self.status}{best and f', best {best}'}>"

    def _repr_html_(self) -> str:
        """Return the report for a notebook: metrics, curves and time budget."""
        page = self.path / REPORT_FILE
        if not page.is_file():
            return f"<pre>{escape(repr(self))}</pre>"
        content = escape(page.read_text("utf-8"))
        return f'<iframe srcdoc="{content}" style="width:100%;height:64em;border:0"></iframe>'


def train(
    recipe: str | None = None, *overrides: str, model: Any = None, data: Any = None, **keys: Any
) -> Result:
    """Train in this process, like `ptfast train recipe=RECIPE OVERRIDES...`.

    Args:
        recipe: name or path of a recipe.
        overrides: arguments of the command line.
        model: a module (a copy of it is trained), a class, a function that returns a module, or the name of
            an option.
        data: a dataset or a DataFrame with `target="column"`, a tuple of them (training, validation, and
            optionally test), a class, a function that returns a dataset, or the name of an option.
        keys: config keys; a mapping sets the keys in a section, and `**{"optimizer.lr": 0.1}` a dotted key.

    Raises:
        PtfastError: the errors of the command.
        KeyboardInterrupt: Ctrl-C or a notebook's stop button, after the current step; the run is saved.
        SystemExit: 75 after SIGTERM, SIGUSR1 or SIGHUP; the run is saved. Both can be resumed. Outside the
            main thread, signals are left to the program.
    """
    with borrowed("train"):
        given = _read(recipe, overrides, {"model": model, "data": data, **keys})
        composed, config = read_typed(given.words)
        names = [path for path in given.objects if is_given(path)]
        with composed.naming_places():
            check_processes(config, names)
            if names:
                say(
                    f"ptfast: handed over in Python: {', '.join(names)}\n"
                    "  only this script can repeat the run, or resume it with run.resume=auto\n"
                    "  a module is trained as a copy, which result.model() gives"
                )
            folder, code = start_here(composed, config)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt(f"the run is saved: {folder}; resume it with run.resume=auto")
    if code == EXIT_PREEMPTED:
        raise SystemExit(code)
    return Result(folder, given.objects)


def sweep(
    recipe: str | None = None, *overrides: str, model: Any = None, data: Any = None, **keys: Any
) -> list[Result]:
    """Train once for each combination of values, like `ptfast train -m`, each in its own process.

    Lists, and commas in an override, are values to sweep over: `sweep("resnet_digits", seed=[0, 1])`. If a
    run fails, its `status` is `failed`, and the other runs continue. Arguments are those of `train`, except
    objects that exist only in this process (C014).
    """
    with borrowed("sweep"), without_script():
        given = _read(recipe, overrides, {"model": model, "data": data, **keys}, sweeps=True)
        if names := [path for path in given.objects if is_given(path)]:
            what = "the runs of a sweep are other processes, which do not have it"
            hint = "Define it in a module, and hand over its class or function"
            raise ConfigError("C014", what, key="sweep", value=names[0], suggestion=hint)
        folders, code = sweep_runs(given.words, run_command)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return [Result(folder) for folder in folders]


def evaluate(
    run: str | Path | Result, *overrides: str, split: str | None = None, checkpoint: str = "best", **keys: Any
) -> dict[str, dict[str, Any]]:
    """Evaluate a run's model like `ptfast eval`, and return the metrics by split.

    Args:
        run: a run directory, a checkpoint in it, an export, or the result of `train`.
        split: `val`, `test` or the name of an evaluation set; None for all except `train`.
        checkpoint: `best` (the last one if no best one is kept), `last`, or `step-N`.
        keys: as for `train`; other data (`data=`) is read with the vocabulary and classes of training.
    """
    with borrowed("evaluate"):
        over = _words_over(run, overrides, keys)
        with saved_run(_path_of(run), over.words, checkpoint=checkpoint) as saved:
            return {
                name: {**metrics, **{key: as_lists(table) for key, (_, table) in tables.items()}}
                for name, metrics, tables in evaluations(saved, split, over.words)
            }


def predict(
    run: str | Path | Result | nn.Module,
    inputs: Any,
    *overrides: str,
    checkpoint: str = "best",
    **keys: Any,
) -> list[dict[str, Any]]:
    """Predict like `ptfast predict`, and return a record for each input, with its name under `input`.

    Args:
        run: as for `evaluate`, or a module that `load` has returned.
        inputs: one of these, or a list of them: a file or folder, an array or tensor of one or several
            inputs in the format of the dataset, a PIL image, or a text for a text model. A model of tables
            takes files, a DataFrame, or a mapping for each row.
    """
    with borrowed("predict"), _model_of(run, overrides, checkpoint, keys) as saved:
        found = predictions(saved, _inputs(saved, inputs))
        return [{"input": name, **record} for name, record in found]


def prepare(
    run: str | Path | Result | nn.Module,
    inputs: Any,
    *overrides: str,
    checkpoint: str = "best",
    **keys: Any,
) -> Tensor:
    """Prepare inputs as a batch for the run's model: decoded, resized, normalized, or tokenized and padded.

    Arguments are those of `predict`: `net(prepare(net, images))` returns the outputs that it interprets.
    """
    with borrowed("prepare"), _model_of(run, overrides, checkpoint, keys) as saved:
        batches = [batch for _, batch in prepared(saved, _inputs(saved, inputs), batch_size=sys.maxsize)]
        return torch.cat(batches)


def load(run: str | Path | Result, checkpoint: str = "best", *overrides: str, **keys: Any) -> nn.Module:
    """Load the trained model of a run, in evaluation mode, with averaged weights if the run has them.

    `predict` and `prepare` accept the module in place of a run, and prepare inputs as in training. Arguments
    are those of `evaluate`; `device="cpu"` is one of the keys.
    """
    with borrowed("load"), _model_of(run, overrides, checkpoint, keys) as saved:
        module, kept = saved.model, copy.copy(saved)
        del kept.model
        kept.state = kept.ema = None
        _loaded[module] = kept
        return module


def _read(
    recipe: str | None, overrides: tuple[str, ...], keys: Mapping[str, Any], *, sweeps: bool = False
) -> PythonWords:
    """Convert a call's arguments to overrides; `model` and `data` are omitted if they are None."""
    given = PythonWords(sweeps=sweeps)
    if recipe is not None:
        given.words.append(recipe if "=" in recipe else f"recipe={recipe}")
    given.words += overrides
    for key, value in keys.items():
        if value is not None or key not in ("model", "data"):
            given.add(key, value)
    return given


def _path_of(run: str | Path | Result) -> Path:
    return run.path if isinstance(run, Result) else Path(run).expanduser()


def _words_over(run: str | Path | Result, overrides: tuple[str, ...], keys: Mapping[str, Any]) -> PythonWords:
    """Return the overrides of a run's config; objects that the config names already need none."""
    text = config_of(find_checkpoint(_path_of(run))).read_text("utf-8")
    over = _read(None, overrides, {})
    give_again(run.objects if isinstance(run, Result) else {})
    for key, value in keys.items():
        given = _read(None, (), {key: value})
        over.objects |= given.objects
        if not given.objects or not all(path in text for path in given.objects):
            over.words += given.words
    return over


@contextlib.contextmanager
def _model_of(
    run: str | Path | Result | nn.Module, overrides: tuple[str, ...], checkpoint: str, keys: Mapping[str, Any]
) -> Iterator[PartialRun]:
    """Yield a run's model, or a loaded module, in evaluation mode, with its input preparation."""
    if not isinstance(run, nn.Module):
        over = _words_over(run, overrides, keys)
        with saved_run(_path_of(run), over.words, checkpoint=checkpoint) as saved:
            if saved.ema is not None:
                saved.ema.copy_to_model()
            yield saved
        return
    if (kept := _loaded.get(run)) is None:
        what, hint = f"ptfast.load has not given this {type(run).__name__}", "Give a run directory"
        raise ConfigError("C009", what, key="run", suggestion=hint)
    saved, trains = copy.copy(kept), run.training
    saved.model, saved.device = run, next(run.parameters()).device
    run.eval()
    try:
        yield saved
    finally:
        run.train(trains)


def _inputs(saved: PartialRun, given: Any) -> list[Any]:
    """Return the inputs as a list; for a text model, a string that is not the path of a file is a text."""
    if is_frame(given) and "table" in saved.info.extra:
        return given.astype(object).where(given.notna(), None).to_dict("records")
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    if saved.info.kind not in ("text", "tokens"):
        return several
    return [Text(x) if isinstance(x, str) and not Path(x).expanduser().exists() else x for x in several]
