"""Choose the directory of a run and the checkpoint it resumes from, before anything is created."""

from __future__ import annotations

import contextlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptfast.config.compose import Composed
from ptfast.config.files.frozen import changed_secrets, frozen_tree
from ptfast.config.files.yaml_file import read_yaml
from ptfast.config.schema import Config, changed_keys
from ptfast.core import run_directory
from ptfast.core.auto_choices import AutoChoices, read_choices
from ptfast.core.errors import ConfigError, PtfastError, SavedStateError
from ptfast.core.run_records import Environment, Summary, read_known
from ptfast.core.sections.origins import GIVEN

Tree = dict[str, Any]
"""A whole config as plain values."""


@dataclass(frozen=True)
class RunStart:
    """The directory of a run, and the checkpoint it resumes from."""

    folder: Path
    checkpoint_folder: Path | None = None
    finished: bool = False
    """Whether training is complete."""


def find_start(composed: Composed, config: Config) -> RunStart:
    """Decide on the run directory and the checkpoint to resume from, without creating anything.

    An existing run's config is compared as text: nothing named in it is imported.

    Raises:
        ConfigError: C011 if a new run would use the directory of another run, or of a user's own files.
        SavedStateError: S003, with the keys, if the config has changed; S004 if there is no checkpoint to
            resume from, or if the config or checkpoints of a run are gone.
    """
    from ptfast.core.tensors.checkpoint_files import read_facts
    from ptfast.core.tensors.checkpoint_folders import find_to_resume

    resume = config.run.resume
    given = Path(config.run.dir) if config.run.dir else None
    if given and not _holds_run(given):
        _check_lost(given)
        run_directory.check_free(given)
    root, name = Path(config.run.root), config.run.name or config.recipe or "train"
    fresh = RunStart(given or run_directory.new_folder(root, name))
    if resume == "never":
        if given and _holds_run(given):
            hint = "Continue with run.resume=auto, or choose another directory"
            raise ConfigError("C011", "already contains a run", key="run.dir", value=given, suggestion=hint)
        return fresh
    tree, _ = frozen_tree(composed)
    if resume == "auto":
        if given is not None:
            folder = given if _holds_run(given) else None
        else:
            folder = _newest_unfinished(root / name, tree)
        if folder is None:
            return fresh
        return _continue(folder, tree, config, *_newest_intact(folder), folder, composed.tree)
    checkpoint_folder = find_to_resume(Path(resume))
    source, facts = checkpoint_folder.parent.parent, read_facts(checkpoint_folder)
    if not (source / run_directory.CONFIG).is_file():
        hint = "Give a checkpoint inside a run directory, or start anew with model.weights=PATH"
        raise SavedStateError("S004", "its run directory is missing", key=resume, suggestion=hint)
    if given and given.resolve() != source.resolve() and _holds_run(given):
        raise ConfigError("C011", "already contains another run", key="run.dir", value=given)
    return _continue(source, tree, config, checkpoint_folder, facts, given or source, composed.tree)


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run in `folder`: its own, with run.resume and run.dir."""
    words = _command_line(folder)
    if any(GIVEN in word for word in words):
        return f"ptfast.train(..., run={{'resume': 'auto', 'dir': '{folder}'}}) with the same objects"
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in ("run.resume", "run.dir")]
    # `...` stands for the user's options of torchrun; a sweep writes `++` before the keys of its jobs.
    quoted = [word if word == "..." else shlex.quote(word.removeprefix("++")) for word in kept]
    return " ".join([*quoted, "run.resume=auto", shlex.quote(f"run.dir={folder}")])


def next_commands(folder: Path, task: str) -> list[str]:
    """Return commands that use a run's model; an empty list if it needs objects of the caller."""
    if any(GIVEN in word for word in _command_line(folder)):
        return []
    run = shlex.quote(str(folder))
    brought = "--prompt TEXT" if task == "language_modelling" else "FILE..."
    return [f"ptfast eval {run}", f"ptfast predict {run} {brought}", f"ptfast export {run} --out exported"]


def _command_line(folder: Path) -> list[str]:
    return read_known(folder / run_directory.ENVIRONMENT, Environment).get("command_line", [])


def _holds_run(folder: Path) -> bool:
    from ptfast.core.tensors.checkpoint_folders import list_checkpoints

    return (folder / run_directory.CONFIG).is_file() and bool(list_checkpoints(folder / "saved"))


def _check_lost(folder: Path) -> None:
    """Reject (S004) a new run in the folder of one whose config or checkpoints were removed."""
    from ptfast.core.tensors.checkpoint_folders import list_checkpoints

    if states := list_checkpoints(folder / "saved"):
        what = f"its config.yaml is gone; {states[0].name} is still there"
        hint = f"Put config.yaml back, or start in another folder with model.weights={states[0]}"
        raise SavedStateError("S004", what, key="run.dir", value=folder, suggestion=hint)
    summary = read_known(folder / run_directory.SUMMARY, Summary)
    # A run that failed may have had no checkpoint.
    if summary.get("steps") and "error" not in summary:
        what = f"contains metrics of a run of {summary['steps']:,} steps, but no checkpoint"
        hint = "Choose another run.dir, or remove what is left of it"
        raise SavedStateError("S004", what, key="run.dir", value=folder, suggestion=hint)


