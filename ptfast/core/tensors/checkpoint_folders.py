"""The checkpoint folders of a run: listing and pruning, and the links `last` and `best`."""

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
"""Suffix of a hidden checkpoint that a new save of its step replaces."""
LINKS = ("best", "last")
"""Links to checkpoints in `saved`."""


def point(saved: Path, name: str, folder: Path) -> None:
    """Make `saved/name` a relative link to `folder`, atomically."""
    draft = saved / f".{name}.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(folder.name)
    draft.replace(saved / name)


def restore_links(saved: Path) -> None:
    """Restore the links `best` and `last` in a copied run (`scp -r`), which has folders in their place."""
    for copied in (path for name in LINKS if _is_folder(path := saved / name)):
        if (home := saved / f"step-{step_of(copied)}").exists():
            shutil.rmtree(hide(copied, ".removed"), ignore_errors=True)
        else:
            copied.rename(home)
        point(saved, copied.name, home)


def abandon_after(saved: Path, folder: Path) -> None:
    """Make `folder` the last checkpoint, and hide newer ones, which the next save removes."""
    for newer in (each for each in list_checkpoints(saved) if step_of(each) > step_of(folder)):
        hide(newer, ".abandoned")
    point(saved, "last", folder)


def prune(saved: Path, keep: int, best_steps: Container[int] = ()) -> None:
    """Remove drafts and old checkpoints; keep the newest `keep` scheduled ones, the best and the linked."""
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
    """Return the checkpoint folders of a run, newest first."""
    if not saved.is_dir():
        return []
    # A copied run may have a checkpoint only under a link's name. A replaced checkpoint counts only if a
    # kill prevented the new one from taking its place.
    copies = [path for name in LINKS if _is_folder(path := saved / name)]
    found = [*copies, *saved.glob(f".step-*{REPLACED}"), *saved.glob("step-*")]
    folders = {step: path for path in found if path.is_dir() and (step := step_of(path)) >= 0}
    return [folders[step] for step in sorted(folders, reverse=True)]


def step_of(folder: Path) -> int:
    """Return a checkpoint's step from its name, or from its manifest if named as a link; -1 otherwise."""
    if folder.name in LINKS:
        step = read_json(folder / MANIFEST).get("step")
        return step if type(step) is int else -1
    found = re.fullmatch(r"step-([0-9]+)", folder.name.removeprefix(".").removesuffix(REPLACED))
    return int(found[1]) if found else -1


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def config_of(folder: Path) -> Path:
    """Return the config file of a checkpoint's run; an export has its own."""
    own = folder / CONFIG
    return own if own.is_file() else folder.parent.parent / CONFIG


def find_checkpoint(path: Path, checkpoint: str = "best") -> Path:
    """Return the checkpoint of a run to use after training; `path` may also be a checkpoint or an export.

    Args:
        checkpoint: `best` (the last one if no best one is kept), `last`, or `step-N`.

    Raises:
        PtfastError: C005 for another name, C011 if `path` is another checkpoint, S004 if it does not exist.
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
    """Return the checkpoint of this name in a run directory or a folder of checkpoints, or None."""
    folders = (path / "saved" / name, path / name)
    return next((folder.resolve() for folder in folders if (folder / MANIFEST).is_file()), None)


def name_checkpoint(folder: Path, facts: Mapping[str, Any]) -> str:
    """Describe a checkpoint with these `facts`: `best by val accuracy, step 312`."""
    step = f"step {facts['progress']['step']:,}"
    if "export" in facts:
        return str(facts["export"].get("checkpoint", step))
    by = f" by {facts['best_metric'].replace('.', ' ', 1)}" if "best_metric" in facts else ""
    for name, why in (("best", by), ("last", "")):
        if (folder.parent / name).resolve() == folder.resolve():
            return f"{name}{why}, {step}"
    return step


def find_to_resume(path: Path) -> Path:
    """Return the checkpoint to resume: `path` itself, or the last one of the run there; S004 without one."""
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
    """Rename a checkpoint before it is removed, because a kill meanwhile must not leave half of it."""
    doomed = folder.with_name(f".{folder.name}{ending}")
    shutil.rmtree(doomed, ignore_errors=True)
    return folder.rename(doomed)


def check_length(step: int, old_steps: int, new_steps: int, extendable: bool) -> None:
    """Reject (S003) a new length below `step`, or a change that alters the schedule (not `extendable`)."""
    if new_steps != old_steps and not extendable:
        lengths = f"the saved run has {old_steps:,} steps, not {new_steps:,}"
        what = f"{lengths}, and up to step {step:,} its schedule or curriculum depends on the length"
        hint = "Keep the length as it was, use schedule=constant, or start afresh with model.weights=RUN"
        raise SavedStateError("S003", what, key="run.resume", suggestion=hint)
    if step > new_steps:
        what = f"the saved run is at step {step:,} already, beyond the {new_steps:,} asked for"
        raise SavedStateError("S003", what, key="run.resume")
