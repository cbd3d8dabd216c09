"""The checkpoints of a run: which there are, which of them is the last or the best, and which go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from ptfast.core.errors import ConfigError, SavedStateError
from ptfast.core.run_directory import CONFIG, read_json

MANIFEST = "manifest.json"
REPLACED = ".replaced"
"""Ending of the name of a hidden checkpoint whose step is saved once more."""
LINKS = ("best", "last")
"""Links to checkpoints in `saved`."""


def point(saved: Path, name: str, folder: Path) -> None:
    """Make `saved/name` a relative link to `folder`, in one step."""
    draft = saved / f".{name}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    draft.replace(saved / name)


def restore_links(saved: Path) -> None:
    """Put back the links `best` and `last`, in whose place a copy of the run (`scp -r`) has folders."""
    for copied in (path for name in LINKS if _is_folder(path := saved / name)):
        if (home := saved / f"step-{step_of(copied)}").exists():
            shutil.rmtree(hide(copied, ".removed"), ignore_errors=True)
        else:
            copied.rename(home)
        point(saved, copied.name, home)


def abandon_after(saved: Path, folder: Path) -> None:
    """Make `folder` the last checkpoint; newer ones are hidden now, and removed when the next is saved."""
    for newer in (each for each in list_checkpoints(saved) if step_of(each) > step_of(folder)):
        hide(newer, ".abandoned")
    point(saved, "last", folder)


def prune(saved: Path, keep: int, best_steps: Container[int] = ()) -> None:
    """Remove drafts and all checkpoints but the newest `keep` scheduled, the best and the linked ones."""
    for draft in saved.glob(".step-*"):
        shutil.rmtree(draft, ignore_errors=True)
    folders, followed = list_checkpoints(saved), {(saved / name).resolve() for name in LINKS}
    scheduled = [folder for folder in folders if not read_json(folder / MANIFEST).get("best_only")]
    for folder in folders:
        is_kept = folder in scheduled[:keep] or step_of(folder) in best_steps
        if not is_kept and folder.resolve() not in followed:
            shutil.rmtree(hide(folder, ".removed"), ignore_errors=True)
    best = saved / "best"
    if best.is_symlink() and not best.exists():
        best.unlink()


def list_checkpoints(saved: Path) -> list[Path]:
    """The checkpoint folders of a run, newest first."""
    if not saved.is_dir():
        return []
    # A copy may have a checkpoint under the name of a link alone. A replaced one counts only if a kill came
    # before the new one took its place.
    copies = [path for name in LINKS if _is_folder(path := saved / name)]
    found = [*copies, *saved.glob(f".step-*{REPLACED}"), *saved.glob("step-*")]
    folders = {step: path for path in found if path.is_dir() and (step := step_of(path)) >= 0}
    return [folders[step] for step in sorted(folders, reverse=True)]


def step_of(folder: Path) -> int:
    """The step of a checkpoint by its name, or by its manifest in place of a link; -1 for other folders."""
    if folder.name in LINKS:
        step = read_json(folder / MANIFEST).get("step")
        return step if type(step) is int else -1
    found = re.fullmatch(r"step-([0-9]+)", folder.name.removeprefix(".").removesuffix(REPLACED))
    return int(found[1]) if found else -1


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def config_of(folder: Path) -> Path:
    """The config of the run that a checkpoint belongs to; an export has its own."""
    own = folder / CONFIG
    return own if own.is_file() else folder.parent.parent / CONFIG


def find_checkpoint(path: Path, checkpoint: str = "best") -> Path:
    """The checkpoint of a run to use after training; a folder of one, such as an export, stands for itself.

    Args:
        checkpoint: `best`, which is the last one where none is kept as the best; `last`; or `step-N`.

    Raises:
        PtfastError: C005 for another name, C011 if `path` is a checkpoint already, S004 if it is not there.
    """
    details: dict[str, Any] = {"key": "--checkpoint", "value": checkpoint}
    if not re.fullmatch(r"best|last|step-\d+", checkpoint):
        hint = "Use best, last or step-N"
        raise ConfigError("C005", "no name of a checkpoint", **details, suggestion=hint)
    if (path / MANIFEST).is_file():
        if checkpoint not in ("best", path.resolve().name):
            what, hint = f"{path} is a checkpoint itself", "Give the run directory"
            raise ConfigError("C011", what, **details, suggestion=hint)
        return path.resolve()
    if (found := _named(path, checkpoint)) is not None:
        return found
    last = find_to_resume(path)
    if checkpoint in ("best", "last"):
        return last
    hint = f"There are: {', '.join(folder.name for folder in list_checkpoints(last.parent))}"
    raise SavedStateError("S004", f"not in {path}", **details, suggestion=hint)


def _named(path: Path, name: str) -> Path | None:
    """The checkpoint of this name in a run directory, or in a folder of checkpoints; None without one."""
    folders = (path / "saved" / name, path / name)
    return next((folder.resolve() for folder in folders if (folder / MANIFEST).is_file()), None)


def name_checkpoint(folder: Path, facts: Mapping[str, Any]) -> str:
    """A checkpoint with these `facts` in words, such as `best by val accuracy, step 312`."""
    step = f"step {facts['progress']['step']:,}"
    if "export" in facts:
        return str(facts["export"].get("checkpoint", step))
    by = f" by {facts['best_metric'].replace('.', ' ', 1)}" if "best_metric" in facts else ""
    for name, why in (("best", by), ("last", "")):
        if (folder.parent / name).resolve() == folder.resolve():
            return f"{name}{why}, {step}"
    return step


def find_to_resume(path: Path) -> Path:
    """The checkpoint to resume: `path` itself, or the last one of the run there; S004 if there is none."""
    if (path / MANIFEST).is_file():
        return path.resolve()
    if (last := _named(path, "last")) is not None:
        return last
    if newest := list_checkpoints(path / "saved"):
        return newest[0]
    what = "no checkpoint there" if path.exists() else "no such folder"
    hint = "Give a run directory or one of its saved/step-N folders"
    raise SavedStateError("S004", what, key=str(path), suggestion=hint)


def hide(folder: Path, ending: str) -> Path:
    """Rename a checkpoint that is to go: a kill while its files go must not leave one that is half there."""
    doomed = folder.with_name(f".{folder.name}{ending}")
    shutil.rmtree(doomed, ignore_errors=True)
    return folder.rename(doomed)


def check_length(step: int, old_steps: int, new_steps: int, extendable: bool) -> None:
    """Reject (S003) a length that `step`, or a schedule not `extendable` (the same so far), rules out."""
    if new_steps != old_steps and not extendable:
        lengths = f"the saved run has {old_steps:,} steps, not {new_steps:,}"
        what = f"{lengths}, and up to step {step:,} its schedule or curriculum depends on the length"
        hint = "Keep the length as it was, use schedule=constant, or start afresh with model.weights=RUN"
        raise SavedStateError("S003", what, key="run.resume", suggestion=hint)
    if step > new_steps:
        what = f"the saved run is at step {step:,} already, beyond the {new_steps:,} asked for"
        raise SavedStateError("S003", what, key="run.resume")