def _continue(
    source: Path,
    tree: Tree,
    config: Config,
    checkpoint_folder: Path,
    facts: Tree,
    folder: Path,
    secrets: Tree,
) -> RunStart:
    """Resume in `folder` from a checkpoint of the run in `source`, if its `facts` match the config.

    `secrets` is the config with the secret values that `tree` omits; a warning names changed ones.
    """
    before = read_yaml(source / run_directory.CONFIG).data
    # The data may move if the checkpoint records its content, which is compared after it is read.
    changed = changed_keys(before, tree, moves=bool(facts["info"]["extra"].get("contents")))
    if changed:
        hint = f"Set them back, or start anew from its weights: run.resume=never model.weights={source}"
        what = f"the config has changed since: {', '.join(changed)}"
        raise SavedStateError("S003", what, key=str(source), suggestion=hint)
    for key in changed_secrets(source, secrets):
        print(f"ptfast: warning: {key} has changed since {source} was started; continuing", file=sys.stderr)
    step = int(facts["progress"]["step"])
    # A finished run whose last checkpoint is lost resumes from the previous one.
    summary = read_known(source / run_directory.SUMMARY, Summary)
    reached = step >= summary.get("steps", 0) and _same_length(before, tree)
    if folder.resolve() == source.resolve() and reached and _has_ended(summary, before, tree):
        return RunStart(folder, checkpoint_folder, finished=True)
    _check_length(facts, AutoChoices(read_choices(source, facts)), before, config)
    return RunStart(folder, checkpoint_folder)


def _has_ended(summary: Tree, before: Tree, tree: Tree) -> bool:
    status = summary.get("status")
    return status == "finished" or (status == "stopped" and before.get("stop") == tree["stop"])


def _same_length(before: Tree, tree: Tree) -> bool:
    return all(before.get(key) == tree[key] for key in ("epochs", "steps"))


def _check_length(facts: Tree, choices: AutoChoices, before: Tree, config: Config) -> None:
    """Reject (S003) a length that does not fit the saved run, before any of its files is changed."""
    from ptfast.core.batch_plan import BatchPlan
    from ptfast.core.tensors.checkpoint_folders import check_length
    from ptfast.techniques.schedule.scheduled_run import build_schedule, build_shape

    step, old_steps = int(facts["progress"]["step"]), choices.began_with("total_steps", int) or 0
    new_steps, old_epochs = config.steps, before.get("epochs")
    if new_steps is None and isinstance(old_epochs, int) and old_epochs and config.epochs:
        new_steps = old_steps * config.epochs // old_epochs
    if new_steps is not None:
        # The data is not loaded yet: assume that the length of an epoch has not changed.
        epoch_steps = old_steps // old_epochs if isinstance(old_epochs, int) and old_epochs else None
        size = epoch_steps and epoch_steps * config.batch_size
        with contextlib.suppress(ConfigError):
            schedule = build_schedule(
                build_shape(config.schedule.target, float(config.optimizer.target.kwargs.get("lr") or 1)),
                warmup=config.schedule.warmup,
                total_steps=new_steps,
                plan=BatchPlan(size, config.batch_size),
            )
            check_length(step, old_steps, new_steps, schedule.begins_like(old_steps, step))


def _newest_unfinished(parent: Path, tree: Tree) -> Path | None:
    for folder in sorted(parent.glob("*"), key=lambda path: path.name, reverse=True):
        summary = read_known(folder / run_directory.SUMMARY, Summary)
        if summary.get("status") == "finished" or not _holds_run(folder):
            continue
        try:
            before = read_yaml(folder / run_directory.CONFIG).data
        except PtfastError:
            continue
        same = _same_length(before, tree) and not changed_keys(before, tree)
        if same and not _has_ended(summary, before, tree):
            return folder
    return None


def _newest_intact(folder: Path) -> tuple[Path, Tree]:
    """Return the newest intact checkpoint of a run, with its facts; damaged ones are reported."""
    from ptfast.core.tensors.checkpoint_files import read_facts
    from ptfast.core.tensors.checkpoint_folders import list_checkpoints

    states = list_checkpoints(folder / "saved")
    for checkpoint_folder in states[:-1]:
        try:
            return checkpoint_folder, read_facts(checkpoint_folder)
        except SavedStateError as error:
            print(f"ptfast: warning: {error} Continuing from an older checkpoint.", file=sys.stderr)
    return states[-1], read_facts(states[-1])
