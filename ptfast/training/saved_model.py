"""Load a trained model for evaluation, prediction or export, and evaluate it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptfast.config.read import load_config
from ptfast.config.schema import Config
from ptfast.core.auto_choices import AutoChoices, read_choices
from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_OK, ConfigError, DataError, PtfastError, SavedStateError
from ptfast.core.plain_display import Display
from ptfast.core.run_directory import plain_json
from ptfast.core.tensors.checkpoint_files import read_checkpoint
from ptfast.core.tensors.checkpoint_folders import MANIFEST, config_of, find_checkpoint, name_checkpoint
from ptfast.core.units import duration, listed
from ptfast.data.dataset import as_known, check_same_data, read_info
from ptfast.data.loaders.pipeline import open_side_stream
from ptfast.data.new_inputs import read_inputs
from ptfast.report.terminal.display import is_terminal, say, standard_output, terminal_display
from ptfast.tasks.added_metrics import MetricTable, as_lists
from ptfast.tasks.cross_entropy import CrossEntropyTask
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.techniques.ema.weight_averages import Average
from ptfast.training.checkpointer import Checkpointer
from ptfast.training.evaluate import evaluate, with_tta
from ptfast.training.stages import data_stage
from ptfast.training.stages.data_stage import choose_task, load_data, loader_options
from ptfast.training.stages.machine_stage import set_up_machine
from ptfast.training.stages.model_stage import build_plain_model, place_model
from ptfast.training.stages.partial_run import Checkpoint, PartialRun
from ptfast.training.user_code import naming_user_code


@contextlib.contextmanager
def saved_run(path: Path, words: Sequence[str] = (), *, checkpoint: str = "best") -> Iterator[PartialRun]:
    """Open a checkpoint of the run in `path`, or an export, with `words` as overrides of its config.

    At the end, standard error names the checkpoint. Errors inside name the place where their key was set.
    """
    folder = find_checkpoint(path, checkpoint)
    composed, config = load_config(config_of(folder), words, trains=False)
    with composed.naming_places():
        saved = load_saved(config, folder)
        assert saved.checkpoint is not None
        yield saved
        say(f"ptfast: {saved.checkpoint.label}", sys.stderr)


def load_saved(config: Config, checkpoint_folder: Path, student: PartialRun | None = None) -> PartialRun:
    """Build the model of a checkpoint, and the average of its weights if it has one. Needs no data.

    The model is on its device, in evaluation mode, with its own weights; `ema` can swap the average in. S001
    if the checkpoint is damaged, S002 if it is of another model. `student` sets the device and precision.
    """
    state = read_checkpoint(checkpoint_folder)
    folder = config_of(checkpoint_folder).parent
    run = PartialRun(
        folder=folder,
        device=student.device if student else resolve_device(config.device, Ranks()),
        config=config,
        choices=AutoChoices(read_choices(folder, state.facts)),
        state=state,
        checkpoint=Checkpoint(checkpoint_folder, name_checkpoint(checkpoint_folder, state.facts)),
    )
    if student is None:
        set_up_machine(run, trains=False)
    else:
        run.precision = student.precision
    run.progress.step = int(state.facts["progress"]["step"])
    run.checkpointer = Checkpointer(run)
    run.info = read_info(state.facts["info"])
    choose_task(run)
    build_plain_model(run)
    place_model(run)
    run.checkpointer.restore_model(state)
    if "ema" in state.training:
        # Parameters that never trained were not averaged.
        averaged = state.training["ema"]["averages"]
        for name, parameter in run.model.named_parameters():
            parameter.requires_grad_(name in averaged)
        run.ema = Average(run.model)
        run.ema.load_state_dict(state.training["ema"])
    run.model.eval()
    return run


def add_teacher(run: PartialRun) -> None:
    """Let the task also learn from the run `task.teacher` (distillation).

    Raises S003 or S004 if that run has changed or is missing, D003 to D005 if it does not fit.
    """
    task: Any = run.task
    if not isinstance(task, CrossEntropyTask) or task.teacher is None:
        return
    try:
        folder = find_checkpoint(Path(task.teacher))
        config = load_config(config_of(folder), trains=False)[1]
        teacher = load_saved(config.model_copy(update={"backend": run.config.backend}), folder, run)
        if teacher.ema is not None:
            teacher.ema.copy_to_model()
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        run.choices.note("teacher", digest)
        theirs, ours = ({**vars(info), **info.extra} for info in (teacher.info, run.info))
        as_known(teacher.info, run.info)
        for fact in ("num_classes", "tokenizer", "normalize"):
            if theirs.get(fact) != ours.get(fact):
                raise DataError("D004", f"the teacher was trained with a different {fact} than this data's")
        if run.choices.began_with("teacher", str) not in (None, digest):
            raise SavedStateError("S003", "its best checkpoint has changed since this run began")
    except PtfastError as problem:
        raise problem.changed(key="task.teacher", value=task.teacher) from None

    def taught(inputs: Any) -> Any:
        run.clock.to("teacher")
        with torch.inference_mode():
            outputs = task.forward(teacher.model, inputs)
        run.clock.to("forward")
        return outputs.clone()  # backward cannot keep a tensor of inference mode

    task.loss = partial(task.distilled, task.loss, taught)


def evaluations(
    saved: PartialRun, split: str | None = None, words: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, float], dict[str, MetricTable]]]:
    """Evaluate a trained model on all held-out splits and evaluation sets, or on one of them.

    Args:
        words: overrides of the run's config. Data that they name is read with the vocabulary, statistics and
            classes of training; if it has no splits, all of it is evaluated unless they set `data.val`.

    Yields:
        The split, its metrics, and metric results that are not single numbers.

    Raises:
        PtfastError: C005 if the data has no such split; D003, D004 or D005 if the model cannot read the other
            data; S003 if the training data has changed.
    """
    config, display, saved.display = saved.config, terminal_display(), Display(sys.stderr)
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    if any(key.split(".")[0] == "data" for key in keys):
        whole = "data.val" not in keys or config.data.val.value == 0
        data = load_data(config, known=saved.info, whole=whole)
        print(f"ptfast: data: {data.note}", file=sys.stderr)
    else:
        data = load_data(config, trained=saved.info)
        if changed := check_same_data(saved.info, data.info, trains=False):
            what = "has changed since training, so samples held out now may have been trained on"
            print(f"ptfast: warning: data: {what}: {changed}", file=sys.stderr)
        data = data_stage.add_evals(config, data, Ranks(), lambda line: say(f"ptfast: {line}", sys.stderr))
    saved.info = data.info
    choose_task(saved)
    saved.loader_options = loader_options(
        saved,
        worker_threads=config.backend.worker_threads,
        **config.dataloader.model_dump(include={"kind", "workers", "prefetch", "pin"}),
    )
    side = open_side_stream(saved.device) if config.dataloader.side_stream else None
    data_stage.build_eval_loaders(saved, data, side)
    loaders = saved.eval_loaders
    if not loaders:
        hint = "Hold some out with data.val=10%"
        raise ConfigError("C005", "the data has no split except train", key="data", suggestion=hint)
    if split is not None and split not in loaders:
        hint = f"There are: {', '.join(loaders)}"
        raise ConfigError("C005", "the data has no such split", key="--split", value=split, suggestion=hint)
    try:
        for name in [split] if split else loaders:
            tables: dict[str, MetricTable] = {}
            with naming_user_code(saved), display.status(f"evaluating {name}"):
                metrics = evaluate(saved, loaders[name], keep=tables.update)
            yield name, metrics, tables
    finally:
        for loader in loaders.values():
            loader.close()


def evaluate_saved(saved: PartialRun, split: str | None = None, words: Sequence[str] = ()) -> int:
    """Print the results of `evaluations`: a panel on a terminal, otherwise each split as JSON with tables."""
    step, redraws, rows = saved.progress.step, is_terminal(standard_output()), []
    start_s, checkpoint = time.perf_counter(), saved.checkpoint
    assert checkpoint is not None
    for name, metrics, tables in evaluations(saved, split, words):
        rows.append((name, listed(metrics)))
        rows += [
            (f"{name} {key}", f"{kind}, in the JSON: ptfast eval ... > FILE")
            for key, (kind, _) in tables.items()
        ]
        if not redraws:
            given = {key: as_lists(value) for key, (_, value) in tables.items()}
            line = {"step": step, "split": name, **saved.evaluated_weights, **metrics, **given}
            print(json.dumps(plain_json(line), allow_nan=False), flush=True)
    rows += [("time", duration(time.perf_counter() - start_s)), ("checkpoint", str(checkpoint.folder))]
    title = f"{saved.config.recipe or 'train'}: evaluated at step {step:,}"
    terminal_display().panel(title, rows)
    return EXIT_OK


def predictions(
    saved: PartialRun, inputs: Sequence[Any], **reading: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each input and the model's prediction; the arguments are those of `read_inputs`."""
    model = with_tta(saved)
    for names, batch in prepared(saved, inputs, **reading):
        # These settings apply to the whole thread, so they end before the caller gets the records.
        with torch.inference_mode(), saved.precision.autocast, naming_user_code(saved):
            records = saved.task.predict(model, batch)
        yield from zip(names, records, strict=True)


def prepared(saved: PartialRun, inputs: Sequence[Any], **reading: Any) -> Iterator[tuple[list[str], Tensor]]:
    """Return batches of new inputs for a trained model, on its device, with names; see `read_inputs`."""
    return read_inputs(
        saved.info,
        inputs,
        device=saved.device,
        channels_last=bool(saved.choices.get("rewrites.channels_last")),
        normalize=saved.config.data.normalize,
        **reading,
    )
